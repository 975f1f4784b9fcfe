"""The admin API without a node or a listener: routes, document, roles, checks."""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import pytest
import structlog.testing
import yarl
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import kit.errors
import kit.files
import kit.room
import kit.settings
from kit.room import Request, Role, Route, Stream
from nodeagent import app, rooms
from nodeagent.api import access, server
from nodeagent.state import RunningRoom, State
from tests.nodeagent import served as api
from tests.testbed import ports, scripts, waiting

openapi = scripts.load("openapi")


@pytest.fixture
async def client(agent: app.Agent) -> Any:
    async with api.served(agent.state) as made:
        yield made


def routed(agent: app.Agent) -> set[tuple[str, str]]:
    found = set()
    for route in server.application(agent.state, api.door(agent.state)).router.routes():
        path = route.resource.canonical if route.resource else ""
        if route.method != "HEAD":
            found.add((route.method.lower(), path))
    return found


def documented() -> set[tuple[str, str]]:
    paths = openapi.document()["paths"]
    return {
        (method, path) for path, item in paths.items() for method in openapi.METHODS & item.keys()
    }


def test_routes_are_those_of_the_document(whole: app.Agent) -> None:
    assert routed(whole) == documented()


def test_document_references_resolve() -> None:
    document = openapi.document()

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [ref for value in node.values() for ref in references(value)]
        if isinstance(node, list):
            return [ref for value in node for ref in references(value)]
        return []

    found = references(document)
    assert found
    for reference in found:
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in node, reference
            node = node[part]


def test_document_describes_every_operation() -> None:
    for path, item in openapi.document()["paths"].items():
        for method, operation in item.items():
            if method in openapi.METHODS:
                assert operation.get("summary"), f"{method} {path}"
                answers = operation["responses"]
                assert {"400", "401", "403", "408", "421", "429", "500", "503", "504"} < set(
                    answers
                )
                assert ("413" in answers) is (method != "get"), f"{method} {path}"
                assert any(status < "300" for status in answers), f"{method} {path}"
                assert all(a.get("content") or a["$ref"] for a in answers.values())
                both = [*item.get("parameters", []), *operation.get("parameters", [])]
                named = {p["name"] for p in both}
                assert set(re.findall(r"{(\w+)}", path)) <= named, path


# --- roles


def concrete(path: str) -> str:
    return re.sub(r"{\w+}", "none", path)


@pytest.mark.parametrize("role", [None, *Role])
async def test_every_route_refuses_a_lower_role(whole: app.Agent, role: Role | None) -> None:
    """All routes of the running application, with every role: refused exactly below their own."""
    needed: dict[tuple[str, str], Role] = {}
    for each in whole.state.running:
        needed |= {(route.method, route.path): route.role for route in each.room.routes()}
    assert {str(each) for each in needed.values()} == set(Role)
    async with api.served(whole.state, role) as client:
        tried = 0
        for method, path in routed(whole):
            own = needed.get((method.upper(), path), Role.READ)
            refused = role is None or not role.includes(own)
            if not refused and own is not Role.READ:
                continue  # it would act on this machine; see the next test
            answer = await client.request(method, concrete(path))
            assert (answer.status in (401, 403)) is refused, (method, path, answer.status)
            assert answer.status == 401 or role is not None
            tried += 1
            answer.close()
        assert tried > 10


