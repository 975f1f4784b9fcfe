"""Leaked, busy and privately copied mounts, with real mounts, namespaces and processes."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from linux import loop
from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage, settings, watching
from volumes.audit import status
from volumes.audit.inventory import holders

pytestmark = pytest.mark.real


async def test_private_copy_names_holder_and_working_advice(stage: Stage) -> None:
    device = stage.loop()
    cgroup, uid, container = stage.pod_cgroup()
    target, _ = stage.staged(device, options=("-o", "ro"))
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    pid = stage.holder("container", rootfs, "private", stage.folder, cgroup=cgroup)
    async with watching(stage, settings(stage)) as watch:
        await watch.audit.round(full=True)
        assert not watch.seen(device, "leaked-mount")
        stages.run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert found["severity"] == "critical"
        assert found["pid"] == pid
        evidence = found["evidence"]
        assert evidence["cgroup"].endswith(str(cgroup.relative_to(stages.UNIFIED)))
        assert (evidence["pod_uid"], evidence["container"]) == (uid, container)
        assert evidence["targets"] == f"/host{target}"
        assert evidence["propagation"] == "private"
        assert evidence["read_only"] == "true"
        # The advice is right: what it says to do frees the device and leaves the holder alone.
        command = re.search(r"'nodeagent volume act (\S+) --yes'", found["advice"])
        assert command is not None
        assert command[1] == found["id"]
        assert f"nsenter --mount=/proc/{pid}/ns/mnt umount -l /host{target}" in found["advice"]
        assert (await watch.audit.act(command[1], dry_run=True))["outcome"] == "dry-run"
        assert stages.active(device)
        assert (await watch.audit.act(command[1], dry_run=False))["outcome"] == "done"
        await watch.until(lambda: not watch.found(device, "leaked-mount"), "cleared")
        assert not stages.active(device)
        assert stage.is_alive(pid)


async def test_a_device_that_is_left_out_is_no_affair_of_the_audit(stage: Stage) -> None:
    """As another run's on this machine: the same leak, and nothing is done."""
    leaked, theirs = [stage.loop() for _ in range(2)]
    targets = [stage.staged(device)[0] for device in (leaked, theirs)]
    stage.holder("container", _rootfs(stage), "private", stage.folder)
    on = settings(stage, names=[leaked], actions={"detach_leaked": "on"})
    async with watching(stage, on) as watch:
        for target in targets:
            stages.run("umount", target)
        await watch.until(lambda: not stages.active(leaked), "the detached copy")
        await watch.audit.round(full=True)
        assert stages.active(theirs)
        assert watch.audit.inventory is not None
        assert {device.name for device in watch.audit.inventory.devices} <= {leaked}
        found = {each.device for each in status.findings(watch.audit)}
        assert theirs not in found


def _rootfs(stage: Stage) -> Path:
    made = stage.folder / "exporter"
    made.mkdir()
    return made


async def test_detach_action_frees_the_device_and_spares_the_holder(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device, options=("-o", "ro"))
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    pid = stage.holder("container", rootfs, "private", stage.folder)
    on = settings(stage, actions={"detach_leaked": "on"})
    async with watching(stage, on) as watch:
        stages.run("umount", target)
        await watch.until(lambda: not stages.active(device), "freed")
        await watch.until(lambda: not watch.found(device, "leaked-mount"), "cleared")
        assert stage.is_alive(pid)
        done = [entry for entry in watch.audit.runner.last if entry["device"] == device]
        outcomes = [entry["outcome"] for entry in done]  # a foreign copy is a case of its own
        assert outcomes.count("begun") == outcomes.count("done") > 0
        journal = (stage.folder / "state/volumes/actions.jsonl").read_text()
        assert device in journal
        # Nobody else's mounts went: the holder still sees the host's root.
        assert os.path.exists(f"/proc/{pid}/root/host/proc/1")


