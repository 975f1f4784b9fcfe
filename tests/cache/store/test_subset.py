"""Which files stay when not all fit: pure, by Hypothesis and by simulated epochs."""

import collections
import random

import hypothesis
from hypothesis import strategies

from cache.store import subset
from cache.store.tree import Entry

SIZES = strategies.lists(strategies.integers(0, 2**22), min_size=1, max_size=300)


def entries(sizes: list[int]) -> list[Entry]:
    return [
        Entry(f"{n:05}", 0o100644, 0, 0, size, 0, n, 1, False, 0, 0) for n, size in enumerate(sizes)
    ]


def positions(sizes: list[int], key: bytes = b"k") -> list[int]:
    whole = subset.Amount(sum(sizes), len(sizes))
    return subset.Positions(key, whole).of(["d"], whole, entries(sizes))


def chosen(sizes: list[int], budget: int, inodes: int = 2**40) -> set[int]:
    histogram = subset.Histogram()
    at = positions(sizes)
    for where, size in zip(at, sizes, strict=True):
        histogram.add(where, size, stored=False)
    share = histogram.share(subset.Amount(budget, inodes), 0)
    return {n for n, where in enumerate(at) if where < share}


@hypothesis.given(SIZES, strategies.integers(0, 2**30), strategies.integers(0, 400))
def test_never_more_than_fits(sizes: list[int], budget: int, inodes: int) -> None:
    kept = chosen(sizes, budget, inodes)
    assert sum(sizes[n] for n in kept) <= budget
    assert len(kept) <= inodes
    if sum(sizes) <= budget and len(sizes) <= inodes:
        assert len(kept) == len(sizes)


@hypothesis.given(SIZES, strategies.integers(0, 2**28), strategies.integers(0, 2**28))
def test_smaller_budget_keeps_a_part_of_the_same(sizes: list[int], one: int, two: int) -> None:
    assert chosen(sizes, min(one, two)) <= chosen(sizes, max(one, two))


@hypothesis.given(SIZES, strategies.integers(1, 2**26), strategies.data())
def test_shrinking_frees_enough(
    sizes: list[int], too_much: int, data: strategies.DataObject
) -> None:
    """Files may take less than their most: what is freed is what they took."""
    really = [data.draw(strategies.integers(size // 2, size)) for size in sizes]
    at = positions(sizes)
    histogram = subset.Histogram()
    for where, size in zip(at, sizes, strict=True):
        histogram.add(where, size, stored=True)
    share = histogram.share(subset.Amount(-too_much, 2**40), sum(really))
    assert histogram.stored_from(share) == sum(where >= share for where in at)
    if too_much <= sum(really) // 4:
        assert share < subset.ALL


def test_large_file_keeps_no_small_one_out() -> None:
    sizes = [100] * 900 + [60_000_000]
    kept = chosen(sizes, 40_000_000)
    assert kept == set(range(900))
    assert 900 in chosen(sizes, sum(sizes))


def test_equal_large_files_use_the_budget() -> None:
    sizes = [10_000_000] * 10
    assert len(chosen(sizes, 75_000_000)) == 7
    assert len(chosen(sizes, 15_000_000)) == 1


def test_key_decides_and_links_stay_together() -> None:
    sizes = [1000] * 2000
    same = sum(a == b for a, b in zip(positions(sizes), positions(sizes, b"q"), strict=True))
    assert same < 20
    linked = [each._replace(nlink=2, ino=77) for each in entries(sizes)[:5]]
    whole = subset.Amount(10**9, 10**6)
    for inside in (whole, subset.Amount(5000, 5)):
        assert len(set(subset.Positions(b"k", whole).of(["d"], inside, linked))) == 1


@hypothesis.given(
    strategies.lists(strategies.integers(1, 40), min_size=30, max_size=60),
    strategies.integers(1, subset.SHARES - 1),
)
def test_few_directories_are_kept_in_part(counts: list[int], share: int) -> None:
    """Of many small ones; of one large one as much as there is room for."""
    whole = subset.Amount(10**7, sum(counts))
    cut = 0
    for number, count in enumerate(counts):
        inside = subset.Amount(whole.bytes * count // whole.inodes, count)
        at = subset.Positions(b"k", whole).of([f"d{number}"], inside, entries([1] * count))
        cut += 0 < sum(where < share for where in at) < count
        assert max(at) - min(at) <= subset.SHARES * 1.5 * count / whole.inodes + 1
    assert cut <= len(counts) / 3
    alone = subset.Positions(b"k", whole).of(["d"], whole, entries([1] * 2000))
    assert abs(sum(where < share for where in alone) / 2000 - share / subset.SHARES) < 0.1


def test_hit_ratio_is_the_cached_fraction_where_least_recently_used_has_next_to_none() -> None:
    source = random.Random(13)
    count = 4000
    for fraction in (0.25, 0.5, 0.75):
        kept = chosen([1000] * count, int(count * 1000 * fraction))
        lru: collections.OrderedDict[int, None] = collections.OrderedDict()
        hits, lru_hits = 0, 0
        for epoch in range(4):
            order = list(range(count))
            source.shuffle(order)
            for file in order:
                hits += epoch > 0 and file in kept
                lru_hits += epoch > 0 and file in lru
                lru.pop(file, None)
                lru[file] = None
                if len(lru) > int(count * fraction):
                    lru.popitem(last=False)
        assert abs(hits / (3 * count) - len(kept) / count) < 1e-9
        assert abs(len(kept) / count - fraction) < 0.02
        assert lru_hits < hits
