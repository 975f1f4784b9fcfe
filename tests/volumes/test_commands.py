"""What the commands do where the agent answers that it cannot answer yet."""

import json
import os
from pathlib import Path
from typing import Any

import click.testing
import pytest

import kit.errors
from kit import terminal
from kit.room import Request
from nodeagent.api import server
from nodeagent.commands import client
from volumes import api, commands, settings
from volumes.guard import without_agent

DOES_NOT_RUN = kit.errors.DegradedError("volumes", "it does not run (a fault)", "it is tried again")
GUARD = {"mode": "enforce", "proof": "denied", "wanted_mode": "enforce", "settings_mode": "off",
         "agent": "not running"}  # fmt: skip


class Context:
    """An agent whose room starts, hangs or fails; ``api``: on another node."""

    def __init__(self, folder: Path, api: str | None = None) -> None:
        self.api = api
        self.folder = folder

    def client(self) -> "Context":
        return self

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = json.dumps(server._error_body(DOES_NOT_RUN))
        return client.Client("unix:///agent")._decode(answer, server._STATUS[type(DOES_NOT_RUN)])

    def offline(self, room: str) -> tuple[settings.VolumesSettings, Path]:
        return settings.VolumesSettings(), self.folder


@pytest.fixture(autouse=True)
def _without_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def explained(name: str, *_: Any) -> dict[str, Any]:
        return {"device": {"device": name}, "agent": False}

    monkeypatch.setattr(commands, "_status_now", lambda *_: dict(GUARD))
    monkeypatch.setattr(without_agent, "explained", explained)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def run(context: Context, *words: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(commands.volume, words, obj=context)


@pytest.mark.parametrize(
    ("words", "shows"),
    [
        (("guard", "status", "--json"), '"mode": "enforce"'),
        (("explain", "rbd0", "--json"), '"device": "/dev/rbd0"'),
        (("ledger", "--json"), '"volumes": []'),
    ],
)
def test_reading_commands_do_without_an_agent_that_cannot_answer(
    tmp_path: Path, words: tuple[str, ...], shows: str
) -> None:
    done = run(Context(tmp_path), *words)
    assert done.exception is None
    assert shows in done.stdout
    assert "not running" not in done.stdout
    assert "it does not run (a fault); this is what shows without the agent" in done.stderr


@pytest.mark.parametrize(
    "words", [("guard", "set-mode", "off"), ("guard", "detach")], ids=["set-mode", "detach"]
)
def test_changing_commands_name_the_way_around_the_agent(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = run(Context(tmp_path), *words)
    assert isinstance(done.exception, kit.errors.DegradedError)
    assert "--direct" in done.exception.remedy


def test_without_root_the_remedy_names_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = run(Context(tmp_path), "guard", "status")
    assert isinstance(done.exception, kit.errors.DegradedError)
    assert "as root" in done.exception.remedy


def test_another_nodes_agent_is_not_answered_for(tmp_path: Path) -> None:
    done = run(Context(tmp_path, "https://other:9471"), "guard", "status")
    assert isinstance(done.exception, kit.errors.DegradedError)
    assert str(done.exception) == str(DOES_NOT_RUN)


async def test_agent_that_has_not_looked_names_the_way() -> None:
    class Starting:
        class guard:
            class in_force:
                looked = False

    with pytest.raises(kit.errors.DegradedError) as caught:
        await api._guard(Starting(), Request())  # type: ignore[arg-type]
    assert "--direct" in caught.value.remedy


@pytest.mark.parametrize(
    ("outcome", "code"), [("done", 0), ("dry-run", 0), ("gone", 0), ("refused", 8), ("failed", 4)]
)
def test_act_ends_with_what_became_of_it(
    outcome: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"outcome": outcome, "what": "unmount /a", "detail": "it is in use"}
    monkeypatch.setattr(terminal, "call", lambda *_: answer)
    done = click.testing.CliRunner().invoke(
        commands.volume, ["act", "leaked-mount/x", "--yes"], obj=object()
    )
    assert done.exit_code == code
    assert f"{outcome}: unmount /a (it is in use)" in done.output


def test_show_names_a_loop_device_that_uses_the_device() -> None:
    found = {
        "name": "rbd0", "number": "254:0", "image": "rbd/a", "state": "ok", "mounts": [],
        "elsewhere": [], "record": None, "cluster": None, "found": [],
        "users": [{"owner": {"pid": 0, "comm": "loop3"}, "ways": ["/publish/x"]}],
    }  # fmt: skip
    assert "  used by loop device loop3: /publish/x" in list(commands._device_lines(found))
