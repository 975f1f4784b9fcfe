"""Where content leaves marks."""

from volumes.probe import examine

MiB = 2**20


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
