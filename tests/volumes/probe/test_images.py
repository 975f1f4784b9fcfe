"""What a device may hold, and the verdict on it: the table of device images of the field review, as
far as Debian's own programs make them here. Real loop devices.

The promise is that what holds data is never blank, also when its first object is lost. Last in the
table is what the promise leaves out, as docs/guard.md says.
"""

import contextlib
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, waiting
from volumes.probe import prober
from volumes.probe.examine import Kind

pytestmark = pytest.mark.real

KiB, MiB, GiB = 2**10, 2**20, 2**30
SIZE = 2 * GiB
EXT4 = ("mkfs.ext4", "-q")
EXT4_1K = ("mkfs.ext4", "-q", "-b", "1024")
XFS = ("mkfs.xfs", "-q")
XFS_12 = ("mkfs.xfs", "-q", "-d", "agcount=12")
BTRFS = ("mkfs.btrfs", "-q")
LUKS2 = (
    *("cryptsetup", "-q", "--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations"),
    *("1000", "--key-file", "/etc/hostname", "luksFormat"),
)
LUKS1 = tuple("luks1" if word == "luks2" else word for word in LUKS2)
GPT = ("parted", "-s", "DEVICE", "mklabel", "gpt", "mkpart", "a", "1MiB", "100%")
MBR = ("parted", "-s", "DEVICE", "mklabel", "msdos", "mkpart", "primary", "1MiB", "100%")
FRONTS = (4 * MiB, 8 * MiB, 16 * MiB)
CONTENT = {Kind.HAS_FS, Kind.PARTITIONED, Kind.ENCRYPTED, Kind.UNKNOWN_CONTENT, Kind.AMBIVALENT}

# name: how it is made, the verdict
WHOLE = {
    "ext2": (("mkfs.ext2", "-q"), Kind.HAS_FS),
    "ext4, 1 KiB blocks": (EXT4_1K, Kind.HAS_FS),
    "ext4, 64 KiB blocks": (("mkfs.ext4", "-q", "-F", "-b", "65536"), Kind.HAS_FS),
    "ext4, meta_bg": (("mkfs.ext4", "-q", "-O", "meta_bg,^resize_inode"), Kind.HAS_FS),
    "external journal": (("mke2fs", "-q", "-O", "journal_dev"), Kind.HAS_FS),
    "XFS": (XFS, Kind.HAS_FS),
    "XFS, 12 groups": (XFS_12, Kind.HAS_FS),
    "btrfs": (BTRFS, Kind.HAS_FS),
    "swap": (("mkswap",), Kind.HAS_FS),
    "swap, 64 KiB pages": (("mkswap", "-p", "65536"), Kind.HAS_FS),
    "minix": (("mkfs.minix",), Kind.HAS_FS),
    "bfs": (("mkfs.bfs",), Kind.HAS_FS),
    "LUKS1": (LUKS1, Kind.ENCRYPTED),
    "LUKS2": (LUKS2, Kind.ENCRYPTED),
    "GPT": (GPT, Kind.PARTITIONED),
    "MBR": (MBR, Kind.PARTITIONED),
    "Sun label": (("parted", "-s", "DEVICE", "mklabel", "sun"), Kind.PARTITIONED),
    "Mac label": (("parted", "-s", "DEVICE", "mklabel", "mac"), Kind.PARTITIONED),
}
# name: what is made, where it begins, whether it is encrypted, how much of the front is lost
LOST = {
    **{
        f"{name}, {front // MiB} MiB lost": (command, 0, False, front)
        for front in FRONTS
        for name, command in (
            ("ext4", EXT4),
            ("ext4 of 1 KiB", EXT4_1K),
            ("XFS", XFS),
            ("XFS of 12 groups", XFS_12),
            ("btrfs", BTRFS),
            ("GPT", GPT),
        )
    },
    # a partition, and LVM's first volume, begin at 1 MiB
    **{
        f"{name} at 1 MiB, {front // MiB} MiB lost": (command, MiB, False, front)
        for front in FRONTS
        for name, command in (("ext4", EXT4), ("ext4 of 1 KiB", EXT4_1K), ("XFS", XFS))
    },
    "ext4 behind LUKS2, 16 MiB lost": (EXT4, 16 * MiB, True, 16 * MiB),
    "XFS behind LUKS2, 16 MiB lost": (XFS, 16 * MiB, True, 16 * MiB),
}
# The marks of these are all in the first 4 MiB.
BEYOND = {
    "swap, 4 MiB lost": (("mkswap",), 0, False, 4 * MiB),
    "an empty MBR, 4 MiB lost": (MBR, 0, False, 4 * MiB),
    "an empty LUKS2, 16 MiB lost": (LUKS2, 0, False, 16 * MiB),
}


