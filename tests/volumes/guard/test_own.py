"""Devices that no driver guards: judged unless they are the node's own, from their first moment."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import stack
from tests.testbed import blockdev, cell, grave, guest, waiting
from volumes import settings
from volumes.guard import kernel, own, record, scope

pytestmark = pytest.mark.real

_RBD = settings.GuardSettings(drivers=("rbd",), scope="csi")
_ENFORCE = kernel.wanted(_RBD, kernel.Mode.ENFORCE, {})
_MiB = blockdev.MiB


@pytest.fixture(scope="module")
def judged(where: cell.Cell) -> Iterator[kernel.Kernel]:
    """The kernel's part alone guards no driver. It refuses, as a scope will one day."""
    guard = where.guard()
    guard.apply(_ENFORCE)
    yield guard
    guard.detach()
    guard.close()


def _number(device: str) -> kernel.Number:
    status = os.stat(device).st_rdev
    return os.major(status), os.minor(status)


def _opens(where: cell.Cell, device: str) -> bool:
    return where.run("sh", "-c", f"exec 3<>{device}").returncode == 0


def _be_own(guard: kernel.Kernel, own: dict[kernel.Number, kernel.Number]) -> None:
    guard.reserve_own(own)
    guard.judge(kernel.Mode.ENFORCE, own)


def test_a_device_that_nobody_knows_is_not_written_to(
    where: cell.Cell, judged: kernel.Kernel, tmp_path: Path
) -> None:
    image = blockdev.blank(tmp_path / "image", 64 * _MiB)
    before = blockdev.sha256(image)
    with blockdev.loop(image) as device:
        judged.judge(kernel.Mode.OFF, {})
        assert _opens(where, device), "without a scope nothing is judged"
        judged.judge(kernel.Mode.ENFORCE, {})
        done = where.run("mkfs.ext4", "-F", device)
        with grave.missing_denial():
            assert done.returncode != 0 and "not permitted" in done.stderr
            assert blockdev.sha256(image) == before
        assert where.run("dd", f"if={device}", "of=/dev/null", "count=1").returncode == 0
        _be_own(judged, {_number(device): _number(device)})
        assert where.run("mkfs.ext4", "-q", "-F", device).returncode == 0


def test_the_place_of_a_device_counts_once_it_is_filled(
    where: cell.Cell, judged: kernel.Kernel, tmp_path: Path
) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", _MiB)) as device:
        number = _number(device)
        judged.judge(kernel.Mode.ENFORCE, {})
        judged.judge(kernel.Mode.ENFORCE, {number: number})
        assert not _opens(where, device), "there is no place for it"
        judged.reserve_own([number])
        assert not _opens(where, device)
        judged.judge(kernel.Mode.ENFORCE, {number: number})
        assert _opens(where, device)
        judged.reserve_own([number])
        assert _opens(where, device), "a place that is filled stays so"
        judged.judge(kernel.Mode.ENFORCE, {})
        assert not _opens(where, device)


def test_a_new_disk_with_the_number_of_an_own_one_is_judged(
    where: cell.Cell, judged: kernel.Kernel, tmp_path: Path
) -> None:
    image = blockdev.blank(tmp_path / "image", _MiB)
    with blockdev.loop(image) as device:
        number = _number(device)
        _be_own(judged, {number: number})
        assert _opens(where, device)
    with blockdev.loop(image, number[1]) as device:  # the disk is made anew
        assert _number(device) == number
        with grave.missing_denial():
            assert not _opens(where, device)
        judged.judge(kernel.Mode.ENFORCE, {number: number})
        with grave.missing_denial():
            assert not _opens(where, device), "what was read before the disk came says nothing"


def test_a_partition_is_own_while_its_disk_is(
    where: cell.Cell, judged: kernel.Kernel, tmp_path: Path
) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", 64 * _MiB)) as device:
        blockdev.run("addpart", device, "1", "2048", "65536")
        try:
            part, disk = _number(f"{device}p1"), _number(device)
            _be_own(judged, {disk: disk, part: disk})
            assert _opens(where, f"{device}p1")
            _be_own(judged, {part: disk})
            with grave.missing_denial():
                assert not _opens(where, f"{device}p1")
            judged.reserve_own([disk])  # of a new disk that is not read yet
            with grave.missing_denial():
                assert not _opens(where, f"{device}p1"), "a place alone proves nothing"
        finally:
            blockdev.run("delpart", device, "1")