async def test_every_changing_route_admits_its_role(
    whole: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reached(*_: Any) -> kit.room.Json:
        return {"reached": True}

    for each in whole.state.running:
        routes = [
            kit.room.Route(route.method, route.path, reached, route.role)
            for route in each.room.routes()
            if route.role is not Role.READ
        ]
        fake = dataclasses.replace(each.room, routes=functools.partial(list, routes))
        state = State(whole.state.settings, running=[RunningRoom(fake, each.component)])
        for route in routes:
            async with api.served(state, route.role) as client:
                answer = await client.request(route.method, concrete(route.path))
                assert await answer.json() == {"reached": True}, route


def test_what_can_lose_protection_or_data_is_dangerous(whole: app.Agent) -> None:
    dangerous = {
        (route.method, route.path)
        for each in whole.state.running
        for route in each.room.routes()
        if route.role is Role.DANGEROUS
    }
    assert dangerous == {
        ("DELETE", "/v1/datasets/{name}"),
        ("POST", "/v1/datasets/{name}/evict"),
        ("POST", "/v1/datasets/{name}/manifest"),
        ("PUT", "/v1/volumes/guard/mode"),
        ("POST", "/v1/volumes/guard/detach"),
        ("POST", "/v1/volumes/allow-format"),
        ("POST", "/v1/volumes/ledger/accept"),
        ("POST", "/v1/audit/act"),
    }


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
async def test_requests_from_web_pages_are_refused(
    client: TestClient[Any, Any], header: str
) -> None:
    for method, path in (("POST", "/v1/datasets/a/warm"), ("DELETE", "/v1/datasets/a")):
        answer = await client.request(method, path, headers={header: "http://evil.example"})
        assert answer.status == 403
        assert "web pages" in (await answer.json())["error"]["cause"]


# --- checks


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/datasets/none", 404),
        ("GET", "/nothing", 404),
        ("PUT", "/v1/datasets", 405),
        ("GET", "/v1/datasets/none/failures?limit=0", 400),
        ("GET", "/v1/datasets/none/failures?limit=x", 400),
        ("GET", "/v1/datasets/none/failures?limit=%C2%B2", 400),
        ("POST", "/v1/datasets/none/warm", 404),
        ("DELETE", "/v1/datasets/none", 404),
    ],
)
async def test_errors_are_json_with_exit_code(
    client: TestClient[Any, Any], method: str, path: str, status: int
) -> None:
    answer = await client.request(method, path)
    assert answer.status == status
    error = (await answer.json())["error"]
    assert error["message"]
    assert error["exit_code"] >= 1


@pytest.mark.parametrize("path", ["/v1/status", "/metrics"])
async def test_what_a_client_expects_changes_no_answer(
    client: TestClient[Any, Any], path: str
) -> None:
    """Or it is answered before anybody has asked who calls, and no record has it."""
    answer = await client.get(path, headers={"Expect": "x"})
    assert answer.status == 200


