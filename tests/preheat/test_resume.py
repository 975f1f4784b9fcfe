"""Interrupted pulls of a 300 MB image go on where they were: the bytes are counted by the proxy."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.preheat import rig
from tests.testbed import containerd, ports, proxy, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

MB = 1_000_000
RATE = 60 * MB  # per connection; three layers at a time


@pytest.fixture(scope="session")
def big(images: registry.Registry) -> registry.Pushed:
    """300 MB in three layers."""
    sizes = (120, 120, 60)
    layers = [registry.layer(f"big{n}", s * MB, 100 + n) for n, s in enumerate(sizes)]
    return images.push("fw/big", "v1", layers)


async def half(gate: proxy.Proxy, pushed: registry.Pushed) -> None:
    await rig.until(lambda: gate.blob_bytes >= pushed.fetched // 2, 60.0)


async def test_without_a_lease_a_cancelled_pull_starts_from_zero(
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    big: registry.Pushed,
) -> None:
    """The control: what every preheater does today."""
    ref = f"{gate.host}/fw/big:v1"
    gate.rate = RATE
    task = asyncio.create_task(kubelet.pull(ref))
    await half(gate, big)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.until(lambda: _quiet(gate))
    gate.rate = 0
    gate.reset()

    await kubelet.pull(ref)

    assert gate.blob_bytes > 0.95 * big.fetched


async def _quiet(gate: proxy.Proxy) -> bool:
    before = gate.blob_bytes
    await asyncio.sleep(0.3)
    return gate.blob_bytes == before


async def test_a_paused_pull_resumes_with_at_most_a_tenth_above_the_missing_half(
    gate: proxy.Proxy, daemon: containerd.Containerd, big: registry.Pushed, tmp_path: Path
) -> None:
    ref = f"{gate.host}/fw/big:v1"
    gate.rate = RATE
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await half(gate, big)
        paused = await room.pause(ref)
        await rig.until(lambda: _quiet(gate))
        missing = big.fetched - gate.blob_bytes
        gate.rate = 0
        gate.reset()
        await room.resume(ref)
        await rig.state(room, ref, "ready", seconds=60)

    assert paused.state == "paused"
    assert gate.blob_bytes <= 0.6 * big.fetched
    assert gate.blob_bytes <= 1.1 * missing
    assert any(seen.range for seen in gate.requests())


async def test_a_limited_pull_keeps_its_rate_and_resumes_exactly(
    gate: proxy.Proxy, daemon: containerd.Containerd, big: registry.Pushed, tmp_path: Path
) -> None:
    ref = f"{gate.host}/fw/big:v1"
    limit = 60 * MB
    loop = asyncio.get_running_loop()
    more: dict[str, Any] = {"images": [{"ref": ref}], "bytes_per_second": limit}
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.until(lambda: gate.blob_bytes > 10 * MB)
        begun, at = gate.blob_bytes, loop.time()
        await half(gate, big)
        rate = (gate.blob_bytes - begun) / (loop.time() - at)
        await room.pause(ref)
        await rig.until(lambda: _quiet(gate))
    # What was under way in buffers when it was paused is all that may be lost.
    async with rig.running(daemon, tmp_path, **(more | {"bytes_per_second": None})) as room:
        inventory = await room.core.box.inventory()
        kept = sum(each.offset for each in inventory.ingests.values())
        kept += sum(inventory.content.get(each.digest, 0) for each in big.layers)
        gate.reset()
        await room.resume(ref)
        await rig.state(room, ref, "ready", seconds=60)

    assert rate <= 1.2 * limit
    assert kept > 0.4 * big.fetched
    assert gate.blob_bytes <= 1.1 * (big.fetched - kept)


async def test_a_pull_survives_sigkill_of_containerd(
    gate: proxy.Proxy, daemon: containerd.Containerd, big: registry.Pushed, tmp_path: Path
) -> None:
    ref = f"{gate.host}/fw/big:v1"
    gate.rate = RATE
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        await half(gate, big)
        daemon.kill()
        await rig.until(lambda: _quiet(gate))
        missing = big.fetched - gate.blob_bytes
        gate.rate = 0
        gate.reset()
        daemon.start()
        await rig.state(room, ref, "ready", seconds=60)

    assert gate.blob_bytes <= 0.6 * big.fetched
    assert gate.blob_bytes <= 1.1 * missing + 2 * MB  # what the killed process had in its buffers


@contextlib.contextmanager
def agent(folder: Path, section: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``nodeagent run`` as a process of its own."""
    (port,) = ports.free(1)
    config = folder / "agent.yaml"
    content = {
        "admin": {"listen": f"127.0.0.1:{port}"},
        "state_dir": str(folder / "state"),
        "preheat": section,
    }
    config.write_text(yaml.safe_dump(content))
    command = Path(sys.executable).with_name("nodeagent")
    with (folder / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [str(command), "--config", str(config), "run"], stdout=log, stderr=log
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


async def cli(api: str, *words: str) -> Any:
    """A command's JSON; asserts that it succeeded."""
    command = str(Path(sys.executable).with_name("nodeagent"))
    process = await asyncio.create_subprocess_exec(
        command, "--api", api, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, (words, out.decode(), err.decode())
    return json.loads(out)


async def test_a_pull_asked_for_by_hand_survives_sigkill_of_the_agent(
    gate: proxy.Proxy, daemon: containerd.Containerd, big: registry.Pushed, tmp_path: Path
) -> None:
    """The whole way: command line, agent process, containerd; the request itself survives too."""
    ref = f"{gate.host}/fw/big:v1"
    section = json.loads(rig.section(daemon).model_dump_json(exclude_none=True))
    gate.rate = RATE
    with agent(tmp_path, section) as (process, api):
        await rig.until(lambda: _answers(api))
        row = await cli(api, "image", "preheat", ref, "--json")
        await half(gate, big)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        await rig.until(lambda: _quiet(gate))
    missing = big.fetched - gate.blob_bytes
    gate.rate = 0
    gate.reset()
    with agent(tmp_path, section) as (process, api):
        await rig.until(lambda: _answers(api))
        row = await cli(api, "image", "preheat", ref, "--wait", "--json")
        listed = await cli(api, "image", "list", "--json")
        process.terminate()
        assert process.wait(15) == 0

    assert row["state"] == "ready"
    assert gate.blob_bytes <= 0.6 * big.fetched
    assert gate.blob_bytes <= 1.1 * missing
    (shown,) = listed
    assert shown["ref"] == ref
    assert shown["digest"] == big.top
    assert shown["state"] == "ready"
    assert shown["pinned"] is True
    assert shown["bytes_total"] == shown["bytes_done"] == big.fetched


async def _answers(api: str) -> bool:
    command = str(Path(sys.executable).with_name("nodeagent"))
    process = await asyncio.create_subprocess_exec(
        *(command, "--api", api, "image", "plan", "--json"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return await process.wait() == 0
