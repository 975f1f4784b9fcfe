"""What requests may ask of the cache, where the answer is no."""

import re
from pathlib import Path
from typing import Any

import pytest

import cache
import kit.errors
from cache import api
from kit.room import Request


@pytest.mark.parametrize("limit", ["\u00b2", "\u0663", "0", "-1", "1 ", "", "9" * 5000, "1001"])
async def test_limit_that_is_no_number_is_refused_by_name(limit: str) -> None:
    nobody: Any = None
    assert api.MOST_FAILURES == 1000
    with pytest.raises(kit.errors.SettingsError, match="limit"):
        await api._failures(nobody, Request(path={"name": "a"}, query={"limit": limit}))


DISKS = (
    # size, free, used, budget, kept -> datasets, other files, left of the budget, free, reserve
    ((1000, 600, 300, 500, 100), [300, 100, 200, 300, 100]),
    ((1000, 600, 300, 9000, 100), [300, 100, 500, 0, 100]),  # more than the disk has
    ((1000, 50, 900, 500, 100), [900, 50, 0, 0, 50]),  # the reserve is short
    ((1000, 0, 1010, 500, 100), [1010, 0, 0, 0, 0]),
)


@pytest.mark.parametrize(("given", "parts"), DISKS)
def test_disk_of_the_store_is_divided_without_a_rest(
    given: tuple[int, int, int, int, int], parts: list[int]
) -> None:
    assert [each.bytes for each in api.disk(*given)] == parts


READERS: tuple[tuple[list[str], str, str, list[str]], ...] = (
    ([], "", "nobody", []),
    ([], "pid 7 (train.py): has /x open", "pid 7 (train.py)", ["has /x open"]),
    (["ml/a"], "pid 7 (train.py): has /x open", "1 pod", ["ml: a"]),
    (["ml/a", "ml/b", "web/c"], "", "3 pods", ["ml: a, b", "web: c"]),
    ([f"ml/{n}" for n in range(7)], "", "7 pods", ["ml: 0, 1, 2, 3, 4 and 2 more"]),
    ([f"{n}/a" for n in range(6)], "", "6 pods",
     [*(f"{n}: a" for n in range(4)), "2 more namespaces"]),
    (["unknown"], "", "1 pod", ["unknown"]),
)  # fmt: skip


@pytest.mark.parametrize(("pods", "used_by", "text", "below"), READERS)
def test_readers_are_pods_by_namespace_or_who_holds_the_view(
    pods: list[str], used_by: str, text: str, below: list[str]
) -> None:
    cell = api.readers(pods, used_by)
    assert (cell.text, [each.text for each in cell.below]) == (text, below)


# What is no amount of data but a count of bytes that decides something.
COUNTS = {"LONGEST_SOCKET", "length", "len(page)", "now.st_size", "offset", "to"}


def test_amounts_are_said_as_sizes() -> None:
    said = {
        f"{path.name}: {name}"
        for path in Path(cache.__file__).parent.rglob("*.py")
        for name in re.findall(r"[{]([^{}]+)[}] bytes", path.read_text())
        if name not in COUNTS
    }
    assert said == set()
