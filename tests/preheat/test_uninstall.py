"""Whom ``nodeagent uninstall`` asks for pins, and what it finds there."""

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit.errors
from nodeagent.commands import uninstall as whole
from nodeagent.settings import Settings
from preheat import uninstall
from preheat.runtimes import base
from preheat.settings import PreheatSettings


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """A host whose runtimes' sockets are files that a test makes."""
    places = {name: tmp_path / name for name in ("usual", "k3s")}
    monkeypatch.setattr(uninstall, "SOCKETS", tuple(places.values()))
    default = PreheatSettings.model_fields["socket"]
    monkeypatch.setattr(default, "default", places["usual"])
    PreheatSettings.model_rebuild(force=True)
    yield places
    monkeypatch.undo()
    PreheatSettings.model_rebuild(force=True)


def asked(**section: Any) -> list[Path]:
    return uninstall.sockets(PreheatSettings(**section).as_json())[0]


def test_a_room_that_was_left_out_is_looked_for_in_every_runtime_of_the_host(
    sockets: dict[str, Path],
) -> None:
    with pytest.raises(kit.errors.NotFoundError):
        asked()
    sockets["k3s"].touch()
    assert asked() == [sockets["k3s"]]
    sockets["usual"].touch()  # k3s beside it has a runtime of its own
    assert asked() == [sockets["usual"], sockets["k3s"]]


def test_a_runtime_that_has_ended_is_said_and_fails_nothing(
    sockets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is still there, and nobody listens."""
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(sockets["usual"]))
    with socket.socket(socket.AF_UNIX) as running:
        running.bind(str(sockets["k3s"]))
        running.listen()
        assert asked() == [sockets["k3s"]]
        asked_now = list[Any]()

        def nothing(what: Any) -> list[Any]:
            what.close()
            asked_now.append(what)
            return []

        monkeypatch.setattr("asyncio.run", nothing)
        found = uninstall.find(PreheatSettings().as_json(), str(tmp_path))
    assert len(asked_now) == 1
    assert [(each["kind"], each["name"]) for each in found] == [
        ("container runtime", str(sockets["usual"]))
    ]
    assert found[0]["stays"].startswith("it does not run")


def test_a_runtime_that_the_settings_name_is_not_passed_over(
    sockets: dict[str, Path], tmp_path: Path
) -> None:
    sockets["k3s"].touch()
    named = str(tmp_path / "away")
    assert asked(socket=named) == [Path(named)]


@pytest.mark.parametrize("there", [False, True])
async def test_a_runtime_that_cannot_be_looked_into_is_said(
    sockets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """The settings have no section preheat any more. A socket is there, and nobody answers."""

    async def call(find: Any, section: Any, state_dir: str, *, deadline: float) -> Any:
        return [] if find is not uninstall.find else find(section, state_dir)

    monkeypatch.setattr("kit.child.call", call)
    monkeypatch.setattr("asyncio.run", refuse)
    if there:
        sockets["k3s"].touch()
    report = await whole.run(Settings(state_dir=tmp_path), False, lambda _: None)
    assert [each for each in report.troubles if "preheat" in each] == (
        ["preheat: nobody answers"] if there else []
    )


def refuse(what: Any) -> None:
    what.close()
    raise OSError("nobody answers")


def test_what_a_newer_agent_holds_is_listed_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = base.ImageInventory(newer_holds=1, unknown_holds=("nodeagent-pin-99",))

    @contextlib.asynccontextmanager
    async def runtime(*_: Any) -> AsyncIterator[Any]:
        async def look() -> base.ImageInventory:
            return inventory

        yield SimpleNamespace(inventory=look), ""

    monkeypatch.setattr("preheat.runtimes.containerd.connected", runtime)
    section = PreheatSettings(socket=tmp_path / "s").as_json()
    (tmp_path / "s").touch()
    (found,) = uninstall.find(section, str(tmp_path))
    assert (found["kind"], found["name"], found["stays"]) == ("lease", "nodeagent-pin-99", "")
