"""RBD datasets that are updated under readers, and agents that are killed at every stage.

BLOCK_UPDATES, BLOCK_KILLS: how many; the suite has a few, ``make test-faults`` 50 and 108.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache.sources.test_rbd import loops, settings
from tests.testbed import leftovers, pod, rbdimage, waiting, whole_reader
from tests.testbed.agent import Agent, ApiError
from tests.testbed.ceph import CephCluster

MIB = 2**20
SIZE = 48 * MIB
UPDATES = int(os.environ.get("BLOCK_UPDATES", "3"))
KILLS = int(os.environ.get("BLOCK_KILLS", "4"))
READERS = 2
NAME = "train"

pytestmark = [pytest.mark.real, pytest.mark.timeout(240 + 20 * max(UPDATES, 12))]


class Image:
    """An image rbd/NAME, the file that it is equal to, and its snapshots v1, v2, ..."""

    def __init__(self, cluster: CephCluster, area: Path) -> None:
        self.cluster, self.file, self.name = cluster, area / "image", f"updated-{area.name}"
        self.version = 1
        self._random = random.Random(area.name)
        self.stamp = b""
        rbdimage.file_system(self.file, "ext4", SIZE, self._write)
        rbdimage.imported(cluster, self.file, self.name)

    def _write(self, top: Path) -> None:
        for number in range(40):
            self._write_one(top, number)
        self._describe(top)

    def _write_one(self, top: Path, number: int) -> None:
        folder = top / f"d{number % 4}"
        folder.mkdir(exist_ok=True)
        (folder / f"f{number}").write_bytes(self._random.randbytes(200_000))

    def _describe(self, top: Path) -> None:
        whole_reader.describe(top)
        self.stamp = (top / "manifest.json").read_bytes()

    def _change(self, top: Path) -> None:
        for number in self._random.sample(range(40), 3):
            self._write_one(top, number)
        self._describe(top)

    def update(self) -> str:
        """The name of a new snapshot; those before the last one go."""
        self.version += 1
        rbdimage.changed(self.file, self._change)
        rbdimage.updated(self.cluster, self.file, self.name, f"v{self.version}")
        if self.version > 2:
            old = f"rbd/{self.name}@v{self.version - 2}"
            self.cluster.run("rbd", "snap", "rm", "--no-progress", old)
        return f"v{self.version}"

    def is_shown_by(self, view: Path) -> bool:
        with contextlib.suppress(OSError):  # not mounted now
            return (view / "manifest.json").read_bytes() == self.stamp
        return False

    def remove(self) -> None:
        self.cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{self.name}")
        self.cluster.run("rbd", "rm", "--no-progress", f"rbd/{self.name}")


@pytest.fixture
def image(cluster: CephCluster, area: Path) -> Iterator[Image]:
    made = Image(cluster, area)
    yield made
    made.remove()


class Readers:
    """Processes that read whole versions, each opened at its root once."""

    def __init__(self, area: Path, view: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(pod.REPO), leftovers.MARK: str(area)}
        self._reports = [area / f"report{number}" for number in range(READERS)]
        module = [sys.executable, "-m", "tests.testbed.whole_reader", str(view)]
        self._processes = [
            subprocess.Popen([*module, str(report), str(number)], env=environment, cwd="/")
            for number, report in enumerate(self._reports)
        ]

    def end(self) -> list[dict[str, Any]]:
        for each in self._processes:
            each.send_signal(signal.SIGTERM)
        for each in self._processes:
            each.wait(waiting.limit(60))
        return [json.loads(report.read_text()) for report in self._reports]


def nothing_is_left(image: Image, node: Agent) -> None:
    """After the dataset was removed: no device, no client of the cluster, no file."""
    waiting.until(lambda: not loops(node), 30, "the loop devices' end")
    mounted = Path("/proc/self/mountinfo").read_text()
    assert str(node.view(NAME)) not in mounted
    assert image.cluster.run("rbd", "status", f"rbd/{image.name}").count("watcher=") == 0
    assert image.cluster.run("rbd", "lock", "ls", f"rbd/{image.name}").strip() == ""
    assert not (node.state / "sources" / NAME).exists()


def serves(node: Agent, image: Image) -> None:
    node.wait_for(
        lambda: (
            (now := node.dataset(NAME))["snapshot"] == f"v{image.version}"
            and (now["state"], now["served_by"]) == ("complete", "store")
        ),
        90, f"v{image.version} to be served",
    )  # fmt: skip
    assert image.is_shown_by(node.view(NAME))


def test_each_reader_is_on_one_version_while_the_image_is_updated(
    cluster: CephCluster, area: Path, node: Agent, image: Image
) -> None:
    node.cache.update(settings(cluster, area, image.name))
    node.start()
    serves(node, image)
    first = image.stamp
    with (node.view(NAME) / "manifest.json").open("rb") as held:
        readers = Readers(area, node.view(NAME))
        for number in range(UPDATES):
            node.tell(NAME, "update", {"snapshot": image.update()})
            if number == 1:
                cluster.restart_osd()  # the update waits or is tried again; readers see nothing
            serves(node, image)
        assert held.read() == first, "who has a file open keeps its version"
        reports = readers.end()
    print(f"{UPDATES} updates; {reports}")
    for report in reports:
        assert report["count"] == 0, report["troubles"]
        assert report["versions"] > 1
    node.remove(NAME)
    nothing_is_left(image, node)


# --- kills

Ask = Callable[[Agent, Image], None]
Met = Callable[[Agent, str], bool]


def nothing(_: Agent, __: Image) -> None:
    """The next agent goes on with what the last one left."""


def warm(node: Agent, _: Image) -> None:
    node.tell(NAME, "warm")


def update(node: Agent, image: Image) -> None:
    node.tell(NAME, "update", {"snapshot": image.update()})


def evict(node: Agent, _: Image) -> None:
    """Refused while anything else is under way."""

    def taken() -> bool:
        with contextlib.suppress(ApiError):
            return bool(node.tell(NAME, "evict"))
        return bool(node.dataset(NAME)["state"] == "evicted")

    node.wait_for(taken, 60, "an eviction to be taken")


def said(words: str) -> Met:
    return lambda _, log: words in log


def filling(node: Agent, _: str) -> bool:
    now = node.dataset(NAME)
    return bool(now["files"]["done"] or now["state"] == "complete")


def at_once(_: Agent, __: str) -> bool:
    return True


# A life of the agent: what it is asked for, and the stage at which it is killed.
LIVES: list[tuple[str, Ask, Met]] = [
    ("filling", nothing, filling),
    ("publishing", nothing, said("view published")),
    ("update begins", update, said("update begins")),
    ("switching", nothing, said("generation switched")),
    ("discarding", nothing, said("generation discarded")),
    ("starting", nothing, at_once),
    ("evicting", evict, at_once),
    ("evicted", evict, said("block image evicted")),
    ("filling again", warm, filling),
    ("filled", nothing, said("fill ended")),
    ("updating", update, at_once),
    ("updated", nothing, said("update ended")),
]
ROUNDS = -(-KILLS // len(LIVES))


def live(node: Agent, image: Image, ask: Ask, met: Met) -> bool:
    """One life; whether it came to its stage. Some do not come: the last life was past it."""
    before = len(node.said())
    node.start()
    ask(node, image)
    try:
        waiting.until(lambda: met(node, node.said()[before:]), 5, "the stage")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("number", range(ROUNDS))
def test_agent_killed_at_any_stage_leaves_what_the_next_one_ends(
    cluster: CephCluster, area: Path, node: Agent, image: Image, number: int
) -> None:
    chosen = random.Random(number)
    node.cache.update(settings(cluster, area, image.name))
    node.cache["datasets"][0]["earlier"] = 0
    node.cache["fill"] = {"bytes_per_second": "16MiB"}
    missed, view = [], node.view(NAME)
    for name, ask, met in LIVES[: KILLS - number * len(LIVES)]:
        if not live(node, image, ask, met):
            missed.append(name)
        time.sleep(chosen.uniform(0, 0.5) ** 2)  # anywhere around the stage
        node.kill()
        if (view / "manifest.json").exists():  # an evicted image that nothing maps shows nothing
            reader = whole_reader.Reader(str(view), "0")
            reader.round()
            assert reader.troubles == [], name
    print(f"stages that did not come: {missed}")
    assert len(missed) <= len(LIVES) // 3
    node.start()
    node.tell(NAME, "warm")
    serves(node, image)
    reader = whole_reader.Reader(str(view), "0")
    reader.round()
    assert reader.troubles == []
    node.wait_for(lambda: len(node.generations(NAME)) == 1, 60, "the earlier copies to go")
    assert len(loops(node).splitlines()) == 1
    node.remove(NAME)
    nothing_is_left(image, node)
