"""A source that is unmounted after it was looked at: the directory beneath is not the dataset."""

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.fill import control
from cache.fill.worker import Worker
from cache.sources import reach
from linux import mounts
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
    return {
        "dataset": "a", "generation": str(generation), "source": str(source),
        "stamp": reach.look(str(source))["stamp"], "immutable": False, "native": None, "used": 0,
        "mounted": [], "do": "limits", "workers": 1, "bytes_per_second": 0, "files_per_second": 0,
        "space": {"reserve": 0.01, "budget": 2**30, "others": 0},
        "reachable": True, "against_source": False,
    }  # fmt: skip


def run(module: str, given: dict[str, Any]) -> dict[str, Any]:
    """The end event of a pass."""
    with subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        events = [json.loads(line) for line in process.stdout]  # its input open: the agent lives
    end: dict[str, Any] = events[-1]
    return end


def test_a_pass_over_the_directory_beneath_ends_and_keeps_what_is_stored(
    area: Path, source: Path
) -> None:
    given = task(area, source)
    assert run("cache.fill.fillpass", given)["result"] == "complete"
    before = trees.records(area / "generation" / "tree")
    assert len(before) > 40
    mounts.detach(source)
    for module in ("cache.fill.fillpass", "cache.fill.verifypass"):
        end = run(module, given)
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
