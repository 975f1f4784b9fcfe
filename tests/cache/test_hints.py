"""What a pod opens while a dataset warms is fetched sooner."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import leftovers, trees
from tests.testbed.agent import Agent
from tests.testbed.pod import Pod

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

DIRECTORIES, FILES, RATE = 40, 2400, 40


@pytest.fixture
def filling(area: Path, node: Agent) -> Agent:
    """A dataset that takes a minute, its last directory coming last."""
    trees.plain(area / "source", FILES, directories=DIRECTORIES, mean=2000)
    node.add_dir("a", area / "source")
    node.cache["fill"] = {"files_per_second": RATE}
    node.cache["hints"] = {"window": "0.5s", "every": "0.5s"}
    return node


@pytest.fixture
def pod(area: Path, filling: Agent) -> Iterator[Pod]:
    filling.start()
    filling.wait_served("a", "overlay")
    pod = Pod(area / "pod", filling.views / "a")
    try:
        yield pod
    finally:
        pod.end()


def last(node: Agent) -> str:
    """The directory that the fill, which goes in the source's order, comes to last."""
    return os.listdir(node.folder.parent / "source")[-1]


def watchers(node: Agent) -> list[int]:
    """Process ids of children that watch what is opened."""
    found = []
    for pid in leftovers.processes(node.folder):
        with contextlib.suppress(OSError):  # it has just ended
            if b"cache.hints:watch" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_hinted_directory_is_stored_first(filling: Agent, pod: Pod) -> None:
    late = last(filling)
    filling.wait_for(lambda: watchers(filling), 20, "a child that watches")
    read = f"while sleep 0.1; do cat {pod.data}/{late}/* >/dev/null; done"
    job = pod.spawn("sh", "-c", read)
    stored = filling.tree("a") / late
    filling.wait_for(lambda: len(os.listdir(stored)) == FILES // DIRECTORIES, 40, "the hinted ones")
    done = filling.dataset("a")["files"]["done"]
    job.kill()
    assert done < FILES * 0.7, "its turn had come anyway"
    filling.cache["fill"] = {}
    filling.write()
    filling.wait_state("a", "complete")
    trees.assert_equal(filling.folder.parent / "source", filling.view("a"))


def test_hints_off_watch_nothing(filling: Agent) -> None:
    filling.cache["hints"] = {"enabled": False}
    filling.start()
    filling.wait_served("a", "overlay")
    late = last(filling)
    began = filling.dataset("a")["files"]["done"]
    while filling.dataset("a")["files"]["done"] < began + 5 * RATE:
        for name in os.listdir(filling.view("a") / late):
            (filling.view("a") / late / name).read_bytes()
        time.sleep(0.2)
    assert os.listdir(filling.tree("a") / late) == []
    assert not watchers(filling)
