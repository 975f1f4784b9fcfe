"""Verdicts on real block devices, healthy and failing."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, expiry, waiting
from volumes.probe import prober
from volumes.probe.examine import Kind

pytestmark = pytest.mark.real

MiB = blockdev.MiB
SIZE = 320 * MiB


@pytest.fixture
async def probes() -> AsyncIterator[prober.Prober]:
    made = prober.Prober(deadline=waiting.limit(60.0))  # a busy machine
    yield made
    await made.close()


@pytest.mark.parametrize(("command", "kind", "type_"), [
    (("mkfs.ext4", "-q"), Kind.HAS_FS, "ext4"),
    (("mkfs.ext4", "-q", "-b", "1024"), Kind.HAS_FS, "ext4"),
    (("mkfs.xfs", "-q"), Kind.HAS_FS, "xfs"),
    (("mkfs.btrfs", "-q"), Kind.HAS_FS, "btrfs"),
    (("mkswap",), Kind.HAS_FS, "swap"),
    (("cryptsetup", "-q", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000",
      "--key-file", "/etc/hostname", "luksFormat"), Kind.ENCRYPTED, "crypto_LUKS"),
    (("parted", "-s", "DEVICE", "mklabel", "gpt"), Kind.PARTITIONED, "gpt"),
    (("parted", "-s", "DEVICE", "mklabel", "msdos"), Kind.PARTITIONED, "dos"),
])  # fmt: skip
async def test_probe_recognises_content_and_uuid(
    probes: prober.Prober, tmp_path: Path, command: tuple[str, ...], kind: Kind, type_: str
) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        words = [device if word == "DEVICE" else word for word in command]
        blockdev.run(*words, *([] if "DEVICE" in command else [device]))
        found = await probes.probe(device)
    assert (found.verdict, found.type) == (kind, type_)
    assert found.uuid and found.size == SIZE and found.diskseq


async def test_probe_reads_all_marks_before_blank(probes: prober.Prober, tmp_path: Path) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", SIZE)) as device:
        found = await probes.probe(device)
    assert found.verdict is Kind.BLANK_VERIFIED
    assert found.bytes_read >= 6 * MiB + 64 * 1024


# name, how it is made, the part of the front that is lost
_BACKUPS = {
    "ext4, first 4 MiB lost": (("mkfs.ext4", "-q"), 4 * MiB + 64 * 1024),
    "ext4 with 1 KiB blocks": (("mkfs.ext4", "-q", "-b", "1024"), 6 * MiB),
    "xfs, first 5 MiB lost": (("mkfs.xfs", "-q"), 5 * MiB),
    "xfs with 2 groups": (("mkfs.xfs", "-q", "-d", "agcount=2"), 5 * MiB),
    "btrfs, first 5 MiB lost": (("mkfs.btrfs", "-q"), 5 * MiB),
    "gpt, front lost": (("parted", "-s", "DEVICE", "mklabel", "gpt"), MiB),
}


@pytest.mark.parametrize("name", _BACKUPS)
async def test_probe_finds_backups_behind_zeroed_front(
    probes: prober.Prober, tmp_path: Path, name: str
) -> None:
    command, lost = _BACKUPS[name]
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        words = [disk.device if word == "DEVICE" else word for word in command]
        blockdev.run(*words, *([] if "DEVICE" in command else [disk.device]))
        disk.fault({"offset": 0, "length": lost, "zero": True})
        found = await probes.probe(disk.device)
    assert found.verdict in (Kind.UNKNOWN_CONTENT, Kind.PARTITIONED, Kind.AMBIVALENT), found
    if found.verdict is Kind.UNKNOWN_CONTENT:
        assert found.offset >= lost


_UNREADABLE: dict[str, dict[str, Any]] = {
    "everywhere": {"offset": 0, "length": SIZE, "errno": 5},
    "timed out everywhere": {"offset": 0, "length": SIZE, "errno": 110},
    "shut down (a blocklisted client)": {"offset": 0, "length": SIZE, "errno": 108},
    "first 4 KiB": {"offset": 0, "length": 4096, "errno": 5},
    "first MiB": {"offset": 0, "length": MiB, "errno": 5},
    "last MiB": {"offset": SIZE - MiB, "length": MiB, "errno": 5},
    "a backup's place": {"offset": 134217728, "length": 4096, "errno": 5},
}


@pytest.mark.parametrize("where", _UNREADABLE)
async def test_probe_unreadable_is_never_blank(
    probes: prober.Prober, tmp_path: Path, where: str
) -> None:
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        disk.fault(_UNREADABLE[where])
        found = await probes.probe(disk.device)
        assert found.verdict is Kind.UNREADABLE and found.errno
        disk.clear()
        assert (await probes.probe(disk.device)).verdict is Kind.BLANK_VERIFIED


async def test_probe_names_first_offset_of_unknown_content(
    probes: prober.Prober, tmp_path: Path
) -> None:
    image = blockdev.blank(tmp_path / "image", SIZE)
    with image.open("r+b") as stream:
        stream.seek(3 * MiB + 17)
        stream.write(b"x")
    with blockdev.loop(image) as device:
        found = await probes.probe(device)
    assert (found.verdict, found.offset) == (Kind.UNKNOWN_CONTENT, 3 * MiB + 17)


async def test_probe_two_filesystems_are_ambivalent(probes: prober.Prober, tmp_path: Path) -> None:
    image, other = (
        blockdev.blank(tmp_path / "image", SIZE),
        blockdev.blank(tmp_path / "other", SIZE),
    )
    blockdev.run("mkfs.ext4", "-q", str(image))
    blockdev.run("mkfs.xfs", "-q", str(other))
    with other.open("rb") as stream:
        head = stream.read(512)  # ext4 begins at 1024
    with image.open("r+b") as stream:
        stream.write(head)
    with blockdev.loop(image) as device:
        found = await probes.probe(device)
    assert found.verdict is Kind.AMBIVALENT


async def test_probe_without_device_is_no_media(probes: prober.Prober, tmp_path: Path) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", MiB)) as device:
        blockdev.run("losetup", "-d", device)
        for path in (device, "/dev/there-is-none"):
            assert (await probes.probe(path)).verdict is Kind.NO_MEDIA


async def test_probe_changes_nothing(probes: prober.Prober, tmp_path: Path) -> None:
    image = blockdev.blank(tmp_path / "image", 64 * MiB)
    blockdev.run("mkfs.ext4", "-q", str(image))
    before = blockdev.sha256(image), image.stat().st_mtime_ns
    with blockdev.loop(image) as device:
        await probes.probe(device)
    assert (blockdev.sha256(image), image.stat().st_mtime_ns) == before


def _cached(device: str) -> bool:
    descriptor = os.open(device, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 32 * MiB, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


async def test_probe_leaves_the_cache_of_a_mounted_device(
    probes: prober.Prober, tmp_path: Path
) -> None:
    """ext4 keeps its metadata there; and a device that fails is seen all the same."""
    with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
        blockdev.run("mkfs.ext4", "-q", disk.device)
        with blockdev.mounted(disk.device, tmp_path / "mnt"):
            blockdev.run("dd", f"if={disk.device}", "of=/dev/null", "bs=1M", "count=40")
            assert _cached(disk.device)
            found = await probes.probe(disk.device)
            assert found.verdict is Kind.HAS_FS
            assert _cached(disk.device)
            disk.fault({"offset": 0, "length": SIZE, "errno": 5})
            assert (await probes.probe(disk.device)).verdict is Kind.UNREADABLE
            disk.clear()
        assert (await probes.probe(disk.device)).verdict is Kind.HAS_FS
        assert not _cached(disk.device), "of a device that nobody uses the cache is dropped"


async def test_a_slow_device_is_probed_to_its_end(tmp_path: Path) -> None:
    """Each read takes 25 ms, and one waits for the other: a pool of disks that recovers. The 500
    reads of a probe take longer than its deadline."""
    probes = prober.Prober(deadline=3.0)
    try:
        with blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk:
            disk.fault({"offset": 0, "length": SIZE, "seconds": 0.025})
            found = await probes.probe(disk.device)
        assert found.verdict is Kind.BLANK_VERIFIED and found.seconds > probes.deadline
    finally:
        await probes.close()


async def test_hanging_device_has_one_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = expiry.Expiry(monkeypatch)
    probes = prober.Prober(deadline=late.seconds, at_once=1)
    try:
        with (
            blockdev.faulty_disk(tmp_path / "disk", SIZE) as disk,
            blockdev.loop(blockdev.blank(tmp_path / "well", SIZE)) as well,
        ):
            disk.fault({"offset": 0, "length": SIZE, "hang": True})
            first = asyncio.gather(*(probes.probe(disk.device) for _ in range(20)))
            await waiting.until_async(disk.hangs.exists, 30, "a read that hangs")
            late.pass_all()
            answers = list(await first)
            answers += [await probes.probe(disk.device) for _ in range(20)]
            assert {a.verdict for a in answers} == {Kind.TIMEOUT}
            assert probes.started == 1 and probes.hanging == {disk.device}
            probes.deadline = waiting.limit(60.0)  # the only slot is free again
            assert (await probes.probe(well)).verdict is Kind.BLANK_VERIFIED
            disk.clear()
            await waiting.until_async(lambda: not probes.hanging, 60, "the child to be gone")
            assert (await probes.probe(disk.device)).verdict is Kind.BLANK_VERIFIED
    finally:
        await probes.close()


async def test_joined_probe_of_hanging_device_is_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = expiry.Expiry(monkeypatch)
    probes = prober.Prober(deadline=late.seconds)
    silent = tmp_path / "device"
    os.mkfifo(silent)  # opening it waits for a writer, until SIGKILL: as a buffered read does
    try:
        first = asyncio.create_task(probes.probe(str(silent)))
        await late.running()
        second = asyncio.create_task(probes.probe(str(silent)))
        await asyncio.sleep(0)  # it has joined the first
        late.pass_all()
        answers = [await second, await first]
        assert [a.verdict for a in answers] == [Kind.TIMEOUT, Kind.TIMEOUT]
        assert probes.started == 1
    finally:
        await probes.close()


async def test_children_are_kept_while_probes_wait_and_then_one(
    probes: prober.Prober, tmp_path: Path
) -> None:
    """Starting one takes longer than a probe."""
    before = set(_children())
    with contextlib.ExitStack() as stack:
        disks = [
            stack.enter_context(blockdev.loop(blockdev.blank(tmp_path / f"{number}", SIZE)))
            for number in range(12)
        ]
        answers = await asyncio.gather(*(probes.probe(disk) for disk in disks))
        assert {each.verdict for each in answers} == {Kind.BLANK_VERIFIED}

        def one() -> bool:
            return len(set(_children()) - before) == 1

        await waiting.until_async(one, 10, "the other children's end")
        (kept,) = set(_children()) - before
        assert (await probes.probe(disks[0])).verdict is Kind.BLANK_VERIFIED
        assert set(_children()) - before == {kept}


def _children() -> list[int]:
    """Our children that probe."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        pids = ""
        with contextlib.suppress(OSError):  # a thread that has just ended
            pids = (task / "children").read_text()
        for pid in pids.split():
            with contextlib.suppress(OSError):
                if b"volumes.probe.examine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found
