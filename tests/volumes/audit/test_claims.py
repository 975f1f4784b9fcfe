"""Two volumes on one device, and a volume whose device has gone, on real devices of a driver that
the audit does not watch."""

import json
import os
import uuid
from pathlib import Path

import pytest

from tests.testbed import guest
from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage, settings, watching

pytestmark = pytest.mark.real


def raw(stage: Stage, device: str, claim: str, pod: str) -> Path:
    """Published as kubelet publishes a raw block volume."""
    base = stage.kubelet / "plugins/kubernetes.io/csi/volumeDevices"
    record = {"driverName": "disk.csi.example", "volumeHandle": f"raw-{claim}", "specVolID": claim}
    (base / claim / "data").mkdir(parents=True)
    (base / claim / "data/vol_data.json").write_text(json.dumps(record))
    (stage.kubelet / "pods" / pod).mkdir(parents=True)
    target = base / "publish" / claim / pod
    target.parent.mkdir(parents=True)
    target.touch()
    stages.run("mount", "--bind", f"/dev/{device}", target)
    stage._undo.append(lambda: stages.run("umount", "-l", target, check=False))
    return target


async def test_two_volumes_mounted_from_one_device(stage: Stage) -> None:
    stage.share_kubelet()
    device, other = stage.loop(), stage.loop()
    pod, its_pod = str(uuid.uuid4()), str(uuid.uuid4())
    target, handle = stage.staged(device)
    stage.published(target, handle, pod)
    stage.published(target, handle, str(uuid.uuid4()))  # two pods of one node may share a volume
    stage.staged(other, image="csi-vol-2")
    async with watching(stage, settings(stage), drivers=("rbd",)) as watch:
        await watch.audit.round(full=True)
        assert not watch.seen(device, "two-claims-one-device")
        wrong, its_handle = stage.staged(device, image="csi-vol-3")
        stage.published(wrong, its_handle, its_pod)
        found = await watch.finding(device, "two-claims-one-device")
        assert found["severity"] == "critical"
        for said in (handle, its_handle, pod, its_pod, str(target), device):
            assert said in found["message"]
        assert not watch.seen(other, "two-claims-one-device")
        inventory = watch.audit.inventory
        for volume in inventory.volumes if inventory else ():
            for place in volume.places if volume.handle == its_handle else ():
                stages.run("umount", place)
        await watch.until(lambda: not watch.found(device, "two-claims-one-device"), "its end")


async def test_a_raw_block_volume_and_a_mounted_one_on_one_device(stage: Stage) -> None:
    stage.share_kubelet()
    device = stage.loop()
    target = raw(stage, device, "pvc-9", "uid-9")
    async with watching(stage, settings(stage), drivers=("rbd",)) as watch:
        await watch.audit.round(full=True)
        assert not watch.seen(device, "two-claims-one-device")
        _, handle = stage.staged(device)
        found = await watch.finding(device, "two-claims-one-device")
        assert handle in found["message"] and "raw-pvc-9 (pod uid-9)" in found["message"]
        stages.run("umount", target)
        await watch.until(lambda: not watch.found(device, "two-claims-one-device"), "its end")


@pytest.mark.parametrize("mounted", [True, False])
async def test_a_volume_whose_device_has_gone(stage: Stage, mounted: bool) -> None:
    """The kernel keeps a mounted loop device, but lets it shrink to nothing, without an uevent."""
    stage.share_kubelet()
    device = stage.loop()
    if mounted:
        target, handle = stage.staged(device)
        stage.published(target, handle, "uid-9")
    else:
        target, handle = raw(stage, device, "pvc-9", "uid-9"), "raw-pvc-9"
    image = Path(f"/sys/block/{device}/loop/backing_file").read_text().strip()
    size = os.stat(image).st_size
    async with watching(stage, settings(stage), drivers=("rbd",)) as watch:
        await watch.audit.round(full=True)
        assert not watch.seen(device, "claim-device-gone")
        os.truncate(image, 0)
        stages.run("losetup", "-c", f"/dev/{device}")
        await watch.audit.round(full=True)
        found = await watch.finding(device, "claim-device-gone")
        assert found["severity"] == "critical"
        for said in (handle, "uid-9", "size of 0"):
            assert said in found["message"]
        os.truncate(image, size)
        stages.run("losetup", "-c", f"/dev/{device}")
        await watch.audit.round(full=True)
        await watch.until(lambda: not watch.found(device, "claim-device-gone"), "its end")


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_disks_that_are_unplugged(tmp_path: Path) -> None:
    script = Path(__file__).with_name("guest_claims.py")
    modules = "modprobe -a loop sd_mod dm_mod dm_crypt xts ecb algif_skcipher ext4"
    result = guest.program([str(script)], tmp_path, modules)
    assert result.exit == 0, result.text[-4000:]
    two, gone = "two-claims-one-device", "claim-device-gone"
    assert result.marked("check") == [
        *("mounted plain 0", "mounted secret 0", "published raw 0"),
        *(f"there {two} []", f"there {gone} []", "unplugged True", f"unplugged {two} []"),
        f"unplugged {gone} "
        + str([f"disk.csi.example/{each}" for each in ("plain sda", "raw sdc", "secret dm-0")]),
    ]
