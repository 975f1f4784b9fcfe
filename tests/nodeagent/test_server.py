"""The admin API without a node: routes, document, who may change things."""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

import kit.errors
import kit.room
import kit.settings
from kit.room import Answer, Request, Role, Route, Stream
from nodeagent import app
from nodeagent.api import openapi, server
from nodeagent.state import State

METHODS = {"get", "post", "put", "delete", "patch"}
TOKEN = {"Authorization": "Bearer s3cret"}


@pytest.fixture
async def client(agent: app.Agent) -> Any:
    async with TestClient(TestServer(server.application(agent.state))) as made:
        yield made


def routed(agent: app.Agent) -> set[tuple[str, str]]:
    found = set()
    for route in server.application(agent.state).router.routes():
        path = route.resource.canonical if route.resource else ""
        if route.method != "HEAD":
            found.add((route.method.lower(), path))
    return found


def documented() -> set[tuple[str, str]]:
    paths = openapi.document()["paths"]
    return {(method, path) for path, item in paths.items() for method in item if method in METHODS}


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
            if method in METHODS:
                assert operation.get("summary"), f"{method} {path}"
                assert operation.get("responses"), f"{method} {path}"
                both = [*item.get("parameters", []), *operation.get("parameters", [])]
                named = {p["name"] for p in both}
                assert set(re.findall(r"{(\w+)}", path)) <= named, path


async def test_changes_need_the_token(client: TestClient[Any, Any]) -> None:
    assert (await client.get("/v1/datasets")).status == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
        answer = await client.post("/v1/datasets/a/warm", headers=headers)
        assert answer.status == 401
        assert "token" in (await answer.json())["error"]["cause"]
    right = {"Authorization": "Bearer s3cret"}
    assert (await client.post("/v1/datasets/a/warm", headers=right)).status == 404


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
async def test_requests_from_web_pages_are_refused(
    client: TestClient[Any, Any], header: str
) -> None:
    headers = {"Authorization": "Bearer s3cret", header: "http://evil.example"}
    for method, path in (("POST", "/v1/datasets/a/warm"), ("DELETE", "/v1/datasets/a")):
        answer = await client.request(method, path, headers=headers)
        assert answer.status == 403
        assert "web pages" in (await answer.json())["error"]["cause"]


async def test_empty_token_file_admits_nobody(
    agent: app.Agent, client: TestClient[Any, Any]
) -> None:
    assert agent.state.settings.admin.token_file is not None
    agent.state.settings.admin.token_file.write_text("\n")
    answer = await client.post("/v1/datasets/a/warm", headers={"Authorization": "Bearer "})
    assert answer.status == 401


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/datasets/none", 404),
        ("GET", "/nothing", 404),
        ("PUT", "/v1/datasets", 405),
        ("GET", "/v1/datasets/none/failures?limit=0", 400),
        ("GET", "/v1/datasets/none/failures?limit=x", 400),
        ("POST", "/v1/datasets/none/warm", 404),
        ("DELETE", "/v1/datasets/none", 404),
    ],
)
async def test_errors_are_json_with_exit_code(
    client: TestClient[Any, Any], method: str, path: str, status: int
) -> None:
    headers = {"Authorization": "Bearer s3cret"}
    answer = await client.request(method, path, headers=headers)
    assert answer.status == status
    error = (await answer.json())["error"]
    assert error["message"]
    assert error["exit_code"] >= 1


@pytest.mark.parametrize("body", ["{", "[]", '{"source": 1}', '{"sauce": true}', '"x"'])
async def test_bad_body_is_refused(client: TestClient[Any, Any], body: str) -> None:
    headers = {"Authorization": "Bearer s3cret", "Content-Type": "application/json"}
    answer = await client.post("/v1/datasets/a/verify", data=body, headers=headers)
    assert answer.status == 400