def test_what_lies_on_a_device_that_only_the_scope_judges_is_not_guarded(
    where: cell.Cell, judged: kernel.Kernel, tmp_path: Path
) -> None:
    """The mapping of a luksOpen would be, in the drivers' mode: nobody could format it."""
    shutil.copy("/bin/sh", tmp_path / "cryptsetup")
    (tmp_path / "luksOpen").write_text('exec 3<>"$1"\n')
    with blockdev.loop(blockdev.blank(tmp_path / "image", _MiB)) as device:
        judged.judge(kernel.Mode.DRY_RUN, {})
        before = judged.read().counters["by_word"]
        connecting = set(judged.maps["connecting"].snapshot())
        opens = f"cd {tmp_path} && exec ./cryptsetup luksOpen {device}"
        assert where.run("sh", "-c", opens).returncode == 0
        assert judged.read().counters["by_word"] > before
        assert set(judged.maps["connecting"].snapshot()) == connecting


def test_the_kernel_says_what_it_judges(judged: kernel.Kernel) -> None:
    judged.judge(kernel.Mode.DRY_RUN, {})
    found = judged.read()
    assert (found.judges, found.mode) == (kernel.Mode.DRY_RUN, kernel.Mode.ENFORCE)
    assert found.is_as(_ENFORCE)


def _scope(agent: Any) -> dict[str, Any]:
    """Once the agent has looked at the devices."""
    found: dict[str, Any] = {}

    def looked() -> bool:
        found.update(agent.cli_json("volume", "guard", "status")["scope"])
        return bool(found["problem"] or found["own"] or found["guarded"])

    waiting.until(looked, 30, "a look at the devices", detail=lambda: found)
    return found


def _rehearsal(agent: Any, *options: str) -> Any:
    return agent.cli_json("volume", "guard", "rehearse", *options)


def _rehearsed(agent: Any, would: str, program: str, held: str) -> None:
    def is_there() -> bool:
        return any(
            (row["would"], row["program"]) == (would, program) and row["held"].startswith(held)
            for row in _rehearsal(agent)["rows"]
        )

    waiting.until(is_there, 10, f"a row: {would}", detail=lambda: _rehearsal(agent))


def test_an_agent_reports_writes_to_unproven_devices(where: cell.Cell, tmp_path: Path) -> None:
    """And refuses none, for nothing leases them yet."""
    image = blockdev.blank(tmp_path / "image", 64 * _MiB)
    with (
        blockdev.loop(image) as device,
        cell.agent(tmp_path, where, drivers=["rbd"], scope="csi") as agent,
    ):
        name = Path(device).name
        shown = _scope(agent)
        assert (shown["problem"], name in shown["unproven"]) == ("", True)
        root = os.stat("/").st_dev
        on_disk = os.path.realpath(f"/sys/dev/block/{os.major(root)}:{os.minor(root)}")
        if os.path.exists(on_disk):  # a root in memory or on a network has no disk
            assert shown["own"][Path(on_disk).name].startswith("root file system")
        file = record.own_file(agent.state)
        young = time.clock_gettime(time.CLOCK_BOOTTIME) < own.BOOT_SECONDS + 60
        written = "" if young else file.read_text()
        if written:
            assert set(json.loads(written)["own"].values()) <= {str(why) for why in scope.Why}

        waiting.until(lambda: name in _rehearsal(agent)["probed"], 10, "a probe")
        assert where.run("mkfs.ext4", "-q", "-F", device).returncode == 0
        _rehearsed(agent, "lease", "mkfs.ext4", "blank_verified")
        waiting.until(lambda: name in _rehearsal(agent)["probed"], 20, "a probe after the write")
        assert where.run("mkfs.ext4", "-q", "-F", device).returncode == 0
        _rehearsed(agent, "refuse", "mkfs.ext4", "has_fs ext4")
        waiting.until(
            lambda: any(
                f["rule"] == "scope-would-deny" and f" {name} " in f["message"]
                for f in agent.findings()
            ),
            10, "the report", detail=agent.findings,
        )  # fmt: skip
        assert agent.cli_json("volume", "guard", "status")["scope_mode"] == "dry-run"
        agent.kill()
        before = _rehearsal(agent, "--direct")["rows"]
        guard = where.guard()
        guard.detach()
        agent.cli_json("volume", "guard", "attach")  # as at boot
        assert guard.read().judges is kernel.Mode.DRY_RUN
        assert bool(guard.maps["own"].snapshot()) is bool(shown["own"])
        guard.close()
        agent.start()
        assert name in _scope(agent)["unproven"]
        assert young or file.read_text() == written, "it is written once"
        waiting.until(lambda: _rehearsal(agent)["rows"] == before, 10, "the rows of before")


