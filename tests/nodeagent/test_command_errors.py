"""What a command says when it cannot do what was asked, and how it ends (docs/cli.md)."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from aiohttp.test_utils import TestClient, TestServer
from click import shell_completion

import kit.errors
import kit.room
from kit import terminal
from nodeagent import app, configfile, main, rooms
from nodeagent.api import server
from nodeagent.commands import client
from nodeagent.state import State
from tests.nodeagent import served
from tests.nodeagent.test_main import run

HERE = "/run/here.sock"


@pytest.mark.parametrize(
    ("text", "socket"),
    [
        (f"admin: {{socket: {HERE}}}\ncahce: {{}}\n", HERE),
        (f"admin:\n  socket: {HERE}\ncache: {{buget: 1}}\n", HERE),
        (f"admin:\n  # ours\n  socket: '{HERE}'\ncache: {{\n", HERE),
        (f"admin: {{socket: {HERE}}}\ncache: [\n", HERE),
        ("preheat:\n  socket: /run/containerd.sock\ncache: [\n", None),
        ("admin: {socket: here}\n", None),
        ("cahce: {}\n", None),
    ],
)
def test_a_slip_in_the_settings_leaves_the_agent_reachable(
    text: str, socket: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    found = main.Context(file, None).client()
    assert isinstance(found, client.Client)
    assert found.address == f"unix://{socket or '/run/nodeagent/admin.sock'}"
    assert capsys.readouterr().err == "", "the agent's own finding tells of the slip"


def test_without_a_settings_file_the_command_says_so(tmp_path: Path) -> None:
    with pytest.raises(kit.errors.SettingsError, match="there is no such settings file"):
        main.Context(tmp_path / "none", None).client()


@pytest.mark.parametrize("address", ["ftp://x", "127.0.0.1:9470", "unix:x", "x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(kit.errors.SettingsError) as raised:
        client.Client(address)
    assert "unix:///PATH or https://HOST:PORT" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
        (
            "dataset evict a --to abc",
            3,
            "--to: 'abc' is not one number and one unit; write it like",
        ),
        ("dataset warm", 2, "Missing argument 'NAME'"),
        ("status --watch --interval abc", 2, "'abc' is not a valid number from 1 to 60"),
        ("status --watch --interval 61", 2, "61 is not in the range 1<=x<=60"),
        ("--api ftp://x status", 3, "write unix:///PATH or https://HOST:PORT"),
        ("--api 127.0.0.1:9470 status", 3, "write unix:///PATH or https://HOST:PORT"),
        ("--api unix:///none status", 9, "no agent answers there (No such file or directory)"),
        ("--config /none status", 3, "there is no such settings file; name one with --config FILE"),
        ("config check /none", 3, "there is no such settings file; name one with --config FILE"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    code: int,
    told: str,
) -> None:
    monkeypatch.delenv("NODEAGENT_API", raising=False)
    assert run(monkeypatch, *line.split()) == code
    assert told in capsys.readouterr().err


async def test_no_right_to_the_socket_is_not_an_agent_that_is_away(tmp_path: Path) -> None:
    made = client.Client(f"unix://{tmp_path}/s")
    away = made.unreachable(FileNotFoundError(2, "No such file or directory"))
    assert away.exit_code == 9
    assert "systemctl status nodeagent" in away.remedy
    barred = made.unreachable(PermissionError(13, "Permission denied"))
    assert barred.exit_code == 4
    assert not isinstance(barred, kit.errors.UnreachableError)
    assert "admin.group" in barred.remedy


@pytest.mark.parametrize(
    ("path", "command", "section"),
    [
        ("/v1/datasets", "dataset", "cache"),
        ("/v1/datasets/a/warm", "dataset", "cache"),
        ("/v1/images", "image", "preheat"),
        ("/v1/volumes/guard", "volume", "volumes"),
        ("/v1/audit/devices", "volume", "volumes"),
    ],
)
async def test_a_component_that_is_off_says_so(
    agent: app.Agent, path: str, command: str, section: str
) -> None:
    async with served.served(State(agent.state.settings, running=[])) as asked:
        answer = await asked.get(path)
        error = (await answer.json())["error"]
        unknown = await asked.get("/v1/nothing")
    assert (answer.status, error["exit_code"]) == (409, 8)
    assert error["thing"] == f"nodeagent {command}"
    assert f"no section '{section}'" in error["cause"]
    assert unknown.status == 404


@pytest.mark.parametrize("room", rooms.ROOMS, ids=lambda room: room.name)
def test_every_path_of_every_component_is_known_when_it_is_off(room: kit.room.Room) -> None:
    assert {route.path.split("/")[2] for route in room.routes()} == set(room.heads)


async def test_the_metrics_port_says_where_the_api_is(agent: app.Agent) -> None:
    state = State(agent.state.settings, running=[])
    made = server.metrics_application(state, None, with_page=True)
    async with TestClient(TestServer(made)) as asked:
        for path in ("/v1/status", "/v1/datasets/a", "/openapi.json"):
            error = (await (await asked.get(path)).json())["error"]
            assert "these are the metrics" in error["cause"]
            assert f"unix://{agent.state.settings.admin.socket}" in error["remedy"]
        other = await (await asked.get("/nothing")).json()
    assert "these are the metrics" not in other["error"]["cause"]


def test_a_reader_of_the_output_that_leaves_ends_the_command_with_141() -> None:
    lines = "for _ in range(100000): terminal.say('x' * 80)"
    program = (
        "import click; from kit import terminal\n"
        f"@click.command()\ndef c():\n    {lines}\nterminal.run(c, 'c')"
    )
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$0" | head -1; exit ${{PIPESTATUS[0]}}', program],
        capture_output=True, text=True, cwd=Path(main.__file__).parents[1],
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def answering(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    async def call(_: object, *given: Any, **query: Any) -> Any:
        asked.append(given)
        return answer

    monkeypatch.setattr(client.Client, "call", call)
    monkeypatch.setenv("NODEAGENT_API", "unix:///s")
    return asked


@pytest.mark.parametrize(("verdict", "code"), [("blank", 0), ("unreadable", 5), ("timeout", 5)])
def test_probe_ends_with_what_it_could_read(
    monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    answer = {"device": "/dev/x", "verdict": verdict, "volume": "", "where": "start", "errno": 5}
    answering(monkeypatch, answer)
    assert run(monkeypatch, "volume", "probe", "x") == code


def test_findings_of_a_rule_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, {"findings": []})
    assert run(monkeypatch, "volume", "findings", "--rule", "leaked-mount") in (0, 7)
    assert run(monkeypatch, "volume", "findings", "--rule", "typo") == 7
    assert "there is no such rule" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "typed", "on_terminal", "code", "asked"),
    [
        ((), "y\n", True, 0, 1),
        ((), "n\n", True, 130, 0),
        (("--yes",), "", True, 0, 1),
        ((), "", False, 0, 1),
    ],
)
def test_remove_asks_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    typed: str,
    on_terminal: bool,
    code: int,
    asked: int,
) -> None:
    calls = answering(monkeypatch, {"in_settings": False})
    monkeypatch.setattr(terminal, "asks", lambda: on_terminal)
    monkeypatch.setattr(click.termui, "visible_prompt_func", lambda _: typed.strip())
    assert run(monkeypatch, "dataset", "remove", "a", *words) == code
    assert len(calls) == asked


def completed(words: list[str], start: str) -> list[str]:
    made = shell_completion.BashComplete(main.cli, {}, "nodeagent", "_NODEAGENT_COMPLETE")
    return [each.value for each in made.get_completions(words, start)]


@pytest.mark.parametrize(
    ("words", "answer", "names"),
    [
        (["dataset", "show"], {"datasets": [{"name": "coco"}, {"name": "b"}]}, ["coco"]),
        (["image", "unpin"], {"images": [{"ref": "c/a:1"}, {"ref": "b"}]}, ["c/a:1"]),
        (["volume", "show"], {"devices": [{"name": "crbd"}, {"name": "rbd1"}]}, ["crbd"]),
        (["volume", "act"], {"findings": [{"id": "c/1"}, {"id": "b"}]}, ["c/1"]),
    ],
)
def test_names_are_completed(
    monkeypatch: pytest.MonkeyPatch, words: list[str], answer: Any, names: list[str]
) -> None:
    answering(monkeypatch, answer)
    assert completed(words, "c") == names


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A socket that takes a connection and says nothing."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        yield tmp_path / "s"


def test_completion_is_silent_when_no_agent_answers(
    monkeypatch: pytest.MonkeyPatch, silent: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "COMPLETION_SECONDS", 0.1)
    assert completed(["--api", f"unix://{silent}", "dataset", "show"], "") == []
    assert completed(["--api", "unix:///none", "dataset", "show"], "") == []
    assert completed(["--config", "/none", "dataset", "show"], "") == []
    assert capfd.readouterr() == ("", "")


def test_version_has_a_short_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "-V") == 0
    assert "nodeagent" in capsys.readouterr().out


def test_the_manual_has_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "man") == 0
    page = capsys.readouterr().out
    assert page.startswith('.TH NODEAGENT 8 "" "nodeagent ')
    for words in ("nodeagent status", "nodeagent dataset evict", "nodeagent volume guard attach"):
        assert f'.SS "{words} ' in page
    assert "\n.TP\n\\-\\-to" in page
    assert page.count("\n.TP\n\\-h, \\-\\-help") == page.count(".SS ")
    assert configfile.ENVIRONMENT in page


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_line_is_folded_between_words(columns: int) -> None:
    line = "    to do: " + "correct it and run it again, or " * 8
    folded = list(terminal.folded(line, columns))
    assert all(terminal.width(each) <= columns for each in folded)
    assert " ".join("".join(map(str, folded)).split()) == " ".join(line.split())
    assert all(str(each).startswith("    ") for each in folded)


def test_a_coloured_beginning_keeps_its_colour() -> None:
    word = terminal.Coloured("critical", "red")
    first, *rest = terminal.folded((word, "  " + "why it is so " * 10), 40)
    assert first[0] is word
    assert rest and all(isinstance(each, str) for each in rest)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_table_is_as_wide_as_the_terminal(columns: int) -> None:
    rows = [("coco", "partial", "frozen-48f7ac31", "no room on the SSD for 12 files; " * 6)] * 2
    shown = list(terminal.table(("NAME", "STATE", "VERSION", "WHY"), rows, columns))
    assert all(len(line) <= columns for line in shown)
    words = [word for line in shown for word in line.split()]
    assert set(words) == {w for row in rows for cell in row for w in cell.split()} | {
        "NAME", "STATE", "VERSION", "WHY"
    }  # fmt: skip


def test_a_path_that_is_too_wide_for_a_table_stands_below_its_row() -> None:
    path = "/work/" + "x" * 70
    shown = list(terminal.table(("NAME", "STATE", "VIEW"), [("a", "complete", path)] * 2, 80))
    assert shown == ["NAME  STATE", "    VIEW", *["a     complete", f"    {path}"] * 2]


def test_a_table_that_nobody_watches_has_a_line_for_each_row() -> None:
    assert len(list(terminal.table(("A", "B"), [("x", "long " * 100)]))) == 2
