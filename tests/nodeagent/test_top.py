"""``nodeagent top``: what a frame shows, and the command itself in a real pseudo terminal."""

import asyncio
import contextlib
import io
import json
import os
import pty
import socket
import termios
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from rich.console import Console, RenderableType

import kit.errors
from nodeagent import app, overview, top
from nodeagent.api import server
from tests.nodeagent import served as api
from tests.testbed import census, ports, waiting
from tests.testbed.agent import COMMAND

WIDE, HIGH = 150, 45
ENDS_SECONDS = 20.0


@pytest.fixture
def agent(tmp_path: Path) -> app.Agent:
    return census.agent(tmp_path)


def answer(agent: app.Agent) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(json.dumps(overview.of(agent.state, 1e9).as_json()))
    return shown


def drawn(what: RenderableType, width: int = WIDE, height: int = HIGH) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height).print(what)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(f"{name} "))


def test_a_frame_shows_every_room(agent: app.Agent) -> None:
    lines = drawn(top.frame(answer(agent)))
    assert lines[0].startswith("This node needs a person now")
    for title in ("VOLUMES  The guard", "DATASETS  The store takes", "IMAGES  ", "FINDINGS  10"):
        assert any(line.startswith(title) for line in lines), title
    assert "complete" in row(lines, "dataset-03")
    assert "━" in row(lines, "dataset-03")
    assert "50%" in row(lines, "dataset-03")
    text = "\n".join(lines)
    assert "1000 B of 2.0 KiB" in text
    assert "jobs read the SSD" in text
    assert "not pinned, policy" in text
    assert "not refused" in row(lines, "rbd7")
    assert text.count("to do: look") == top.MOST_FINDINGS
    assert "7 more: nodeagent status" in text
    assert str(agent.state.settings.state_dir.parent) not in text  # paths are left out


def test_a_spark_is_of_the_latest_values() -> None:
    assert top.spark([0.0, 5.0, 10.0]) == "▁▅█"
    assert top.spark([0.0, 0.0]) == "▁▁"
    assert len(top.spark([1.0] * 100)) == top.SPARK_WIDTH
    assert top.spark([0.5, None, 1.0], 1.0) == "▅ █"
    assert top.spark([0.5, None], 1.0) == "▅ "


