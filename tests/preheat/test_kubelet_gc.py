"""The image garbage collection of a real kubelet takes what is not pinned."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import agent, kubelet_files, kubernetes, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MB = 1_000_000
NAMES = ("pulled", "other", "unpinned", "never")
PULLED, OTHER, UNPINNED, NEVER = (f"{kubernetes.HOST}/gc/{name}:v1" for name in NAMES)


@pytest.fixture(params=["kube", "newer"])
def greedy(request: pytest.FixtureRequest) -> Iterator[kubernetes.Kubernetes]:
    """Its kubelet wants nearly nothing to be on the disk, which is not that empty."""
    node: kubernetes.Kubernetes = request.getfixturevalue(request.param)
    config, ballast = node.root / "var/lib/kubelet/config.yaml", node.root / "mnt" / "ballast"
    before = config.read_text()
    narrow = {"imageGCHighThresholdPercent": 1, "imageGCLowThresholdPercent": 0}
    config.write_text(json.dumps(json.loads(before) | narrow))
    try:
        with ballast.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, 300 * MB)
        yield node
    finally:
        ballast.unlink(missing_ok=True)
        config.write_text(before)
        node.restart_kubelet()


@pytest.fixture
def on_node(area: Path, greedy: kubernetes.Kubernetes) -> Iterator[agent.Agent]:
    """An agent on that node, not started: its mounts, its processes, its containerd."""
    listed = [
        {"ref": PULLED},
        {"ref": UNPINNED},
        {"ref": NEVER, "pin": "never"},
    ]
    # The agent does not know what this kubelet wants: else it would give up pins itself.
    roomy = kubelet_files.written(area / "agent")
    made = agent.Agent(
        area / "agent", {"kubelet": roomy, "preheat": {"images": listed, "spread": 0}}
    )
    made.settings["admin"]["socket"] = "/run/nodeagent.sock"
    made.socket.symlink_to(greedy.root / "run/nodeagent.sock")
    try:
        yield made
    finally:
        made.end()


def image(node: agent.Agent, ref: str) -> dict[str, Any]:
    return next(dict(e) for e in node.get("/v1/images")["images"] if e["ref"] == ref)


def test_pinned_images_outlast_the_kubelets_collection_until_they_are_released(
    on_node: agent.Agent, greedy: kubernetes.Kubernetes
) -> None:
    node, kube = on_node, greedy
    command = (agent.COMMAND, "--config", str(node.config), "image")
    for number, name in enumerate(NAMES):
        kube.registry.push(f"gc/{name}", "v1", [registry.layer(name, MB, 90 + number)])
    hosts = "/etc/containerd/certs.d"
    kube.on_node("ctr", "-n", "k8s.io", "images", "pull", "--hosts-dir", hosts, OTHER)
    node.start("nsenter", "-t", str(kube.pid), "-m", "-p")
    for ref, pinned in ((PULLED, True), (UNPINNED, True), (NEVER, False)):

        def there(ref: str = ref, pinned: bool = pinned) -> bool:
            row = image(node, ref)
            return bool(row["state"] == "ready" and row["pinned"] is pinned)

        node.wait_for(there, 60, f"{ref} to be there")

    kube.collect_images(OTHER, NEVER)
    first = set(kube.images())
    kube.on_node(*command, "unpin", UNPINNED)
    kube.collect_images(UNPINNED)
    second = set(kube.images())
    heals = [e for e in node.get("/metrics").splitlines() if "preheat_heals_total" in e]
    node.end()
    released = kube.on_node(*command, "release-all", "--yes").stdout
    kube.collect_images(PULLED)
    last = set(kube.images())

    assert {PULLED, UNPINNED} <= first
    assert PULLED in second
    assert heals[-1].split()[-1] in ("0", "0.0"), "it went, and was put back"
    assert PULLED in released
    assert not {PULLED, OTHER, UNPINNED, NEVER} & last
