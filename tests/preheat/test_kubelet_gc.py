"""The image garbage collection of a real kubelet takes what is not pinned, wherever it is from."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import agent, kubernetes, layouts, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MB = 1_000_000
PULLED, OTHER = (f"{kubernetes.HOST}/gc/{name}:v1" for name in ("pulled", "other"))
# Nobody listens at this registry: they come from a layout.
IMPORTED, NEVER = (f"registry.example/gc/{name}:v1" for name in ("imported", "never"))


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
        {"ref": IMPORTED, "source": f"oci:{area}/layout"},
        {"ref": NEVER, "source": f"oci:{area}/layout", "pin": "never"},
    ]
    # The agent does not know what this kubelet wants: else it would give up pins itself.
    limits = {"gc_high": 0.995, "gc_low": 0.99, "eviction_free": 0.001}
    made = agent.Agent(
        area / "agent", {"preheat": {"images": listed, "spread": 0, "kubelet": limits}}
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
    on_node: agent.Agent, greedy: kubernetes.Kubernetes, area: Path
) -> None:
    node, kube = on_node, greedy
    command = (agent.COMMAND, "--config", str(node.config), "image")
    for number, name in enumerate(("pulled", "other")):
        kube.registry.push(f"gc/{name}", "v1", [registry.layer(name, MB, 90 + number)])
    for number, ref in enumerate((IMPORTED, NEVER)):
        layouts.write(area / "layout", ref, [registry.layer(ref, MB, 92 + number)])
    hosts = "/etc/containerd/certs.d"
    kube.on_node("ctr", "-n", "k8s.io", "images", "pull", "--hosts-dir", hosts, OTHER)
    node.start("nsenter", "-t", str(kube.pid), "-m", "-p")
    for ref, pinned in ((PULLED, True), (IMPORTED, True), (NEVER, False)):

        def there(ref: str = ref, pinned: bool = pinned) -> bool:
            row = image(node, ref)
            return bool(row["state"] == "ready" and row["pinned"] is pinned)

        node.wait_for(there, 60, f"{ref} to be there")

    kube.collect_images(OTHER, NEVER)
    first = set(kube.images())
    kube.on_node(*command, "unpin", IMPORTED)
    kube.collect_images(IMPORTED)
    second = set(kube.images())
    heals = [e for e in node.get("/metrics").splitlines() if "preheat_heals_total" in e]
    node.end()
    released = kube.on_node(*command, "release-all", "--yes").stdout
    kube.collect_images(PULLED)
    last = set(kube.images())

    assert {PULLED, IMPORTED} <= first
    assert PULLED in second
    assert heals[-1].split()[-1] in ("0", "0.0"), "it went, and was put back"
    assert PULLED in released
    assert not {PULLED, OTHER, IMPORTED, NEVER} & last