@pytest.fixture
def memory() -> Iterator[str]:
    """A disk of another driver than loop."""
    number = Path("/sys/class/zram-control/hot_add").read_text().strip()
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text("64M")
        yield f"/dev/zram{number}"
    finally:
        Path("/sys/class/zram-control/hot_remove").write_text(number)


def test_a_loop_device_on_a_guarded_one_is_only_reported(
    where: cell.Cell, memory: str, tmp_path: Path
) -> None:
    """kubelet makes such a one for each raw block volume. Its number stays when the next file comes
    to it: a guard of the number would refuse that one."""
    with (
        blockdev.loop(Path(memory)) as device,
        cell.agent(tmp_path, where, drivers=["zram"], scope="csi") as agent,
    ):
        why = f"driver ({Path(memory).name})"
        assert _scope(agent)["guarded"][Path(device).name] == why
        with grave.missing_denial():
            assert not _opens(where, memory)
        assert where.run("mkfs.ext4", "-q", "-F", device).returncode == 0
        waiting.until(
            lambda: any(
                f["rule"] == "scope-would-deny" and f"guarded: {why}" in f["message"]
                for f in agent.findings()
            ),
            10, "the report", detail=agent.findings,
        )  # fmt: skip
        blockdev.run("losetup", "-d", device)


@pytest.mark.guest
@pytest.mark.timeout(600)
def test_the_device_mapper_in_a_guest(tmp_path: Path) -> None:
    script = Path(__file__).with_name("guest_scope.py")
    modules = "modprobe -a loop dm_mod ext4"
    result = guest.program([str(script)], tmp_path, modules)
    assert result.exit == 0, result.text[-4000:]
    assert result.marked("check") == [
        *("made used 0", "made spare 0", "mounted 0"),
        "problem '' judges dry-run",
        "spare unproven: takes one medium after the other (loop0)",
        "used own: mounted at the first attach",
        "written {'dm:LVM-used': 'mounted at the first attach'}",
        "lies on ('loop0',)",
        "opens used True spare False",
        *("made new 0", "opens new False", "mkfs new True True", "remount 0", "made other 0"),
        *("same number True opens False", "other unproven True", "without a guard True"),
    ]


def test_what_is_open_for_writing_and_what_kubelet_bound_are_told(tmp_path: Path) -> None:
    """By number: a node may have any name, and lie in any file system."""
    with (
        blockdev.loop(blockdev.blank(tmp_path / "one", _MiB)) as written,
        blockdev.loop(blockdev.blank(tmp_path / "two", _MiB)) as read,
        blockdev.loop(blockdev.blank(tmp_path / "three", _MiB)) as bound,
        open(written, "r+b"),
        open(read, "rb"),
    ):
        place = tmp_path / "volumeDevices" / "publish" / "uid"
        place.parent.mkdir(parents=True)
        place.touch()
        node = tmp_path / "pvc-1"
        blockdev.run("mknod", str(node), "b", *map(str, _number(bound)))
        holds = f"exec 3<>{written} 4<{read}; echo held; read end"
        with subprocess.Popen(
            ["sh", "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            blockdev.run("mount", "--bind", str(node), str(place))
            try:
                found = stack.read(programs=True)
            finally:
                blockdev.run("umount", str(place))
                holder.communicate(b"\n")
        opened = found.opened or {}
        names = [Path(device).name for device in (written, read, bound)]
        assert [opened.get(name) for name in names] == [("sh",), None, None]
        assert found.nodes == {str(place): names[2]}
