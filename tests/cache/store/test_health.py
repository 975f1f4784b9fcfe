"""The health of the store's disk: the decision, the signs in the kernel's log, the lock."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.errors
from cache.store import disk, generations, health, probe
from cache.store.health import DiskHealth, Sign, State, after
from tests.testbed import waiting

GOOD, BAD, GONE = Sign(), Sign("its disk fails"), Sign("not mounted", gone=True)
signs = st.lists(st.tuples(st.sampled_from([GOOD, BAD, GONE]), st.floats(0.1, 60.0)), max_size=60)


def test_first_fault_takes_the_store_out_of_use() -> None:
    assert after(DiskHealth(), BAD, 100.0).state is State.UNSTABLE
    assert after(DiskHealth(), GONE, 100.0).state is State.DOWN


def test_lasting_fault_is_down() -> None:
    seen = after(DiskHealth(), BAD, 100.0)
    assert after(seen, BAD, 100.0 + health.DOWN_SECONDS / 2).state is State.UNSTABLE
    assert after(seen, BAD, 100.0 + health.DOWN_SECONDS).state is State.DOWN
    assert after(seen, GONE, 101.0).state is State.DOWN


@given(signs)
def test_it_is_used_again_only_after_a_quiet_time(steps: list[tuple[Sign, float]]) -> None:
    now, seen, last = 0.0, DiskHealth(), 0.0
    for sign, pause in steps:
        now += pause
        before, seen = seen, after(seen, sign, now)
        if sign.fault:
            last = now
            assert not seen.usable
        elif seen.usable and not before.usable:
            assert now - last >= before.quiet
        assert bool(seen.why) is not seen.usable


def test_each_return_of_trouble_doubles_the_quiet_time() -> None:
    now, seen, times = 0.0, DiskHealth(), []
    for _ in range(20):
        seen = after(seen, BAD, now)
        times.append(seen.quiet)
        now += seen.quiet
        seen = after(seen, GOOD, now)
        assert seen.usable
    assert times[:4] == [health.QUIET_SECONDS * 2**n for n in range(4)]
    assert times[-1] == health.LONGEST_QUIET_SECONDS
    assert after(seen, GOOD, now + health.FORGET_SECONDS).troubles == 0


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("I/O error, dev loop3, sector 2048 op 0x0:(READ) flags 0x80700 phys_seg 1", "loop3"),
        ("Buffer I/O error on dev sda1, logical block 12, async page read", "sda1"),
        ("critical medium error, dev nvme0n1, sector 77 op 0x0:(READ)", "nvme0n1"),
        ("EXT4-fs error (device dm-3): ext4_find_entry:1683: inode #2: comm cat: reading", "dm-3"),
        ("EXT4-fs (sdb1): Remounting filesystem read-only", "sdb1"),
        ("Aborting journal on device nvme1n1p2-8.", "nvme1n1p2"),
        ('XFS (loop7): metadata I/O error in "xfs_imap_to_bp" at daddr 0x80 len 32', "loop7"),
        ("XFS (sdc): Corruption detected. Unmount and run xfs_repair", "sdc"),
        ("XFS (sdc): log I/O error -5", "sdc"),
        ("EXT4-fs (loop3): mounted filesystem 1b4e with ordered data mode", ""),
        ("XFS (sdc): Mounting V5 Filesystem", ""),
        ("loop3: detected capacity change from 0 to 819200", ""),
    ],
)
def test_kernel_names_the_device_that_fails(text: str, device: str) -> None:
    assert probe.named(text) == device


def test_names_of_a_device_include_what_it_lies_on(tmp_path: Path) -> None:
    devices = tmp_path / "devices"
    (devices / "sda" / "sda1").mkdir(parents=True)
    (devices / "sda" / "sda1" / "partition").write_text("1")
    (devices / "dm-0" / "slaves").mkdir(parents=True)
    (devices / "dm-0" / "slaves" / "sda1").symlink_to(devices / "sda" / "sda1")
    (tmp_path / "dev" / "block").mkdir(parents=True)
    (tmp_path / "dev" / "block" / "253:0").symlink_to(devices / "dm-0")
    assert probe.names_of(os.makedev(253, 0), tmp_path) == {"dm-0", "sda1", "sda"}
    assert probe.names_of(os.makedev(0, 40), tmp_path) == set()


@pytest.mark.parametrize(
    ("taken", "mounted", "fault", "missing"),
    [
        ("", True, "", False),
        ("store", True, "no store is there", True),  # rm -rf, or a new SSD
        (f"store/{disk.MARKER}", True, "no store is there", True),  # a new SSD mounted there itself
        ("store", False, "no disk is mounted at /mnt/ssd", False),
    ],
)
def test_missing_store_is_told_from_a_disk_that_fails(
    taken: str, mounted: bool, fault: str, missing: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(disk, "place", lambda _: "/mnt/ssd" if mounted else "/")
    monkeypatch.setattr(disk, "fleeting", lambda *_: "")
    store = tmp_path / "store"
    generations.prepare(str(store))
    disk.remember(str(store), tmp_path)
    if taken:
        (tmp_path / taken).rename(tmp_path / "taken")
    look = probe.Look(str(store), str(tmp_path), "/mnt/ssd", os.stat(tmp_path).st_dev, False)
    seen = probe.Probe().look(look)
    assert seen.fault.startswith(fault) and bool(seen.fault) is bool(fault)
    assert (seen.gone, seen.missing) == (bool(fault), missing)


@pytest.mark.parametrize("going", [False, True])
def test_store_that_is_being_deleted_is_not_made_anew(
    going: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``rm -rf STORE/*`` has reached its marker, and not all that it holds. ``going``: a directory
    goes while it is looked into."""
    monkeypatch.setattr(disk, "check", lambda *_: None)
    left = tmp_path / "store" / "a" / "0"
    left.mkdir(parents=True)
    (left / generations.NAME).write_text('{"format": 1, "dataset": "a", "identity": "i"}')

    def gone(*_: Any) -> bool:
        raise FileNotFoundError(errno.ENOENT, "no such")

    if going:
        monkeypatch.setattr(disk, "has_generations", gone)
    look = probe.Look(str(tmp_path / "store"), str(tmp_path), None, 0, False)
    seen = probe.Probe().look(look)
    assert (seen.gone, seen.missing) == (True, False)
    assert "generations" in seen.fault


def test_second_agent_is_refused_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0.1)
    child = os.fork()
    if child == 0:
        try:
            disk.lock(str(tmp_path))
            (tmp_path / "locked").touch()
            waiting.until((tmp_path / "end").exists, what="the test to end its child")
        finally:
            os._exit(0)  # never into the rest of the suite
    waiting.until((tmp_path / "locked").exists, what="the child to lock the store")
    with pytest.raises(kit.errors.HostError, match="another agent uses it"):
        disk.lock(str(tmp_path))
    (tmp_path / "end").touch()
    os.waitpid(child, 0)
    disk.lock(str(tmp_path))
    disk.lock(str(tmp_path))  # the same agent, begun anew
    disk.unlock(str(tmp_path))
