"""``nodeagent status --watch``: alone, and in a real pseudo terminal."""

import asyncio
import contextlib
import json
import math
import os
import pty
import re
import signal
import socket
import termios
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from kit import terminal
from nodeagent import app, main
from nodeagent.api import server
from nodeagent.commands import status
from nodeagent.shown import overview
from tests.nodeagent import served as api
from tests.testbed import census, ports, waiting
from tests.testbed.agent import COMMAND

WIDE, HIGH = 150, 150
ENDS_SECONDS = 20.0
CLEARED = b"\x1b[2J\x1b[1;1H"


@pytest.fixture
def agent(tmp_path: Path) -> app.Agent:
    return census.agent(tmp_path)


def answer(agent: app.Agent) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(
        json.dumps(msgspec.to_builtins(overview.of(agent.state, 1e9)))
    )
    return shown


def texts(lines: Iterable[terminal.Line]) -> list[str]:
    return [
        line
        if isinstance(line, str)
        else "".join(part if isinstance(part, str) else part.text for part in line)
        for line in lines
    ]


@pytest.mark.parametrize(("width", "height"), [(200, 60), (100, 50), (80, 24)])
def test_as_much_is_shown_as_the_terminal_has_room_for(
    agent: app.Agent, width: int, height: int
) -> None:
    lines = list(status._lines(answer(agent)))
    shown = texts(status.fitting(lines, os.terminal_size((width, height))))
    assert sum(max(1, math.ceil(len(each) / width)) for each in shown) < height
    assert shown[:-1] == texts(lines)[: len(shown) - 1]
    assert shown[-1] == f"… {len(lines) - len(shown) + 1} more lines: nodeagent status"
    whole = os.terminal_size((width, 10 * len(lines)))
    assert status.fitting(lines, whole) == lines


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

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        os.close(self._ours)
        os.close(self._its)


def watch(port: int, *more: str) -> tuple[str, ...]:
    return (COMMAND, "--api", f"http://127.0.0.1:{port}", "status", "--watch", *more)


async def test_it_draws_what_changes_and_ends_well(agent: app.Agent) -> None:
    async with serving(agent) as port, Screen(*watch(port, "--interval", "1")) as screen:
        seen = await screen.shows("FINDINGS  10")
        assert screen.written.startswith(CLEARED)
        agent.state.findings.report("cache", [])
        await screen.shows("FINDINGS  8", after=seen)
        screen.type(b"\x03")  # Ctrl-C
        assert await screen.ends() == 0
    assert b"Traceback" not in screen.written
    assert b"---" not in screen.written


async def test_a_lost_agent_is_told_until_it_is_back(agent: app.Agent) -> None:
    async with contextlib.AsyncExitStack() as ends:
        (port,) = ports.free(1)  # one that no outgoing connection takes in between
        async with serving(agent, port):
            screen = await ends.enter_async_context(Screen(*watch(port, "--interval", "1")))
            seen = await screen.shows("dataset-00")
        seen = await screen.shows("NO ANSWER", after=seen)
        seen = await screen.shows("dataset-00", after=seen)  # what it said last stays
        assert b" old." in screen.written
        async with serving(agent, port):
            agent.state.findings.report("cache", [])
            await screen.shows("FINDINGS  8", after=seen)
            screen.type(b"\x03")
            assert await screen.ends() == 0
    assert b"Traceback" not in screen.written


async def test_a_silent_agent_does_not_keep_it_from_ending() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, answers none
        silent.setblocking(False)
        async with Screen(*watch(silent.getsockname()[1])) as screen:
            asked, _ = await asyncio.get_running_loop().sock_accept(silent)
            with asked:
                screen.type(b"\x03")
                assert await screen.ends() == 0


async def test_without_a_terminal_it_prints_one_below_the_other(agent: app.Agent) -> None:
    async with serving(agent) as port:
        made = await asyncio.create_subprocess_exec(
            *watch(port, "--interval", "1", "-o", "wide"),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert made.stdout is not None
        seen: list[str] = []
        async with asyncio.timeout(waiting.limit(30)):
            while sum(line.startswith("--- ") for line in seen) < 3:
                seen.append((await made.stdout.readline()).decode())
        made.send_signal(signal.SIGINT)
        _, error = await made.communicate()
    assert (made.returncode, error) == (0, b"")
    assert re.fullmatch(r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", seen[0])
    assert seen.count("FINDINGS  10\n") == 2
    assert not any("\x1b" in line for line in seen)
    assert "jobs read the SSD" in "".join(seen)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((("--interval", wrong), "--interval") for wrong in ("0", "61", "nan")),
        (("--json",), "prints text"),
        (("-o", "yaml"), "prints text"),
    ],
)
def test_what_cannot_be_watched_is_refused(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(main.cli, ["status", "--watch", *words])
    assert done.exit_code == 2
    assert said in done.output