async def test_own_routes_answer(client: TestClient[Any, Any]) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/", "/openapi.json", "/v1/findings"):
        answer = await client.get(path)
        # Nothing is started here: probes may say so, and nothing else.
        assert answer.status == 200 or (answer.status == 503 and path.endswith("z")), path
        assert await answer.read()


# --- any room


class Fake:
    """A component whose handlers are the tests'."""

    name = "fake"

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reconcile(self, settings: kit.settings.Section) -> list[str]:
        return []

    def health(self) -> kit.room.Health:
        return kit.room.Health(True, True)

    def metrics(self) -> list[Any]:
        return []


@contextlib.asynccontextmanager
async def serving(agent: app.Agent, *routes: Route) -> AsyncIterator[TestClient[Any, Any]]:
    room = kit.room.Room("fake", "", kit.settings.Section, lambda *_: Fake(), routes=lambda: routes)
    state = State(agent.state.settings, running=[(room, Fake())])
    async with TestClient(TestServer(server.application(state))) as client:
        yield client


async def test_handler_gets_path_query_and_body(agent: app.Agent) -> None:
    seen: list[Request] = []

    async def handler(_: Fake, request: Request) -> Answer:
        seen.append(request)
        return Answer({"a": 1}, 202)

    async with serving(agent, Route("POST", "/v1/x/{name}", handler, Role.OPERATE)) as client:
        answer = await client.post("/v1/x/a%2Fb?q=1&q=2", json={"k": True}, headers=TOKEN)
        assert (answer.status, await answer.json()) == (202, {"a": 1})
        await client.post("/v1/x/c", headers=TOKEN)
    assert seen == [Request({"name": "a/b"}, {"q": "1"}, {"k": True}), Request({"name": "c"})]


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
    async def handler(_: Fake, __: Request) -> kit.room.Json:
        raise error("thing", "cause", "remedy")

    async with serving(agent, Route("GET", "/v1/x", handler)) as client:
        answer = await client.get("/v1/x")
        assert answer.status == status
        shown = (await answer.json())["error"]
        assert (shown["thing"], shown["exit_code"]) == ("thing", error.exit_code)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_unknown_path_is_not_told_apart_without_the_token(
    client: TestClient[Any, Any], method: str
) -> None:
    assert (await client.request(method, "/v1/nothing")).status == 401
    assert (await client.request(method, "/v1/nothing", headers=TOKEN)).status == 404


async def test_role_decides_and_not_the_method(agent: app.Agent) -> None:
    async def handler(_: Fake, __: Request) -> kit.room.Json:
        return {}

    routes = (
        Route("GET", "/v1/secret", handler, Role.OPERATE),
        Route("POST", "/v1/question", handler, Role.READ),
    )
    async with serving(agent, *routes) as client:
        assert (await client.get("/v1/secret")).status == 401
        assert (await client.head("/v1/secret")).status == 401
        assert (await client.get("/v1/secret", headers=TOKEN)).status == 200
        assert (await client.post("/v1/question")).status == 200


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

    async def handler(_: Fake, __: Request) -> Stream:
        return Stream(items())

    async with serving(agent, Route("GET", "/v1/x", handler)) as client:
        answer = await client.get("/v1/x")
        assert answer.content_type == "application/x-ndjson"
        assert [await answer.content.readline() for _ in range(2)] == [b'{"n": 0}\n', b'{"n": 1}\n']
        answer.close()
        await asyncio.wait_for(closed.wait(), 10)


async def test_streams_of_a_route_are_bounded(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def items() -> AsyncGenerator[kit.room.Json, None]:
        yield {}
        await asyncio.Event().wait()

    async def handler(_: Fake, __: Request) -> Stream:
        return Stream(items())

    monkeypatch.setattr(server, "MOST_STREAMS", 2)
    async with serving(agent, Route("GET", "/v1/x", handler)) as client:
        held = [await client.get("/v1/x") for _ in range(2)]
        assert [answer.status for answer in held] == [200, 200]
        assert (await client.get("/v1/x")).status == 503
        for answer in held:
            answer.close()
