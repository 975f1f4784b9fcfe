"""Images out of a dataset on a real CephFS: the whole agent, its cache and a real containerd."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import bigset, ceph, containerd, layouts, registry
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

MB = 1_000_000
REF = "registry.example/fw/torch:v1"  # nobody listens there


@pytest.fixture
def fs(run_folder: Path, cluster: ceph.CephCluster) -> Iterator[Path]:
    """The root of the session's CephFS, mounted for writing."""
    with cluster.mounted(run_folder / f"fs-{os.urandom(3).hex()}") as mounted:
        yield mounted


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[containerd.Containerd]:
    server = containerd.Containerd(tmp_path / "containerd", "trixie")
    try:
        server.start()
        yield server
    finally:
        server.remove()


def image(node: Agent) -> dict[str, Any]:
    (row,) = node.get("/v1/images")["images"]
    return dict(row)


def failures(node: Agent) -> dict[str, int]:
    """Failed pulls by class."""
    found = re.findall(r'preheat_failures_total{kind="(\w+)"} (\d+)', node.get("/metrics"))
    return {kind: int(count) for kind, count in found if int(count)}


def served(node: Agent, snapshot: str) -> None:
    def there() -> bool:
        shown = node.dataset("images")
        return (shown["snapshot"], shown["state"], shown["update"]) == (snapshot, "complete", None)

    node.wait_for(there, 60, f"{snapshot} to be served")


async def test_an_image_comes_from_cephfs_whatever_its_dataset_does(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path, daemon: containerd.Containerd
) -> None:
    """It waits until the dataset is served. In the middle of its import the dataset becomes a
    generation that has another image of that name, and nothing of the old one but a layer."""
    low, *tops = (registry.layer(f"{n}", 10 * MB, 70 + n) for n in range(5))
    old = layouts.write(fs / "layouts" / "torch", "v1", [low, *tops[:2]])
    (fs / "layouts" / ".snap" / "s1").mkdir()
    shutil.rmtree(fs / "layouts" / "torch")
    new = layouts.write(fs / "layouts" / "torch", "v1", [low, *tops[2:]])
    (fs / "layouts" / ".snap" / "s2").mkdir()

    source = bigset.source(cluster, area / "secret", path="/layouts", snapshot="s1")
    node.cache["datasets"] = [{"name": "images", "freshness": "snapshot", "source": source}]
    preheat: dict[str, Any] = {
        "socket": str(daemon.socket), "hosts_dir": str(daemon.certs), "datasets": str(node.views),
        "images": [{"ref": REF, "source": "oci:images/torch"}],
        "spread": 0, "bytes_per_second": MB // 3,
        "kubelet": {"gc_high": 0.995, "gc_low": 0.99, "eviction_free": 0.001},
    }  # fmt: skip
    node.settings["preheat"] = preheat
    with cluster.frozen("mds"):
        node.start()
        node.wait_for(lambda: image(node)["failure_kind"], 30, "a look at the dataset")
        absent = image(node)

    def half() -> bool:
        row = image(node)
        return bool(row["state"] == "pulling" and 0 < row["bytes_done"] < row["bytes_total"] // 2)

    node.wait_for(half, 60, "the import to be under way")
    served(node, "s1")
    node.tell("images", "update", {"snapshot": "s2"})
    served(node, "s2")
    during = image(node)
    del preheat["bytes_per_second"]
    node.write()

    def ready() -> dict[str, Any] | None:
        row = image(node)
        return row if row["pinned"] and row["state"] == "ready" else None

    row = node.wait_for(ready, 60, "the image to be pinned")
    failed = failures(node)
    hand = containerd.Kubelet(daemon.socket)
    try:
        status = await hand.status(REF)
        content = await hand.content()
    finally:
        await hand.close()

    assert absent["failure_kind"] == "network"
    assert "its dataset images is not served on this node now" in absent["reason"]
    assert (during["state"], during["digest"]) == ("pulling", old.top)
    # What the old one lacks is known at once, and the one that has its name now need not wait.
    assert failed == {"not_found": 1}
    assert row["digest"] == new.top
    assert status is not None
    assert (status.id, status.pinned) == (new.config, True)
    assert {layer.digest for layer in new.layers} <= set(content)