@pytest.fixture
async def probes() -> AsyncIterator[prober.Prober]:
    made = prober.Prober(deadline=waiting.limit(60.0))  # a busy machine
    yield made
    await made.close()


def make(image: Path, command: tuple[str, ...]) -> None:
    """A device of parted's and cryptsetup's: other programs take a file as well."""
    with blockdev.loop(image) as device:
        words = [device if word == "DEVICE" else word for word in command]
        blockdev.run(*words, *([] if "DEVICE" in command else [device]))


def pieces(image: Path) -> Iterator[tuple[int, bytes]]:
    """What a sparse file holds, with its places."""
    with image.open("rb") as stream:
        at = 0
        while True:
            try:
                at = os.lseek(stream.fileno(), at, os.SEEK_DATA)
            except OSError:
                return
            end = os.lseek(stream.fileno(), at, os.SEEK_HOLE)
            while at < end:
                data = os.pread(stream.fileno(), min(MiB, end - at), at)
                yield at, data
                at += len(data)


@contextlib.contextmanager
def laid(
    folder: Path, command: tuple[str, ...], start: int, encrypted: bool, lost: int
) -> Iterator[str]:
    """A device of SIZE with that on it from ``start`` on, whose first ``lost`` bytes are zeros."""
    inner = blockdev.blank(folder / "inner", SIZE - start)
    make(inner, command)
    image = blockdev.blank(folder / "image", SIZE)
    noise = random.Random(1)
    with image.open("r+b") as stream:
        for at, data in pieces(inner):
            for page in range(0, len(data), 4 * KiB):
                part = data[page : page + 4 * KiB]
                if start + at + page >= lost and part.strip(b"\0"):
                    stream.seek(start + at + page)
                    stream.write(noise.randbytes(len(part)) if encrypted else part)
    with blockdev.loop(image) as device:
        yield device


@pytest.mark.parametrize("name", WHOLE)
async def test_content_is_recognised(probes: prober.Prober, tmp_path: Path, name: str) -> None:
    command, kind = WHOLE[name]
    with laid(tmp_path, command, 0, False, 0) as device:
        found = await probes.probe(device)
    assert found.verdict is kind, found


@pytest.mark.parametrize("name", LOST)
async def test_what_lost_its_front_is_not_blank(
    probes: prober.Prober, tmp_path: Path, name: str
) -> None:
    with laid(tmp_path, *LOST[name]) as device:
        found = [await probes.probe(device) for _ in range(6)]  # each with other samples
    assert {each.verdict for each in found} <= CONTENT, found


@pytest.mark.parametrize("name", BEYOND)
async def test_what_keeps_all_its_marks_in_the_front_looks_blank(
    probes: prober.Prober, tmp_path: Path, name: str
) -> None:
    with laid(tmp_path, *BEYOND[name]) as device:
        found = await probes.probe(device)
    assert found.verdict is Kind.BLANK_VERIFIED, found


# 10 MiB at once are found or missed by chance; a byte at a mark always is found.
BYTES = {
    "nothing": (None, Kind.BLANK_VERIFIED),
    "one at 0": (0, Kind.UNKNOWN_CONTENT),
    "one at the end": (SIZE - 1, Kind.UNKNOWN_CONTENT),
    "one behind the front": (4 * MiB + 64 * KiB, Kind.BLANK_VERIFIED),  # sampling: documented
}


@pytest.mark.parametrize("name", BYTES)
async def test_single_bytes(probes: prober.Prober, tmp_path: Path, name: str) -> None:
    at, kind = BYTES[name]
    image = blockdev.blank(tmp_path / "image", SIZE)
    if at is not None:
        with image.open("r+b") as stream:
            stream.seek(at)
            stream.write(b"x")
    with blockdev.loop(image) as device:
        assert (await probes.probe(device)).verdict is kind


@pytest.mark.parametrize("size", [512, KiB, 4 * KiB, MiB, 4 * MiB + 64 * KiB + 512, GiB + 512])
async def test_zeros_of_any_size_are_blank(
    probes: prober.Prober, tmp_path: Path, size: int
) -> None:
    with blockdev.loop(blockdev.blank(tmp_path / "image", size)) as device:
        found = await probes.probe(device)
    assert (found.verdict, found.size) == (Kind.BLANK_VERIFIED, size)
