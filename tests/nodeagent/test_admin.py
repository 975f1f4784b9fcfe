"""The admin API without a node: routes, document, who may change things, reload."""

import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from nodeagent.admin import datasets, openapi, server

import cache.component
import kit.errors
import kit.room
from nodeagent import app, configfile

METHODS = {"get", "post", "put", "delete", "patch"}


@pytest.fixture
def agent(tmp_path: Path) -> app.Agent:
    (tmp_path / "token").write_text("s3cret\n")
    text = (
        f"admin: {{listen: '127.0.0.1:1', token_file: {tmp_path}/token}}\n"
        f"state_dir: {tmp_path}/state\n"
        f"cache: {{store: {tmp_path}/store, views: {tmp_path}/views}}\n"
    )
    (tmp_path / "a.yaml").write_text(text)
    return app.Agent(tmp_path / "a.yaml", configfile.load(tmp_path / "a.yaml"))


@pytest.fixture
def whole(agent: app.Agent, tmp_path: Path) -> app.Agent:
    """An agent with every room."""
    text = (tmp_path / "a.yaml").read_text()
    (tmp_path / "whole.yaml").write_text(
        f"{text}volumes: {{guard: {{mode: 'off'}}}}\npreheat: {{images: []}}\n"
    )
    return app.Agent(tmp_path / "whole.yaml", configfile.load(tmp_path / "whole.yaml"))


@pytest.fixture
async def client(agent: app.Agent) -> Any:
    async with TestClient(TestServer(server.application(agent))) as made:
        yield made


def routed(agent: app.Agent) -> set[tuple[str, str]]:
    found = set()
    for route in server.application(agent).router.routes():
        path = route.resource.canonical if route.resource else ""
        if route.method != "HEAD":
            found.add((route.method.lower(), path))
    return found


def documented() -> set[tuple[str, str]]:
    paths = openapi.document()["paths"]
    return {(method, path) for path, item in paths.items() for method in item if method in METHODS}


def test_every_route_is_documented_and_every_documented_path_is_a_route(whole: app.Agent) -> None:
    assert routed(whole) == documented()


def test_every_reference_of_the_document_leads_somewhere() -> None:
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


def test_every_operation_says_what_it_does_and_what_it_answers() -> None:
    for path, item in openapi.document()["paths"].items():
        for method, operation in item.items():
            if method in METHODS:
                assert operation.get("summary"), f"{method} {path}"
                assert operation.get("responses"), f"{method} {path}"
                both = [*item.get("parameters", []), *operation.get("parameters", [])]
                named = {p["name"] for p in both}
                assert set(re.findall(r"{(\w+)}", path)) <= named, path


async def test_changes_need_the_token_and_reads_do_not(client: TestClient[Any, Any]) -> None:
    assert (await client.get("/v1/datasets")).status == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}):
        answer = await client.post("/v1/datasets/a/warm", headers=headers)
        assert answer.status == 401
        assert "token" in (await answer.json())["error"]["cause"]
    right = {"Authorization": "Bearer s3cret"}
    assert (await client.post("/v1/datasets/a/warm", headers=right)).status == 404


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
async def test_a_page_in_a_browser_changes_nothing(
    client: TestClient[Any, Any], header: str
) -> None:
    headers = {"Authorization": "Bearer s3cret", header: "http://evil.example"}
    for method, path in (("POST", "/v1/datasets/a/warm"), ("DELETE", "/v1/datasets/a")):
        answer = await client.request(method, path, headers=headers)
        assert answer.status == 403
        assert "web pages" in (await answer.json())["error"]["cause"]


async def test_an_empty_token_file_lets_nobody_in(
    agent: app.Agent, client: TestClient[Any, Any]
) -> None:
    assert agent.settings.admin.token_file is not None
    agent.settings.admin.token_file.write_text("\n")
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
async def test_every_error_is_json_with_cause_and_exit_code(
    client: TestClient[Any, Any], method: str, path: str, status: int
) -> None:
    headers = {"Authorization": "Bearer s3cret"}
    answer = await client.request(method, path, headers=headers)
    assert answer.status == status
    error = (await answer.json())["error"]
    assert error["message"]
    assert error["exit_code"] >= 1


@pytest.mark.parametrize("body", ["{", "[]", '{"source": 1}', '{"sauce": true}', '"x"'])
async def test_a_body_that_is_not_understood_is_refused(
    client: TestClient[Any, Any], body: str
) -> None:
    headers = {"Authorization": "Bearer s3cret", "Content-Type": "application/json"}
    answer = await client.post("/v1/datasets/a/verify", data=body, headers=headers)
    assert answer.status == 400


async def test_probes_metrics_and_page_answer(client: TestClient[Any, Any]) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/", "/openapi.json", "/v1/findings"):
        answer = await client.get(path)
        # Nothing is started here: probes may say so, and nothing else.
        assert answer.status == 200 or (answer.status == 503 and path.endswith("z")), path
        assert await answer.read()


def test_what_can_change_live_does_and_what_cannot_is_named(agent: app.Agent) -> None:
    old = agent.settings
    assert old.cache is not None
    new = old.model_copy(
        update={
            "admin": old.admin.model_copy(update={"listen": "127.0.0.1:2"}),
            "state_dir": Path("/elsewhere"),
            "cache": old.cache.model_copy(update={"budget": 2**30}),
        }
    )
    agent._apply(new)
    assert agent.settings.cache is not None
    assert agent.settings.cache.budget == 2**30
    assert agent.settings.admin == old.admin
    assert agent.settings.state_dir == old.state_dir
    assert sorted(agent.refused) == ["admin", "state_dir"]
    agent._apply(old)
    assert agent.refused == []


def test_a_section_that_appears_or_goes_needs_a_restart(agent: app.Agent) -> None:
    agent._apply(configfile.parse("", "x"))
    assert "cache" in agent.refused
    assert agent.settings.cache is not None


def test_metrics_have_no_label_but_fixed_ones(agent: app.Agent) -> None:
    (component,) = [c for c in agent.components if isinstance(c, cache.component.Cache)]
    families = list(component.metrics())
    allowed = {"dataset", "kind", "state", "stage", "result"}
    for family in families:
        assert family.name.startswith("nodeagent_")
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= allowed


def test_limits_on_streams_and_pages_are_stated() -> None:
    assert 1 <= datasets.MOST_STREAMS <= 100
    assert 1 <= datasets.MOST_FAILURES <= 10_000


def test_a_component_has_the_whole_protocol(agent: app.Agent) -> None:
    needed = [name for name in vars(kit.room.Component) if not name.startswith("_")]
    for component in agent.components:
        for name in (*needed, "name"):
            assert hasattr(component, name)
    assert issubclass(kit.errors.NotFoundError, kit.errors.AgentError)
