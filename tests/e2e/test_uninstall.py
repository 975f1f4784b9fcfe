"""``nodeagent uninstall`` after an agent with all rooms did its work."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import mountinfo
from tests.testbed import cell, containerd, kubelet_files, pulling, registry, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

READER = "import sys; f = open(sys.argv[1], 'rb'); print('open', flush=True); sys.stdin.read()"


@contextlib.contextmanager
def runtime(folder: Path) -> Iterator[tuple[containerd.Containerd, str]]:
    """A containerd, and an image that it can pull."""
    with pulling.pulling(folder, "trixie") as made:
        made.images.push("team/a", "1", [registry.layer("1", 1_000_000, 7)])
        yield made.daemon, f"{made.host}/team/a:1"


@pytest.fixture
def worked(
    area: Path, node: Agent, tmp_path: Path
) -> Iterator[tuple[Agent, cell.Cell, containerd.Containerd]]:
    """An agent that served a view, pinned an image and attached the guard, and was stopped."""
    trees.plain(area / "source", 20)
    node.add_dir("a", area / "source")
    with cell.cell(tmp_path) as where, runtime(tmp_path) as (daemon, ref):
        node.settings["kubelet"] = kubelet_files.written(tmp_path / "kubelet")
        node.settings["preheat"] = {
            "socket": str(daemon.socket), "hosts_dir": str(daemon.certs), "spread": 0,
            "images": [{"ref": ref}],
        }  # fmt: skip
        node.settings["volumes"] = {
            "audit": {"enabled": False},
            "guard": cell.settings(where, mode="dry-run", names=["none"]),
        }
        node.start()
        node.wait_state("a", "complete")
        node.wait_for(lambda: pins(node), 60, "the pin")
        yield node, where, daemon


def pins(node: Agent) -> list[dict[str, Any]]:
    return [each for each in node.get("/v1/images")["images"] if each["pinned"]]


async def holds(daemon: containerd.Containerd) -> list[str]:
    kubelet = containerd.Kubelet(daemon.socket)
    try:
        leases = await kubelet.leases()
        return [lease.id for lease in leases if "nodeagent/role" in lease.labels]
    finally:
        await kubelet.close()


def kinds(node: Agent) -> set[str]:
    return {f"{each['room']} {each['kind']}" for each in node.cli_json("uninstall")["found"]}


async def test_nothing_of_ours_remains(
    worked: tuple[Agent, cell.Cell, containerd.Containerd], area: Path
) -> None:
    node, where, daemon = worked
    before = trees.records(area / "source")
    refused = node.cli("uninstall", "--yes")
    assert refused.returncode == 8
    assert "an agent runs" in refused.stderr
    assert node.stop() == 0
    listed = kinds(node)
    assert {
        "cache view", "cache store", "cache state", "preheat pin", "volumes guard program",
        "volumes pinned maps", "volumes state", "agent file", "agent folder",
    } <= listed  # fmt: skip
    shown = node.cli("uninstall").stdout
    assert str(node.view("a")) in shown
    assert "--yes removes them" in shown
    assert node.view("a").exists(), "listing removes nothing"
    assert await holds(daemon)

    (node.store / "not-ours").write_text("precious")
    file = next(path for path in node.view("a").rglob("*") if path.is_file())
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as reader:  # fmt: skip
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        done = node.cli("uninstall", "--yes")
        assert done.returncode == 6, done.stderr
        assert f"pid {reader.pid} " in done.stderr
        assert "nothing was removed" in done.stderr
        assert kinds(node) == listed
        reader.kill()

    # Interrupted: the state folder of the guard cannot go yet.
    subprocess.run(["chattr", "+i", str(node.state / "volumes")], check=True)
    try:
        done = node.cli("uninstall", "--yes")
    finally:
        subprocess.run(["chattr", "-i", str(node.state / "volumes")], check=True)
    assert done.returncode == 10, done.stderr
    assert str(node.state / "volumes") in done.stderr
    assert node.state.is_dir()
    done = node.cli("uninstall", "--yes")
    assert done.returncode == 0, done.stderr

    assert [m.target for m in mountinfo.read() if m.target.startswith(str(node.folder))] == []
    assert await holds(daemon) == []
    assert not where.guard().read().attached
    assert not where.pins.exists()
    assert os.listdir(node.store) == ["not-ours"]
    assert not node.views.exists()
    assert not node.state.exists()
    assert not node.socket.exists()
    assert trees.records(area / "source") == before
    again = json.loads(node.cli("uninstall", "--yes", "--json").stdout)
    assert [each for each in again["found"] if each["kind"] != "folder"] == []
    # The image itself is the runtime's and stays; a new agent begins from nothing.
    (node.store / "not-ours").unlink()
    node.start()
    node.wait_state("a", "complete")
    await waiting.until_async(lambda: pins(node), 60, "the pin of the new agent")
