"""The functions that carry actions out, on real devices."""

import os
from pathlib import Path

import pytest

import kit.errors
from linux import blockdev
from tests.volumes.audit.stage import Stage
from volumes.audit import executors
from volumes.audit.inventory import holders

pytestmark = pytest.mark.real


def test_unmap_of_nbd_refuses_a_claimed_or_opened_device(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This kernel has no nbd: a loop device replaces it, and a script rbd-nbd."""
    device = stage.loop(fs=None)
    called = stage.folder / "called"
    tool = stage.folder / "rbd-nbd"
    tool.write_text(f"#!/bin/sh\necho $* >> {called}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(stage.folder), prepend=":")
    home = Path("/sys/block", device)
    major, minor = (home / "dev").read_text().strip().split(":")
    number, sequence = [int(major), int(minor)], int((home / "diskseq").read_text())

    def unmap(diskseq: int = sequence, lies_on: list[int] | None = None) -> int:
        backings = [("loop4095", "/disk.img", [[0, 0], lies_on or [0, 0]])]
        return executors.unmap(device, "nbd", number, diskseq, "", backings)

    claim = os.open(f"/dev/{device}", os.O_RDONLY | os.O_EXCL)
    with pytest.raises(OSError, match="busy"):
        unmap()
    os.close(claim)
    pid = stage.holder("fd", f"/dev/{device}")
    with pytest.raises(kit.errors.RefusedError, match=rf"pid {pid} .*has it open"):
        unmap()
    with pytest.raises(kit.errors.RefusedError, match="another device"):
        unmap(sequence - 1)
    stage.end(pid)
    with pytest.raises(kit.errors.RefusedError, match="loop4095 has it open"):
        unmap(lies_on=number)
    assert not called.exists()
    assert unmap() == 1
    assert called.read_text() == f"unmap /dev/{device}\n"
    tool.write_text("#!/bin/sh\necho no such device >&2\nexit 3\n")
    with pytest.raises(kit.errors.HostError, match="ended with 3: no such device"):
        unmap()


def test_who_serves_a_device_is_no_user_of_it(stage: Stage) -> None:
    """rbd-nbd has its device open as long as it is mapped."""
    device = stage.loop(fs=None)
    status = os.stat(f"/dev/{device}").st_rdev
    number = os.major(status), os.minor(status)
    server = stage.holder("fd", f"/dev/{device}")
    other = stage.holder("fd", f"/dev/{device}")

    def users(servers: dict[blockdev.Number, int | None]) -> set[int]:
        processes = holders.Processes("/proc", "")
        return {
            user.owner.pid for user in holders.users(processes, "/proc", {number}, set(), servers)
        }

    assert users({}) == {server, other}
    assert users({number: server}) == {other}
