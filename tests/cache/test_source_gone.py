"""A source that is unmounted after it was looked at: the directory beneath is not the dataset."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.fill import control
from cache.fill.worker import Worker
from linux import mounts
from tests.cache import byhand
from tests.testbed import trees

pytestmark = pytest.mark.real


@pytest.fixture
def source(area: Path) -> Iterator[Path]:
    """A mounted directory with files in it; its mount point is empty beneath."""
    behind, target = area / "behind", area / "source"
    trees.plain(behind, 40)
    target.mkdir()
    mounts.mount(str(behind), target, None, mounts.MS_BIND)
    yield target
    if target.is_mount():
        mounts.detach(target)


def task(area: Path, source: Path) -> dict[str, Any]:
    generation = area / "generation"
    for name in ("tree", "staging", "links"):
        (generation / name).mkdir(parents=True, exist_ok=True)
    return byhand.task(generation, source)


def test_a_pass_over_the_directory_beneath_ends_and_keeps_what_is_stored(
    area: Path, source: Path
) -> None:
    given = task(area, source)
    assert byhand.run("fillpass", given)["result"] == "complete"
    before = trees.records(area / "generation" / "tree")
    assert len(before) > 40
    mounts.detach(source)
    for module in ("fillpass", "verifypass"):
        end = byhand.run(module, given)
        assert (end["result"], end["why"]) == (
            "failed",
            "the source is not the one that was looked at",
        )
    assert trees.records(area / "generation" / "tree") == before


def test_a_worker_that_is_started_later_takes_no_other_source(area: Path, source: Path) -> None:
    given = task(area, source)
    Worker(0, control.Control.create().descriptor, given)
    mounts.detach(source)
    with pytest.raises(OSError, match="not the one") as raised:
        Worker(0, control.Control.create().descriptor, given)
    assert raised.value.errno == errno.ESHUTDOWN
