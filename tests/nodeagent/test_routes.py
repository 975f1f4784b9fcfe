"""Routes of any room: requests, errors, roles, streams."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

import kit.errors
import kit.files
import kit.room
import kit.settings
from kit.room import Answer, Request, Role, Route, Stream
from nodeagent import STARTING, app
from nodeagent.api import access, server
from nodeagent.state import RunningRoom, State
from tests.nodeagent import served as api
from tests.testbed import waiting


async def test_handler_gets_path_query_and_body(agent: app.Agent) -> None:
    seen: list[Request] = []

    async def handler(_: api.Fake, request: Request) -> Answer:
        seen.append(request)
        return Answer({"a": 1}, 202)

    async with api.serving(agent, Route("POST", "/v1/x/{name}", handler, Role.OPERATE)) as client:
        answer = await client.post("/v1/x/a%20b?q=1&q=2", json={"k": True})
        assert (answer.status, await answer.json()) == (202, {"a": 1})
        await client.post("/v1/x/c")
    who = "somebody who may dangerous"
    assert seen == [
        Request({"name": "a b"}, {"q": "1"}, {"k": True}, who),
        Request({"name": "c"}, caller=who),
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (kit.errors.NotFoundError, 404),
        (kit.errors.InUseError, 409),
        (kit.errors.RefusedError, 409),
        (kit.errors.SettingsError, 400),
        (kit.errors.SourceError, 502),
        (kit.errors.HostError, 500),
        (kit.errors.AgentError, 500),
    ],
)
async def test_errors_have_their_status(
    agent: app.Agent, error: type[kit.errors.AgentError], status: int
) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        raise error("thing", "cause", "remedy")

    async with api.serving(agent, Route("GET", "/v1/x", handler)) as client:
        answer = await client.get("/v1/x")
        assert answer.status == status
        shown = (await answer.json())["error"]
        assert (shown["thing"], shown["exit_code"]) == ("thing", error.exit_code)


@pytest.mark.parametrize(("settled", "status"), [(False, 503), (True, 404)])
async def test_a_room_that_is_starting_does_not_say_that_a_thing_is_not_there(
    agent: app.Agent, settled: bool, status: int
) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        raise kit.errors.NotFoundError("dataset 'coco'", "it does not exist", "see the list")

    route = Route("GET", "/v1/x", handler)
    async with api.serving(agent, route, unsettled=not settled) as client:
        answer = await client.get("/v1/x")
        assert answer.status == status
        assert ("is starting" in (await answer.json())["error"]["cause"]) is not settled


@pytest.mark.parametrize("settled", [False, True])
async def test_a_room_that_is_starting_says_so_with_what_it_shows(
    agent: app.Agent, settled: bool
) -> None:
    """An empty list at the start is not the news that nothing is there."""

    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        return {"datasets": []}

    async with api.serving(agent, Route("GET", "/v1/x", handler), unsettled=not settled) as client:
        answer = await client.get("/v1/x")
        assert answer.headers.get(STARTING) == (None if settled else "fake")
        assert (answer.status, await answer.json()) == (200, {"datasets": []})


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_unknown_path_is_not_told_apart_by_strangers(agent: app.Agent, method: str) -> None:
    async with api.served(agent.state, None) as client:
        assert (await client.request(method, "/v1/nothing")).status == 401
    async with api.served(agent.state) as client:
        assert (await client.request(method, "/v1/nothing")).status == 404


async def test_role_decides_and_not_the_method(agent: app.Agent) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        return {}

    routes = (
        Route("GET", "/v1/secret", handler, Role.OPERATE),
        Route("POST", "/v1/question", handler, Role.READ),
    )
    room = kit.room.Room(
        "fake", "", kit.settings.Section, lambda *_: api.Fake(), routes=lambda: routes
    )
    state = State(agent.state.settings, running=[RunningRoom(room, api.Fake(), started=True)])
    async with api.served(state, Role.READ) as client:
        assert (await client.get("/v1/secret")).status == 403
        assert (await client.head("/v1/secret")).status == 403
        assert (await client.post("/v1/question")).status == 200
    async with api.served(state, Role.OPERATE) as client:
        assert (await client.get("/v1/secret")).status == 200


async def test_stream_is_lines_and_closed_when_the_client_leaves(agent: app.Agent) -> None:
    closed = asyncio.Event()

    async def items() -> AsyncGenerator[kit.room.Json, None]:
        try:
            number = 0
            while True:
                yield {"n": number}
                number += 1
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def handler(_: api.Fake, __: Request) -> Stream:
        return Stream(items())

    async with api.serving(agent, Route("GET", "/v1/x", handler)) as client:
        answer = await client.get("/v1/x")
        assert answer.content_type == "application/x-ndjson"
        assert [await answer.content.readline() for _ in range(2)] == [b'{"n": 0}\n', b'{"n": 1}\n']
        answer.close()
        await asyncio.wait_for(closed.wait(), waiting.limit(60))


async def test_streams_are_bounded_for_each_caller_and_in_all(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def items() -> AsyncGenerator[kit.room.Json, None]:
        yield {}
        await asyncio.Event().wait()

    async def handler(_: api.Fake, __: Request) -> Stream:
        return Stream(items())

    async def identify(request: Any) -> access.Caller:
        name = request.headers["X-Name"]
        return access.Caller(name, Role.READ, name)

    monkeypatch.setattr(access, "STREAMS_OF_CALLER", 2)
    monkeypatch.setattr(access, "MOST_STREAMS", 3)
    room = kit.room.Room(
        "fake", "", kit.settings.Section, lambda *_: api.Fake(),
        routes=lambda: (Route("GET", "/v1/x", handler), Route("GET", "/v1/y", handler)),
    )  # fmt: skip
    state = State(agent.state.settings, running=[RunningRoom(room, api.Fake(), started=True)])
    made = server.Door(identify, access.CallLog(agent.state.settings.state_dir))
    async with TestClient(TestServer(server.application(state, made))) as client:

        async def ask(name: str, path: str = "/v1/x") -> Any:
            return await client.get(path, headers={"X-Name": name})

        held = [await ask("a"), await ask("a", "/v1/y"), await ask("b")]
        assert [answer.status for answer in held] == [200, 200, 200]
        for name, why in (("a", "of this caller"), ("c", "3 streams are open")):
            refused = await ask(name)
            assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
            assert why in (await refused.json())["error"]["cause"]
        held[0].close()

        async def admitted() -> bool:
            answer = await ask("c")
            answer.close()
            return bool(answer.status == 200)

        await waiting.until_async(admitted, what="the place of a stream that has ended")
        for answer in held:
            answer.close()


async def test_stream_that_nobody_reads_ends_and_frees_its_place(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(access, "STREAMS_OF_CALLER", 1)
    closed = asyncio.Event()

    async def items() -> AsyncGenerator[kit.room.Json, None]:
        try:
            while True:
                yield {"x": "a" * 1_000_000}
        finally:
            closed.set()

    async def handler(_: api.Fake, __: Request) -> Stream:
        return Stream(items())

    async with api.serving(agent, Route("GET", "/v1/x", handler)) as client:
        url = client.make_url("/v1/x")
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
        writer.write(b"GET /v1/x HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(closed.wait(), waiting.limit(60))
        answer = await client.get("/v1/x")
        assert answer.status == 200
        answer.close()
        assert await reader.read(100)
        writer.close()
