"""File systems that stopped, and volumes that kubelet forgot, on real devices."""

import uuid
from pathlib import Path

import pytest

from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage, settings, watching
from volumes.audit.logs import matcher

pytestmark = pytest.mark.real


async def test_an_ext4_that_stopped_is_a_finding_until_it_is_unmounted(stage: Stage) -> None:
    """ceph-csi#4712, #5439: pods stayed on such mounts, and the log says it once."""
    device = stage.loop()
    target, handle = stage.staged(device, options=("-o", "errors=remount-ro"))
    stage.published(target, handle, str(uuid.uuid4()))
    async with watching(stage, settings(stage)) as watch:
        await watch.audit.round(full=True)
        assert not watch.seen(device, "file-system-errors")
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test\n")
        for _ in range(3):  # no line of a log keeps it
            await watch.audit.round(full=True)
            found = await watch.finding(device, "file-system-errors")
            assert found["severity"] == "critical" and found["evidence"]["errors"] == "1"
        with pytest.raises(OSError):
            (target / "file").write_text("x")
        for mount in watch.audit.inventory.host if watch.audit.inventory else ():
            stages.run("umount", mount.target)
        stages.run("fsck.ext4", "-fy", f"/dev/{device}", check=False)
        stages.run("mount", f"/dev/{device}", target)
        await watch.audit.round(full=True)
        await watch.until(lambda: not watch.found(device, "file-system-errors"), "its end")
        stages.run("umount", target)


async def test_an_ext4_that_counts_errors_and_goes_on_is_a_warning(stage: Stage) -> None:
    device = stage.loop()
    stage.staged(device, options=("-o", "errors=continue"))
    async with watching(stage, settings(stage)) as watch:
        for _ in range(2):
            Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("a test\n")
        await watch.audit.round(full=True)
        found = await watch.finding(device, "file-system-errors")
        assert found["severity"] == "warning" and found["evidence"]["errors"] == "2"


async def test_an_xfs_that_shut_down_is_a_finding_until_it_is_unmounted(stage: Stage) -> None:
    """Nothing but its line tells it, which is older than any 'hold' here."""
    device = stage.loop(megabytes=320, fs="xfs")
    target, _ = stage.staged(device)
    line = f"XFS ({device}): Filesystem has been shut down due to log error (0x2)."
    logs = {"kernel": False, "sources": [], "hold": "1s"}
    async with watching(stage, settings(stage, logs=logs)) as watch:
        watch.audit._load_patterns(watch.audit.settings)
        watch.audit._log_hits([matcher.Hit("xfs-shutdown", "kernel", line, {"device": device})])
        found = await watch.finding(device, "log-xfs-shutdown")

        def a_hold_later() -> bool:
            inventory = watch.audit.inventory
            watch.audit.wake()
            return inventory is not None and inventory.taken > found["since"] + 3.0

        await watch.until(a_hold_later, "looks after 'hold'")
        assert watch.found(device, "log-xfs-shutdown")
        stages.run("umount", target)

        def gone() -> bool:
            watch.audit.wake()
            return not watch.found(device, "log-xfs-shutdown")

        await watch.until(gone, "the finding's end after the unmount")


async def test_a_volume_that_kubelet_forgot(stage: Stage) -> None:
    """kubernetes#121937: staged and mounted, no directory of a pod, nobody has a file open."""
    stage.share_kubelet()
    device, other = stage.loop(), stage.loop()
    target, handle = stage.staged(device)
    used, its_handle = stage.staged(other, image="csi-vol-2")
    stage.published(used, its_handle, str(uuid.uuid4()))
    quick = settings(stage, rules={"staged-unused": {"patience": "1s"}})
    async with watching(stage, quick) as watch:
        found = await watch.finding(device, "staged-unused")
        assert found["severity"] == "warning"
        assert found["evidence"]["volume"] == handle and str(target) in found["advice"]
        assert not watch.seen(other, "staged-unused")
        stages.run("umount", target)
        await watch.until(lambda: not watch.found(device, "staged-unused"), "the finding's end")