@pytest.mark.parametrize(("version", "told"), [("1.1", True), ("1.0", False)])
async def test_who_waits_to_send_a_body_is_told_to(
    client: TestClient[Any, Any], version: str, told: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    head = f"POST /v1/datasets/none/warm HTTP/{version}\r\nHost: localhost\r\nContent-Length: 2"
    writer.write(f"{head}\r\nConnection: close\r\nExpect: 100-continue\r\n\r\n".encode())
    if told:
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    assert (await reader.read()).split()[1] == b"404"
    writer.close()


@pytest.mark.parametrize(
    "body",
    [
        *("{", "[]", '{"source": 1}', '{"sauce": true}', '"x"', '{"source": NaN}', "[" * 100_000),
        *(r'{"source": "\u0000"}', r'{"source": "\ud800"}', r'{"\ud800": true}', "\xff"),
        "1" * 5000,
    ],
)
async def test_bad_body_is_refused(client: TestClient[Any, Any], body: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await client.post("/v1/datasets/a/verify", data=body, headers=headers)
    assert answer.status == 400


@pytest.mark.parametrize(
    "name",
    ["a%2Fb", "..%2F..%2Fetc%2Fpasswd", "%2E%2E", "%2e", "a%00", "a%0Ab", "a" * 256],
)
async def test_names_that_are_not_names_are_refused(agent: app.Agent, name: str) -> None:
    reached = []

    async def handler(_: api.Fake, request: Request) -> kit.room.Json:
        reached.append(request.path["name"])
        return {}

    async with api.serving(
        agent, Route("DELETE", "/v1/x/{name}", handler, Role.DANGEROUS)
    ) as client:
        url = yarl.URL(f"{client.make_url('/')}v1/x/{name}", encoded=True)
        answer = await client.session.delete(url)
        assert answer.status in (400, 404)  # 404: the dots were resolved, so no name is left
    assert reached == []


async def test_long_or_hostile_query_is_refused(client: TestClient[Any, Any]) -> None:
    for value in ("%00", "a" * 4097):
        url = yarl.URL(f"{client.make_url('/')}v1/datasets/a?q={value}", encoded=True)
        assert (await client.session.get(url)).status == 400


async def test_too_large_body_is_refused(client: TestClient[Any, Any]) -> None:
    big = b'{"source": "' + b"a" * server.LONGEST_BODY + b'"}'
    answer = await client.post("/v1/datasets/a/verify", data=big)
    assert answer.status == 413
    assert (await answer.json())["error"]["exit_code"] >= 1


async def test_body_that_does_not_arrive_frees_the_handler(
    client: TestClient[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BODY_SECONDS", 0.1)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    answer = await client.post("/v1/datasets/a/verify", data=slowly())
    assert answer.status == 408
    answer.close()


async def test_slow_reading_is_ended_and_a_slow_change_continues(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDLER_SECONDS", 0.05)
    cancelled, finished = asyncio.Event(), asyncio.Event()
    go = asyncio.Event()

    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        try:
            await go.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        finished.set()
        return {}

    routes = (
        Route("GET", "/v1/x", handler),
        Route("POST", "/v1/x", handler, Role.OPERATE),
    )
    async with api.serving(agent, *routes) as client:
        assert (await client.get("/v1/x")).status == 504
        await asyncio.wait_for(cancelled.wait(), waiting.limit(60))
        cancelled.clear()
        answer = await client.post("/v1/x")
        assert answer.status == 504
        assert "continues" in (await answer.json())["error"]["cause"]
        with structlog.testing.capture_logs() as logged:

            def late() -> list[object]:
                return [each["call"] for each in logged if each["event"] == "api call ended late"]

            go.set()
            await asyncio.wait_for(finished.wait(), waiting.limit(60))
            await waiting.until_async(late)
        assert not cancelled.is_set()
        assert late() == ["POST /v1/x"]


@pytest.mark.parametrize(
    ("number", "status", "do"),
    [(errno.ENOSPC, 507, "free some space"), (errno.EDQUOT, 507, "free some space"),
     (errno.EROFS, 503, "mount options"), (errno.EIO, 503, "kernel log")],
)  # fmt: skip
async def test_a_disk_that_takes_nothing_is_named(
    agent: app.Agent, number: int, status: int, do: str
) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        raise OSError(number, os.strerror(number), "/state/datasets/a.json")

    async with api.serving(agent, Route("GET", "/v1/x", handler)) as client:
        answer = await client.get("/v1/x")
        error = (await answer.json())["error"]
    assert answer.status == status
    assert (error["thing"], error["cause"]) == ("/state/datasets/a.json", os.strerror(number))
    assert do in error["remedy"] and error["exit_code"] == 4


async def test_unexpected_error_is_json_without_details(agent: app.Agent) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        raise LookupError("s3cret")

    async with api.serving(agent, Route("GET", "/v1/x", handler)) as client:
        answer = await client.get("/v1/x")
        assert answer.status == 500
        assert "s3cret" not in await answer.text()


async def test_changing_calls_of_a_caller_are_limited(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access.Rate.__init__, "__defaults__", (0.001, 3))
    async with api.served(agent.state) as client:
        seen = [(await client.post("/v1/datasets/a/warm")).status for _ in range(5)]
        assert seen == [404, 404, 404, 429, 429]
        assert (await client.get("/v1/datasets")).status == 200


async def test_changing_calls_are_recorded_also_refused_ones(agent: app.Agent) -> None:
    log = agent.state.settings.state_dir / "api.log"
    calls = access.CallLog(agent.state.settings.state_dir)
    writer = asyncio.create_task(calls.write())
    for role in (Role.OPERATE, Role.READ, None):
        made = server.application(agent.state, api.door(agent.state, role, calls))
        async with TestClient(TestServer(made)) as client:
            await client.post("/v1/datasets/a/verify", json={"source": True})
            await client.get("/v1/datasets")
    await calls.flush()
    writer.cancel()
    assert not log.exists()  # nothing was changed
    entries = kit.files.last_entries(log.with_name("api-refused.log"), 10)
    assert [(e["who"], e["result"]) for e in entries[:2]] == [
        ("somebody who may operate", 404), ("somebody who may read", 403),
    ]  # fmt: skip
    assert entries[0].items() >= {
        "method": "POST", "path": "/v1/datasets/a/verify", "role": "operate",
        "sent": {"source": True},
    }.items()  # fmt: skip
    assert entries[0]["milliseconds"] >= 0
    assert [(e["method"], e["result"]) for e in entries[2:]] == [("POST", 401), ("GET", 401)]


async def recorded(agent: app.Agent, handler: kit.room.Handler, sent: Any) -> dict[str, Any]:
    """The line of one changing call."""
    calls = access.CallLog(agent.state.settings.state_dir)
    writer = asyncio.create_task(calls.write())
    route = Route("POST", "/v1/x", handler, Role.OPERATE)
    async with api.serving(agent, route, calls=calls) as client:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            await client.post("/v1/x", json=sent)
    await calls.flush()
    writer.cancel()
    (entry,) = kit.files.last_entries(agent.state.settings.state_dir / "api.log", 10)
    return entry


async def test_the_record_shows_fields_that_are_not_plain(agent: app.Agent) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        return {}

    sent = {"ref": "h/a:1", "pin": {"for": "72h"}, "many": [1, "a"], "none": None}
    shown = {"ref": "h/a:1", "pin": '{"for": "72h"}', "many": '[1, "a"]', "none": "null"}
    assert (await recorded(agent, handler, sent))["sent"] == shown


async def test_a_long_text_is_shown_by_both_ends(agent: app.Agent) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        return {}

    shown = (await recorded(agent, handler, {"device": "/dev/" + "./" * 1000 + "rbd0"}))["sent"]
    assert shown["device"].startswith("/dev/./")
    assert shown["device"].endswith("/./rbd0")
    assert len(shown["device"]) <= server.LONGEST_NOTE


async def test_a_change_whose_backend_breaks_its_connection_is_recorded(agent: app.Agent) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        raise BrokenPipeError("the container runtime has gone")

    assert (await recorded(agent, handler, {"a": 1}))["sent"] == {"a": 1}


async def test_a_change_that_the_end_of_the_agent_breaks_off_is_recorded(agent: app.Agent) -> None:
    async def handler(_: api.Fake, __: Request) -> kit.room.Json:
        raise asyncio.CancelledError

    entry = await recorded(agent, handler, {"a": 1})
    assert (entry["result"], entry["sent"]) == (server.NO_ANSWER, {"a": 1})


async def test_calls_that_a_caller_may_not_make_are_limited_too(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access.Rate.__init__, "__defaults__", (0.001, 3))
    monkeypatch.setattr(server, "WAIT_SECONDS", 0.0)
    door = api.door(agent.state, Role.READ)
    async with TestClient(TestServer(server.application(agent.state, door))) as client:
        seen = [(await client.post("/v1/datasets/a/warm")).status for _ in range(5)]
    assert seen == [403, 403, 403, 429, 429]


def changing_routes() -> list[Route]:
    routes = [route for room in rooms.ROOMS for route in room.routes()]
    return [route for route in routes if route.role is not Role.READ]


@pytest.mark.parametrize("route", changing_routes(), ids=lambda r: f"{r.method} {r.path}")
async def test_every_changing_call_refuses_a_field_that_it_does_not_know(route: Route) -> None:
    """Else a few such fields keep what the call did out of the record."""
    asked = Request({"name": "a", "device": "a"}, {}, {"x0": "-"})
    with pytest.raises(kit.errors.SettingsError, match="unknown field 'x0'"):
        await route.handler(None, asked)


async def test_a_stream_ends_with_the_role_of_its_caller(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ASK_AGAIN_SECONDS", 0.0)
    asked = 0

    async def caller(_: Any) -> access.Caller:
        nonlocal asked
        asked += 1
        return access.Caller("alice", Role.READ if asked < 4 else None, "alice")

    async def handler(_: Any, __: Any) -> Stream:
        async def items() -> AsyncGenerator[Any, None]:
            for number in itertools.count():
                yield {"number": number}
                await asyncio.sleep(0)

        return Stream(items())

    async with api.serving(agent, Route("GET", "/v1/x", handler), caller=caller) as client:
        answer = await client.get("/v1/x")
        assert answer.status == 200
        lines = (await answer.text()).splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1]


async def test_a_client_that_leaves_a_stream_is_no_error(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ASK_AGAIN_SECONDS", 0.0)
    ended, seen = asyncio.Event(), list[Any]()

    async def caller(request: Any) -> access.Caller:
        assert request.transport is not None  # as on the socket, which asks the kernel
        seen.append(request)
        return access.Caller("root", Role.READ, "root")

    async def handler(_: Any, __: Any) -> Stream:
        async def items() -> AsyncGenerator[Any, None]:
            try:
                yield {}
                await waiting.until_async(lambda: seen[0].transport is None, 30, "it to leave")
                yield {}
            finally:
                ended.set()

        return Stream(items())

    # Not by aiohttp's test server: that one cancels the handler of a client that leaves.
    (port,) = ports.free(1)
    runner = web.AppRunner(api.application(agent, Route("GET", "/v1/x", handler), caller=caller))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        with structlog.testing.capture_logs() as lines:
            async with aiohttp.ClientSession() as session:
                answer = await session.get(f"http://127.0.0.1:{port}/v1/x")
                assert await answer.content.readline() == b"{}\n"
                answer.close()
            await ended.wait()
    finally:
        await runner.cleanup()
    assert [each for each in lines if each["log_level"] == "error"] == []


async def test_own_routes_answer(client: TestClient[Any, Any]) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/", "/openapi.json", "/v1/findings"):
        answer = await client.get(path)
        # Nothing is started here: probes may say so, and nothing else.
        assert answer.status == 200 or (answer.status == 503 and path.endswith("z")), path
        assert await answer.read()
