"""The room on real containerd: what users see when images are wanted, removed, moved, broken."""

from pathlib import Path

import pytest

from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

pytestmark = pytest.mark.real

MiB = 1024**2


async def test_a_wanted_image_is_pulled_pinned_and_shown(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    kubelet: containerd.Kubelet,
    tmp_path: Path,
) -> None:
    pushed = images.push("fw/wanted", "v1", [registry.layer("w", 4 * MiB, 11)])
    ref = f"{gate.host}/fw/wanted:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        row = await rig.state(room, ref, "ready")
        await rig.until(lambda: room.show(ref).pinned)
        leases = await kubelet.leases()
        status = await kubelet.status(ref)

    assert row.digest == pushed.top
    assert row.bytes_total == row.bytes_done == pushed.fetched
    assert [lease.labels["nodeagent/role"] for lease in leases] == ["pin"]
    assert status is not None
    assert status.pinned is (daemon.release != "bookworm")
