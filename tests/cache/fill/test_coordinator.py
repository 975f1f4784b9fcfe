"""Room on the SSD, and when a batch is committed."""

import dataclasses
import os
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.fill import coordinator, space
from cache.fill.coordinator import Batch, Staged
from cache.store.subset import NOTHING, Amount
from tests.cache import passes


def disk(blocks: int, available: int, files: int, files_available: int) -> os.statvfs_result:
    return os.statvfs_result(
        (4096, 4096, blocks, available, available, files, files_available, files_available, 0, 255)
    )


def room(
    of: os.statvfs_result, *, reserve: float, budget: int, used: int, pending: Amount
) -> Amount:  # fmt: skip
    allowed = dataclasses.replace(passes.LIMITS, reserve=reserve, budget=budget)
    return (space.balance(of, allowed, used=used, inodes=0) - pending).at_least(NOTHING)


sizes = st.integers(0, 2**40)


@given(
    blocks=st.integers(1, 2**30), free=st.floats(0, 1), files=st.integers(0, 2**30),
    reserve=st.floats(0, 0.99), budget=sizes, used=sizes,
    pending=st.builds(Amount, sizes, st.integers(0, 2**20)),
    wanted=sizes, inodes=st.integers(0, 2**20),
)  # fmt: skip
def test_room_never_exceeds_budget_or_reserve(
    blocks: int, free: float, files: int, reserve: float, budget: int, used: int,
    pending: Amount, wanted: int, inodes: int,
) -> None:  # fmt: skip
    available, files_available = int(blocks * free), int(files * free)
    left = room(
        disk(blocks, available, files, files_available),
        reserve=reserve, budget=budget, used=used, pending=pending,
    )  # fmt: skip
    assert left.bytes >= 0
    assert left.inodes >= 0
    if wanted and left.holds(wanted, inodes):
        assert used + pending.bytes + wanted <= budget
        free_bytes = available * 4096 - pending.bytes - wanted
        assert free_bytes >= int(blocks * 4096 * reserve)
    if inodes and left.holds(0, inodes) and files:
        assert files_available - pending.inodes - inodes >= int(files * reserve)


def test_room_has_enough_inodes_where_they_are_not_counted() -> None:
    left = room(disk(10_000, 10_000, 0, 0), reserve=0.5, budget=2**40, used=0, pending=Amount(0, 0))
    assert left.inodes > 2**60
    assert left.bytes == 5000 * 4096 - space.HEADROOM_BYTES


SMALL = disk(10_000, 5_000, 1_000, 500)  # 39.1 MiB, half of it free
FREE = "stay free (cache.reserve)"
OWN = {"own": True, "own_inodes": True}


@pytest.mark.parametrize(
    ("limits", "used", "lacks", "why"),
    [
        ({"budget": 2**20}, 2**20, (2**20, 9), "cache.budget is too small"),
        ({"budget": 2**20} | OWN, 2**20, (2**20, 9), "its own budget is too small"),
        ({"inodes": 100}, 0, (4096, 200), "cache.budget_inodes is too small"),
        ({"inodes": 100} | OWN, 0, (4096, 200), "its own budget_inodes is too small"),
        ({"reserve": 0.4, "others": 2**20}, 2**21, (2**23, 9),
         f"of the disk's 39.1 MiB other files take 16.5 MiB, and 15.6 MiB {FREE}"),
        ({"reserve": 0.05}, 0, (0, 600), f"of the disk's 1000 inodes 500 are free, and 50 {FREE}"),
    ],
)  # fmt: skip
def test_what_there_is_no_room_in_is_named(
    limits: dict[str, Any], used: int, lacks: tuple[int, int], why: str
) -> None:
    allowed = dataclasses.replace(passes.LIMITS, **{"budget": 2**40, "reserve": 0.0, **limits})
    found = space.tightest(SMALL, allowed, used=used, inodes=20, lacks=Amount(*lacks))
    assert found == why


def test_batch_is_due_by_files_bytes_age_or_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting = Batch()
    assert not waiting.due(more_is_coming=False)
    waiting.add(Staged("a", 1, files=1))
    assert waiting.due(more_is_coming=False)
    assert not waiting.due(more_is_coming=True)
    now[0] += coordinator.BATCH_SECONDS
    assert waiting.due(more_is_coming=True)
    waiting.begin_commit()
    waiting.add(Staged("b", 1, files=coordinator.BATCH_FILES))
    assert waiting.due(more_is_coming=True)
    waiting.begin_commit()
    waiting.add(Staged("c", 1, bytes=coordinator.BATCH_BYTES))
    assert waiting.due(more_is_coming=True)
    assert [staged.folder for staged in waiting.all()] == ["c", "b"]
    waiting.committing = []
    assert [staged.folder for staged in waiting.all()] == ["c"]