@pytest.mark.parametrize(("width", "height"), [(200, 60), (100, 50), (80, 40), (80, 24)])
def test_a_frame_fits_with_every_room(agent: app.Agent, width: int, height: int) -> None:
    shown = answer(agent)
    for each in shown["sections"]:
        each["rows"] = each["rows"] * 5
    console = Console(file=io.StringIO(), width=width, height=height)
    lines = drawn(top.fitting(shown, console, ""), width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    for name in ("rbd0", "dataset-00", "r.e/image-00:v1"):
        assert row(lines, name)
    assert sum(line.endswith(" more") for line in lines) == len(shown["sections"])


def test_texts_of_others_cannot_move_the_cursor(agent: app.Agent) -> None:
    shown = answer(agent)
    shown["headline"] = "a\x1b[2Jb [red]c[/red]\n"
    shown["sections"][0]["rows"][0][0]["text"] = "\x1b]0;evil\x07"
    text = "\n".join(drawn(top.frame(shown)))
    assert "\x1b" not in text
    assert "\\x1b[2Jb [red]c[/red]\\n" in text


def test_a_lost_agent_is_told_with_what_it_last_said(agent: app.Agent) -> None:
    lines = drawn(top.frame(answer(agent), "no agent answers there"))
    assert lines[0] == "NO ANSWER  no agent answers there"
    assert lines[1].endswith(" old.")
    assert any(line.startswith("dataset-00 ") for line in lines)
    assert drawn(top.frame(None, "gone")) == ["NO ANSWER  gone"]


# --- the command


@contextlib.asynccontextmanager
async def serving(agent: app.Agent, port: int | None = None) -> AsyncIterator[int]:
    made = server.application(agent.state, api.door(agent.state))
    async with TestServer(made, port=port) as listening:
        assert listening.port is not None
        yield listening.port


class Screen:
    """A command in a pseudo terminal of its own, and what it wrote there."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self.written = b""

    async def __aenter__(self) -> "Screen":
        self._ours, self._its = pty.openpty()
        termios.tcsetwinsize(self._its, (HIGH, WIDE))
        self.before = termios.tcgetattr(self._its)
        size = ("COLUMNS", "LINES")  # of the terminal that the tests run in
        environment = {name: value for name, value in os.environ.items() if name not in size}
        self._process = await asyncio.create_subprocess_exec(
            *("setsid", "--ctty", "--wait", *self._command),
            stdin=self._its, stdout=self._its, stderr=self._its,
            env={**environment, "TERM": "xterm-256color"},
        )  # fmt: skip
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    def _read(self) -> None:
        self.written += os.read(self._ours, 2**16)

    async def shows(self, text: str, after: int = 0) -> int:
        """How much was written when ``text`` was there, beyond the first ``after`` bytes."""
        await waiting.until_async(
            lambda: text.encode() in self.written[after:], 30, text,
            detail=lambda: self.written[-3000:],
        )  # fmt: skip
        return len(self.written)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    async def ends(self) -> int:
        async with asyncio.timeout(waiting.limit(ENDS_SECONDS)):
            return await self._process.wait()

    def is_put_back(self) -> bool:
        """Whether the terminal is as it was: modes, the screen of before, the cursor."""
        left = self.written.rpartition(b"\x1b[?1049l")
        return (
            termios.tcgetattr(self._its) == self.before
            and bool(left[1])
            and b"\x1b[?25h" in self.written
        )

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        os.close(self._ours)
        os.close(self._its)


def top_of(port: int, *more: str) -> tuple[str, ...]:
    return (COMMAND, "--api", f"http://127.0.0.1:{port}", "top", *more)


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
async def test_a_key_ends_it_and_the_terminal_is_put_back(agent: app.Agent, key: bytes) -> None:
    async with serving(agent) as port, Screen(*top_of(port)) as screen:
        await screen.shows("dataset-00")
        assert b"\x1b[?1049h" in screen.written  # the screen of before is kept
        screen.type(key)
        assert await screen.ends() == 0
        await waiting.until_async(screen.is_put_back, 10, "the terminal to be as it was")
    assert b"Traceback" not in screen.written


async def test_it_draws_what_changes(agent: app.Agent) -> None:
    async with serving(agent) as port, Screen(*top_of(port, "--interval", "1")) as screen:
        seen = await screen.shows("FINDINGS  10")
        agent.state.findings.report("cache", [])
        await screen.shows("FINDINGS  8", after=seen)
        screen.type(b"q")
        assert await screen.ends() == 0


async def test_a_lost_agent_is_shown_until_it_is_back(agent: app.Agent) -> None:
    async with contextlib.AsyncExitStack() as ends:
        (port,) = ports.free(1)  # one that no outgoing connection takes in between
        async with serving(agent, port):
            screen = await ends.enter_async_context(Screen(*top_of(port, "--interval", "1")))
            seen = await screen.shows("dataset-00")
        seen = await screen.shows("NO ANSWER", after=seen)
        seen = await screen.shows("dataset-00", after=seen)  # what it said last stays
        async with serving(agent, port):
            agent.state.findings.report("cache", [])
            await screen.shows("FINDINGS  8", after=seen)
            screen.type(b"q")
            assert await screen.ends() == 0
    assert b"Traceback" not in screen.written


async def test_a_busy_agent_does_not_keep_it_from_ending(agent: app.Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, answers none
        port = silent.getsockname()[1]
        async with Screen(*top_of(port)) as screen:
            await screen.shows("asking the agent")
            screen.type(b"q")
            assert await screen.ends() == 0


async def run(*command: str) -> tuple[int, str, str]:
    made = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, error = await made.communicate()
    assert made.returncode is not None
    return made.returncode, out.decode(), error.decode()


async def test_without_a_terminal_it_prints_one_frame(agent: app.Agent) -> None:
    async with serving(agent) as port:
        code, out, error = await run(*top_of(port))
        assert (code, error) == (0, "")
        assert "\x1b" not in out
        assert out.count("\nDATASETS ") == 1
        assert "dataset-09" in out
        async with Screen(*top_of(port, "--once")) as screen:
            assert await screen.ends() == 0
            await screen.shows("dataset-09")
        assert b"\x1b[?1049h" not in screen.written
    code, out, error = await run(*top_of(port))
    assert code == kit.errors.UnreachableError.exit_code
    assert "no agent answers there" in error


@pytest.mark.parametrize("interval", ["0", "61", "nan"])
async def test_the_interval_is_bounded(interval: str) -> None:
    code, _, error = await run(*top_of(1, "--interval", interval))
    assert code == 2, error
