"""The command line against a running agent, and the metrics that follow."""

import asyncio
import json
import subprocess
from typing import Any

import click.testing
import pytest

import kit.errors
from nodeagent import main
from tests.preheat.rig import MB, Rig, until
from tests.testbed import agent, registry

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(150),
    pytest.mark.parametrize("release", ["trixie"], indirect=True),
]


class Cli:
    """``nodeagent image`` in this process: starting Python a score of times is slow."""

    def __init__(self, node: agent.Agent) -> None:
        self.api = f"unix://{node.socket}"

    async def run(self, *words: str, status: int = 0) -> str:
        """A command's output, or its error; asserts its exit status."""
        runner = click.testing.CliRunner()
        argv = ["--api", self.api, "image", *words]
        done = await asyncio.to_thread(runner.invoke, main.cli, argv)
        error = done.exception
        if isinstance(error, kit.errors.AgentError):
            assert error.exit_code == status, error
            return str(error)
        assert done.exit_code == status == 0, (done.output, error)
        return done.stdout

    async def json(self, *words: str) -> Any:
        return json.loads(await self.run(*words, "--json"))

    async def refs(self) -> list[str]:
        return [row["ref"] for row in await self.json("list")]


async def test_commands_pull_pause_cancel_and_release(rig: Rig, node: agent.Agent) -> None:
    layer = registry.layer("cli", 8 * MB, 401)
    one = rig.push("fw/cli:v1", [layer]).ref
    two = rig.push("fw/cli:v2", [layer, registry.layer("x", 4 * MB, 402)]).ref
    cli = Cli(node)

    assert "No image is requested" in await cli.run("list")
    rig.gate.rate = MB
    await cli.run("preheat", one)
    await until(lambda: rig.gate.blob_bytes > MB / 2)
    shown = await cli.run("show", one)
    paused = await cli.json("pause", one)
    rig.gate.rate = 0
    resumed = await cli.json("resume", one)
    waited = await cli.json("preheat", one, "--wait")
    refused = await cli.run("cancel", one, status=8)
    rig.gate.rate = MB
    rig.gate.reset()
    await cli.run("preheat", two, "--pin", "72h")
    await until(lambda: rig.gate.blob_bytes > MB / 2)
    await cli.run("cancel", two)
    rig.gate.rate = 0
    assert await cli.refs() == [one]
    await cli.run("preheat", two, "--pin", "72h", "--wait")
    plan = await cli.json("plan")
    text = await cli.run("plan")
    listed = await cli.json("list")
    await cli.run("unpin", two)
    after = await cli.refs()
    metrics = await asyncio.to_thread(node.get, "/metrics")

    assert "pulling" in shown
    assert "sha256:" in shown
    assert paused["state"] == "paused"
    assert resumed["state"] != "paused"
    assert (waited["state"], waited["pinned"]) == ("ready", True)
    assert "already on the node" in refused
    (reuse,) = (each for each in plan["reuse"] if each["ref"] == two)
    assert reuse["shared"] > 0.6 * reuse["total"]
    assert reuse["bases"] == [one]
    assert "shares 67 %" in text
    assert {row["ref"]: row["state"] for row in listed} == {one: "ready", two: "ready"}
    assert {row["keep"] for row in listed} == {"always", "for:259200"}
    assert after == [one]
    assert "nodeagent_preheat_pulls_total 2.0" in metrics
    assert 'nodeagent_preheat_images{state="ready"} 1.0' in metrics
    check = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics, text=True, capture_output=True, check=False
    )
    assert "preheat" not in check.stdout + check.stderr


async def test_preheat_without_a_pin_waits_and_succeeds(rig: Rig, node: agent.Agent) -> None:
    """Its request ends with its pull."""
    image = rig.push("fw/once:v1", size=MB)
    row = await Cli(node).json("preheat", image.ref, "--pin", "never", "--wait")
    assert row["state"] == "ready"
    assert row["bytes_done"] == row["bytes_total"]
    assert await rig.kubelet.status(image.ref) is not None


async def test_commands_name_what_is_wrong(rig: Rig, node: agent.Agent) -> None:
    cli = Cli(node)
    missing = await cli.run("show", f"{rig.gate.host}/no/such:v1", status=7)
    malformed = await cli.run("pin", "ubuntu", status=3)

    assert "nobody requests or pins it" in missing
    assert "not an image reference" in malformed