@pytest.mark.parametrize("how", ["chroot", "thread"])
async def test_hidden_holder(stage: Stage, how: str) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    empty = stage.folder / "empty"
    empty.mkdir()
    arguments: list[str | Path] = [how, *([empty] if how == "chroot" else []), stage.folder]
    pid = stage.holder(*arguments)
    if how == "chroot":  # /proc/<pid>/mountinfo alone would miss it
        with open(f"/proc/{pid}/mountinfo") as table:
            assert device not in table.read()
    async with watching(stage, settings(stage)) as watch:
        stages.run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert found["pid"] == pid
        if how == "thread":
            assert int(found["evidence"]["thread"]) != pid
            assert "/task/" in found["advice"]


async def test_namespace_without_processes_names_what_keeps_it(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    tree = stage.folder / "pins"
    tree.mkdir()
    stages.run("mount", "--bind", tree, tree)
    stages.run("mount", "--make-private", tree)
    stage._undo.append(lambda: stages.run("umount", "-l", tree, check=False))
    pin = tree / "namespace"
    pin.touch()
    pid = stage.chrooted()
    stages.run("mount", "--bind", f"/proc/{pid}/ns/mnt", pin)
    stage._undo.append(lambda: stages.run("umount", "-l", pin, check=False))
    stage.end(pid)
    on = settings(stage)
    async with watching(stage, on) as watch:
        stages.run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert found["pid"] == 0
        assert found["evidence"]["processes"] == "0"
        assert str(pin) in found["evidence"]["kept_by"]
        assert "No process is in the namespace" in found["advice"]
        # There is no process to go through: the action enters it by its id.
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "done", result
        await watch.until(lambda: not stages.active(device), "freed")


@pytest.mark.parametrize("how", ["fd", "map", "cwd"])
async def test_lazy_unmount_names_the_user(stage: Stage, how: str) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    (target / "file").write_text("x" * 10000)
    pid = stage.holder(how, target if how == "cwd" else target / "file")
    async with watching(stage, settings(stage)) as watch:
        stages.run("umount", "-l", target)
        found = await watch.finding(device, "leaked-mount")
        assert found["pid"] == pid
        assert how in found["evidence"]["uses"]
        assert not [p for p in watch.audit.plans() if p.device == device]  # nothing it could do
        stage.end(pid)
        await watch.until(lambda: not watch.found(device, "leaked-mount"), "cleared")


async def test_busy_mount_names_the_pod(
    stage: Stage,
) -> None:
    device = stage.loop()
    cgroup, uid, _ = stage.pod_cgroup()
    stage.share_kubelet()
    target, _ = stage.staged(device)
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    pid = stage.holder("container-cwd", rootfs, "slave", stage.folder, target, cgroup=cgroup)
    async with watching(stage, settings(stage)) as watch:
        busy = subprocess.run(["umount", str(target)], capture_output=True, check=False, text=True)
        assert busy.returncode == 32
        assert "target is busy" in busy.stderr
        found = await watch.finding(device, "busy-mount")
        assert found["pid"] == pid
        assert found["evidence"]["pod_uid"] == uid
        assert "cwd" in found["evidence"]["uses"]
        assert not watch.found(device, "leaked-mount")


async def test_xfs(stage: Stage) -> None:
    device = stage.loop(megabytes=320, fs="xfs")
    target, _ = stage.staged(device)
    pid = stage.chrooted()
    async with watching(stage, settings(stage)) as watch:
        stages.run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert found["pid"] == pid


async def test_partition_leak_is_found_and_freed(stage: Stage) -> None:
    device, part = stage.partition()
    target, _ = stage.staged(part)
    pid = stage.chrooted()
    async with watching(stage, settings(stage)) as watch:
        assert watch.audit.inventory is not None
        seen = watch.audit.inventory.device(device)
        assert seen is not None
        assert [p.target for p in watch.audit.inventory.on_host(seen)] == [str(target)]
        assert watch.audit.inventory.volume_of(seen) is not None
        stages.run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert (found["pid"], found["evidence"]["on"]) == (pid, part)
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "done", result
        await watch.until(lambda: not stages.active(part), "freed")
        await watch.until(lambda: not watch.found(device, "leaked-mount"), "cleared")
        assert stage.is_alive(pid)


async def test_lazy_unmount_of_a_partition_names_the_user(stage: Stage) -> None:
    device, part = stage.partition()
    target, _ = stage.staged(part)
    (target / "file").write_text("x")
    pid = stage.holder("fd", target / "file")
    async with watching(stage, settings(stage)) as watch:
        stages.run("umount", "-l", target)
        assert (await watch.finding(device, "leaked-mount"))["pid"] == pid


async def test_a_loop_device_on_a_file_of_the_volume_is_named(stage: Stage) -> None:
    """Also after a lazy unmount, when the file's path says nothing."""
    device = stage.loop()
    target = stage.mount(device, stage.folder / "mnt")
    stages.run("truncate", "-s", "4M", target / "disk.img")
    above = stage.attach(target / "disk.img")
    async with watching(stage, settings(stage)) as watch:
        stages.run("umount", "-l", target)
        found = await watch.finding(device, "leaked-mount")
        assert f"loop device {above} keeps its file system in use" in found["message"]
        assert f"'losetup -d /dev/{above}'" in found["advice"]
        stages.run("losetup", "-d", f"/dev/{above}")
        await watch.until(lambda: not watch.found(device, "leaked-mount"), "cleared")


def test_a_loop_device_that_kubelet_left_on_a_raw_block_volume_is_a_user(stage: Stage) -> None:
    device = stage.loop(fs=None)
    bound = stage.folder / "publish"
    bound.touch()
    stages.run("mount", "--bind", f"/dev/{device}", bound)
    stage._undo.append(lambda: stages.run("umount", "-l", bound, check=False))
    above = stage.attach(bound)
    stages.run("umount", "-l", bound)
    rdev = os.stat(f"/dev/{device}").st_rdev
    number = os.major(rdev), os.minor(rdev)
    found, others = loop.backings()
    found += [each for name in others for each in loop.backing(name)]
    (user,) = holders.loops(found, {number})
    stages.run("losetup", "-d", f"/dev/{above}")  # its file has no path any more, so no other does
    assert (user.owner.label, user.device) == (f"loop device {above}", number)


async def test_proper_unmount_leaves_no_trouble(stage: Stage) -> None:
    device = stage.loop()
    stage.share_kubelet()
    target, _ = stage.staged(device)
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    stage.holder("container", rootfs, "slave", stage.folder)  # HostToContainer, as it should be
    async with watching(stage, settings(stage)) as watch:
        stages.run("umount", target)
        for _ in range(3):
            inventory = await watch.audit.round(full=True)
            assert inventory is not None
            assert not watch.seen(device, "leaked-mount")
            assert not watch.seen(device, "busy-mount")


async def test_detach_spares_the_volume_of_a_running_pod(stage: Stage) -> None:
    device = stage.loop()
    cgroup, uid, _ = stage.pod_cgroup()
    target, handle = stage.staged(device)
    published = stage.published(target, handle, uid)
    rootfs = stage.folder / "pod"
    rootfs.mkdir()
    stage.holder("container", rootfs, "private", stage.folder, cgroup=cgroup)
    async with watching(stage, settings(stage, actions={"detach_leaked": "on"})) as watch:
        stages.run("umount", published)
        stages.run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        steps: list[Any] = [p for p in watch.audit.plans() if p.device == device]
        assert steps[0].refusal == f"pod {uid} still owns the volume"
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "refused"
        assert stages.active(device)


async def test_private_propagation_of_kubelets_directory(stage: Stage) -> None:
    stage.share_kubelet()
    device = stage.loop()
    stage.staged(device)
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    pid = stage.holder("container", rootfs, "private", stage.folder)
    good = stage.folder / "good"
    good.mkdir()
    well = stage.holder("container", good, "slave", stage.folder)
    quick = settings(stage, rules={"private-propagation": {"patience": "0s"}})
    async with watching(stage, quick) as watch:
        found = await watch.finding(device, "private-propagation")
        assert found["pid"] == pid
        assert found["severity"] == "warning"
        every = [f for f in watch.audit.findings if f.rule == "private-propagation"]
        assert str(well) not in {f.evidence.get("pid") for f in every}
