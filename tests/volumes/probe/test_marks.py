"""Where content leaves marks."""

import pytest

from volumes.probe import examine

MiB, GiB = 2**20, 2**30


def test_marks_cover_backups_of_large_volumes() -> None:
    """Where mkfs puts backups on sizes that cannot be made here."""
    for size, wanted in (
        (2**40, [32768 * 4096, 3 * 32768 * 4096, 49 * 32768 * 4096, 64 * MiB, 2**38, 2**40 // 4]),
        (10 * 2**40, [2**40 * 9, 32768 * 4096 * 3**10, 32768 * 4096 * 7**4]),
    ):
        marks = examine.marks(size)
        for offset in wanted:
            assert any(start <= offset < start + length for start, length in marks), offset
        assert sum(length for _, length in marks) < 16 * MiB
        assert all(start >= 0 and start + length <= size for start, length in marks)


def test_samples_depend_on_the_seed() -> None:
    first, again, other = (examine.samples(2**40, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert all(start >= 0 and start + length <= 2**40 for start, length in first)


# What mkfs laid out on 'size' bytes from 'start' on: the first copies of the superblock.
LATE = {
    "ext4 in a partition": (10 * GiB, MiB, [128 * MiB, 3 * 128 * MiB]),
    "ext4 with 1 KiB blocks in a partition": (2 * GiB, MiB, [8 * MiB + 1024, 24 * MiB + 1024]),
    "ext4 behind LUKS2": (10 * GiB, 16 * MiB, [128 * MiB, 3 * 128 * MiB]),
    "XFS in a partition to the end": (2 * GiB, MiB, [(2 * GiB - MiB) // 4]),
    "XFS in a GPT's partition": (2 * GiB, MiB, [(2 * GiB - 2 * MiB) // 4]),
    "XFS of 8 groups, aligned to 4 MiB": (2 * GiB, MiB, [256 * MiB]),
    "XFS of 16 groups in LVM": (10 * GiB, MiB, [(10 * GiB - 4 * MiB) // 16]),
    "XFS of 16 groups behind LUKS2": (10 * GiB, 16 * MiB, [(10 * GiB - 16 * MiB) // 16]),
}


@pytest.mark.parametrize("name", LATE)
def test_marks_cover_what_begins_behind_the_front(name: str) -> None:
    """Its primary marks are all in the first 4 or 16 MiB, which a lost object takes with it."""
    size, start, wanted = LATE[name]
    marks = examine.marks(size)
    for offset in wanted:
        at = start + offset
        assert any(first <= at < first + length for first, length in marks), at


@pytest.mark.parametrize("size", [512, 4096, MiB, 16 * MiB, 2 * GiB, 10 * GiB, 10 * 1024 * GiB])
def test_marks_are_few_and_inside(size: int) -> None:
    marks = examine.marks(size)
    assert all(first >= 0 and length > 0 and first + length <= size for first, length in marks)
    assert len(marks) <= 650
