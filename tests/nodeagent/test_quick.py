"""Status requests that the HTTP library never sees: answered the same, and bounded the same."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from nodeagent import app, overview
from nodeagent.api import listeners, quick, server
from tests.testbed import waiting

ASKED = b"GET /v1/status HTTP/1.1\r\nHost: agent\r\n\r\n"
OTHER = b"GET /v1/findings HTTP/1.1\r\nHost: agent\r\n\r\n"
SECONDS = 60.0

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Doors:
    """The quick doors that listeners made."""

    def __init__(self) -> None:
        self.made: list[quick.Door] = []
        self.answered = 0

    def silent(self) -> int:
        return sum(len(each.silent) for each in self.made)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Doors:
    seen = Doors()

    class Door(quick.Door):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            seen.made.append(self)

        def message(self) -> bytes:
            found = super().message()
            seen.answered += 1
            return found

    monkeypatch.setattr(quick, "Door", Door)
    return seen


async def connect(agent: app.Agent, limit: int = 2**24) -> Connection:
    """``limit``: bytes that are read before somebody asks for them."""
    return await asyncio.open_unix_connection(str(agent.state.settings.admin.socket), limit=limit)


async def ask(connection: Connection, *parts: bytes) -> tuple[int, bytes]:
    """Status and body of one answer."""
    reader, writer = connection
    for part in parts:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), await asyncio.wait_for(reader.readexactly(length), SECONDS)


async def test_answer_is_the_librarys_and_the_connection_goes_on(
    agent: app.Agent, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "HELD_SECONDS", 3600.0)
    async with listeners.serving(agent.state):
        connection = await connect(agent)
        first = await ask(connection, ASKED)
        assert first == await ask(connection, ASKED)
        assert (doors.answered, doors.silent()) == (2, 1)
        status, body = await ask(connection, OTHER)
        assert (status, set(json.loads(body))) == (200, {"findings"})
        assert await ask(connection, ASKED) == first  # from the library
        assert (doors.answered, doors.silent()) == (2, 0)
        connection[1].close()
    assert first[0] == 200
    assert json.loads(first[1])["node"] == overview.node_name(agent.state)


@pytest.mark.parametrize(
    ("request_text", "wanted"),
    [
        (ASKED.replace(b"agent\r\n", b"agent\r\nConnection: close\r\n"), 200),
        (ASKED.replace(b"agent\r\n", b"agent\r\nContent-Length: 0\r\n"), 200),
        (ASKED.replace(b"status", b"status?a=b"), 200),
        (ASKED.replace(b"GET", b"POST"), 405),
        (ASKED.replace(b"Host:", b"Host :"), 400),
        (ASKED.replace(b"agent", b"a\0gent"), 400),
        (ASKED.replace(b"status", b"nothing"), 404),
    ],
)  # fmt: skip
async def test_what_is_not_exactly_such_a_request_is_the_librarys(
    agent: app.Agent, doors: Doors, request_text: bytes, wanted: int
) -> None:
    async with listeners.serving(agent.state):
        connection = await connect(agent)
        assert (await ask(connection, request_text))[0] == wanted
        assert doors.answered == 0
        connection[1].close()


async def test_request_that_comes_in_pieces_is_answered(agent: app.Agent, doors: Doors) -> None:
    async with listeners.serving(agent.state):
        connection = await connect(agent)
        connection[1].write(ASKED[:20])
        await waiting.until_async(lambda: doors.made[0].silent == {}, what="it to be handed over")
        assert (await ask(connection, ASKED[20:]))[0] == 200
        connection[1].close()


async def test_several_requests_at_once_are_all_answered(agent: app.Agent) -> None:
    async with listeners.serving(agent.state):
        connection = await connect(agent)
        connection[1].write(ASKED * 3)
        for _ in range(3):
            assert (await ask(connection))[0] == 200
        connection[1].close()


async def test_caller_without_a_role_is_refused_by_the_library(
    agent: app.Agent, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_peer", lambda _: (1, 4242))  # a stranger with the descriptor
    async with listeners.serving(agent.state):
        connection = await connect(agent)
        assert (await ask(connection, ASKED))[0] == 401
        assert (doors.answered, doors.silent()) == (0, 0)
        connection[1].close()


async def test_a_status_that_cannot_be_made_is_an_error_of_the_agent(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> overview.Overview:
        raise RuntimeError("no")

    monkeypatch.setattr(overview, "of", fails)
    async with listeners.serving(agent.state):
        connection = await connect(agent)
        status, body = await ask(connection, ASKED)
        assert (status, json.loads(body)["error"]["cause"]) == (500, "the agent failed")
        connection[1].close()


async def ends(connection: Connection) -> int:
    """Reads until the agent closes or drops it: so many bytes. TimeoutError."""
    count = 0
    async with asyncio.timeout(SECONDS):
        try:
            while data := await connection[0].read(2**20):
                count += len(data)
        except ConnectionResetError:
            pass
    connection[1].close()
    return count


async def test_silent_connection_is_closed(
    agent: app.Agent, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "IDLE_SECONDS", 0.2)
    async with listeners.serving(agent.state):
        await ends(await connect(agent))  # that never asked
        connection = await connect(agent)
        await ask(connection, ASKED)
        await ends(connection)
        assert doors.silent() == 0


async def test_caller_that_does_not_read_is_neither_read_nor_kept(
    agent: app.Agent, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much it asks: one answer is held for it, and it is dropped in the end."""
    monkeypatch.setattr(server, "WRITE_SECONDS", 1.0)
    monkeypatch.setattr(overview.Held, "answer", lambda _: b"a" * 10_000_000)
    async with listeners.serving(agent.state):
        connection = await connect(agent, limit=1024)
        connection[1].write(ASKED)
        await waiting.until_async(lambda: doors.answered == 1, what="an answer")
        connection[1].write(ASKED)
        await waiting.until_async(lambda: doors.silent() == 0, what="it to be dropped")
        assert doors.answered == 1
        assert await ends(connection) < 10_000_000


async def test_end_of_serving_closes_what_is_open(agent: app.Agent, doors: Doors) -> None:
    async with listeners.serving(agent.state):
        connections = [await connect(agent) for _ in range(3)]
        for each in connections:
            await ask(each, ASKED)
        assert doors.silent() == 3
    for each in connections:
        await ends(each)


def after(made: list[bytes]) -> Callable[[], bytes]:
    return lambda: made[-1]


def test_message_is_made_once_of_each_body() -> None:
    bodies = [b"one"]
    door = quick.Door(after(bodies), 1.0, 1.0)
    first = door.message()
    assert first.endswith(b"Content-Length: 3\r\n\r\none")
    assert door.message() is first
    bodies.append(b"three")
    assert door.message().endswith(b"Content-Length: 5\r\n\r\nthree")
