"""The faces of a running agent: command line, API, metrics, documents."""

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import kit.errors
from nodeagent import main
from tests.preheat import rig
from tests.testbed import agent as agents
from tests.testbed import containerd, proxy, registry

pytestmark = pytest.mark.timeout(150)

MB = 1_000_000


async def run(api: str, *words: str, status: int = 0) -> str:
    """A command's output, or its error; asserts its exit status.

    In this process, as starting Python a score of times is slow; test_resume.py runs the program.
    """
    runner = click.testing.CliRunner()
    done = await asyncio.to_thread(runner.invoke, main.cli, ["--api", api, *words])
    error = done.exception
    if isinstance(error, kit.errors.AgentError):
        assert error.exit_code == status, error
        return str(error)
    assert done.exit_code == status == 0, (done.output, error)
    return done.stdout


@pytest.fixture
def node(tmp_path: Path, daemon: containerd.Containerd) -> Iterator[agents.Agent]:
    """An agent that only preheats."""
    made = agents.Agent(tmp_path / "node")
    del made.settings["cache"]
    section = rig.section(daemon).model_dump(mode="json", exclude_none=True)
    made.settings["preheat"] = section
    try:
        yield made
    finally:
        made.end()


@pytest.mark.real
@pytest.mark.parametrize("release", ["trixie"], indirect=True)
async def test_the_command_line_does_what_it_says(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    node: agents.Agent,
    tmp_path: Path,
) -> None:
    images.push("fw/cli", "v1", [registry.layer("cli", 8 * MB, 401)])
    images.push(
        "fw/cli", "v2", [registry.layer("cli", 8 * MB, 401), registry.layer("x", 4 * MB, 402)]
    )
    one, two = f"{gate.host}/fw/cli:v1", f"{gate.host}/fw/cli:v2"
    await asyncio.to_thread(node.start)
    api = f"http://127.0.0.1:{node.port}"
    await rig.until(lambda: _ready(api))

    assert "No image is wanted" in await run(api, "image", "list")
    gate.rate = MB
    await run(api, "image", "preheat", one)
    await rig.until(lambda: gate.blob_bytes > MB / 2)
    shown = await run(api, "image", "show", one)
    paused = json.loads(await run(api, "image", "pause", one, "--json"))
    gate.rate = 0
    resumed = json.loads(await run(api, "image", "resume", one, "--json"))
    waited = json.loads(await run(api, "image", "preheat", one, "--wait", "--json"))
    refused = await run(api, "image", "cancel", one, status=8)
    gate.rate = MB
    gate.reset()
    await run(api, "image", "preheat", two, "--pin", "72h")
    await rig.until(lambda: gate.blob_bytes > MB / 2)
    await run(api, "image", "cancel", two)
    gate.rate = 0
    await rig.until(lambda: _listed(api, [one]))
    await run(api, "image", "preheat", two, "--pin", "72h", "--wait")
    plan = json.loads(await run(api, "image", "plan", "--json"))
    text = await run(api, "image", "plan")
    listed = json.loads(await run(api, "image", "list", "--json"))
    await run(api, "image", "unpin", two)
    after = json.loads(await run(api, "image", "list", "--json"))
    missing = await run(api, "image", "show", f"{gate.host}/no/such:v1", status=7)
    malformed = await run(api, "image", "pin", "ubuntu", status=3)
    metrics = await asyncio.to_thread(_get, api, "/metrics")

    assert "pulling" in shown
    assert "sha256:" in shown
    assert paused["state"] == "paused"
    assert resumed["state"] != "paused"
    assert (waited["state"], waited["pinned"]) == ("ready", True)
    assert "here already" in refused
    (reuse,) = (each for each in plan["reuse"] if each["ref"] == two)
    assert reuse["shared"] > 0.6 * reuse["total"]
    assert reuse["bases"] == [one]
    assert "shares 67 %" in text
    assert {row["ref"]: row["state"] for row in listed} == {one: "ready", two: "ready"}
    assert {row["keep"] for row in listed} == {"always", "for:259200"}
    assert [row["ref"] for row in after] == [one]
    assert "neither wanted nor pinned" in missing
    assert "names no registry" in malformed or "no image reference" in malformed
    assert "nodeagent_preheat_pulls_total 2.0" in metrics
    assert 'nodeagent_preheat_images{state="ready"} 1.0' in metrics
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics, text=True, capture_output=True, check=False
    )
    assert "preheat" not in check.stdout + check.stderr


def _get(api: str, path: str) -> str:
    with urllib.request.urlopen(api + path, timeout=10) as answer:
        return str(answer.read().decode())


async def _ready(api: str) -> bool:
    try:
        return bool(json.loads(await asyncio.to_thread(_get, api, "/readyz"))["ready"])
    except OSError:
        return False


async def _listed(api: str, refs: list[str]) -> bool:
    return [row["ref"] for row in json.loads(await run(api, "image", "list", "--json"))] == refs


@pytest.mark.real
@pytest.mark.parametrize("release", ["trixie"], indirect=True)
async def test_bad_requests_are_answered_with_what_is_wrong(
    daemon: containerd.Containerd, node: agents.Agent, gate: proxy.Proxy
) -> None:
    await asyncio.to_thread(node.start)
    api = f"http://127.0.0.1:{node.port}"
    await rig.until(lambda: _ready(api))
    bodies: list[Any] = [b"", b"[]", b"{", {"ref": 5}, {"ref": "a b"}, {"ref": "x" * 2000}]
    bodies += [
        {"ref": "r.e/a:b", "pin": each} for each in ("maybe", {"for": "x"}, 5, {"for": 1, "a": 2})
    ]
    for body in bodies:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = await asyncio.to_thread(_post, api + "/v1/images/preheat", data)
        assert status == 400, (body, answer)
        assert answer["error"]["remedy"]
    daemon.kill()
    await rig.until(lambda: _not_ready(api))
    status, answer = await asyncio.to_thread(
        _post, api + "/v1/images/pin", b'{"ref": "r.example/a:b"}'
    )

    assert status == 502
    assert "runtime" in answer["error"]["message"]


async def _not_ready(api: str) -> bool:
    await asyncio.to_thread(_post, api + "/v1/images/unpin", b'{"ref": "r.example/a:b"}')
    return not await _ready(api)


def _post(url: str, data: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, data=data, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
