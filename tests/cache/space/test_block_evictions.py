"""Block images give room: what jobs read then, who is waited for, that the space is free.

What stands in for a mapped snapshot is a loop device over the image that the copy is of. What the
device mapper adds is in test_rbd_guest.py.
"""

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache import component, status
from cache.dataset.dataset import Dataset
from cache.fill import protocol
from cache.fill.protocol import Least
from cache.settings import CacheSettings, DatasetSettings, RbdSource
from cache.sources import base
from cache.space import budgets, limits, victims
from cache.store import image_copy, subset
from cache.views import by_id
from cache.views.view import Stage
from ceph.protocol import SnapshotFacts
from linux import loop, mountinfo
from tests.testbed import blockdev, rbdimage, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

MIB = 2**20
SIZE = 64 * MIB
FILES = {f"f{n}": os.urandom(8) * 40_000 for n in range(20)}
NOTHING_MAPS = "nothing here can map its image"


def write(top: Path) -> None:
    for name, data in FILES.items():
        (top / name).write_bytes(data)


class Source:
    """A source of block images. ``root``: where it is mounted, '' where nothing can map it."""

    immutable, replaceable, block, place, note = True, False, True, "", ""
    identity: dict[str, Any] = {"kind": "rbd"}  # noqa: RUF012 - it is only read

    def __init__(self, root: str) -> None:
        self.root = root

    async def reach(self, deadline: float, *, serve: bool = True) -> base.Reached:
        return base.Reached(root=self.root, device=self.root, stamp="", client="krbd")

    def take(self, source: Any) -> None:
        raise AssertionError

    async def snapshots(self, deadline: float) -> dict[str, float]:
        return {}

    async def release(self) -> None:
        return


class Node:
    """Images, complete in the store of a node, and served from it."""

    def __init__(self, area: Path) -> None:
        self.area = area
        self.image, self.source = area / "image", area / "source"
        rbdimage.file_system(self.image, "ext4", SIZE, write)
        self.source.mkdir()
        blockdev.mount_image(self.image, self.source, "ro")
        self.cache = CacheSettings(
            store=area / "store", views=area / "views", budget=2**40, reserve=0.0001
        )
        self.datasets: dict[str, Dataset] = {}
        self.budgets = budgets.Budgets(
            self.datasets, self._no_pass, self.limits, lambda: 0, self._nothing, self._nothing,
            subset.Amount,
        )  # fmt: skip

    async def _no_pass(self, *_: object) -> protocol.End:
        raise AssertionError("an image needs no pass")

    async def _nothing(self, *_: object) -> None:
        return

    def limits(self, dataset: Dataset, kind: str) -> protocol.Limits:
        every = self.datasets.values()
        return limits.of(dataset, kind, every, 0, dataset.current, Least())

    async def add(self, name: str, *, mapped: bool = True, **settings: Any) -> Dataset:
        """Its copy is complete, and the view shows it."""
        dataset = self.known(name, mapped=mapped, **settings)
        folder = Path(dataset.folder)
        folder.mkdir(parents=True, mode=0o700)
        facts = SnapshotFacts("fsid", 1, name, 4, SIZE)
        with image_copy.opened(folder, facts) as held, self.image.open("rb") as read:
            for chunk in range(held.count):
                held.put(chunk, read.read(image_copy.CHUNK_BYTES))
            held.commit()
            stored = sum(state is image_copy.State.STORED for _, state in held.states())
        Path(dataset.view).mkdir(parents=True)
        await dataset.change(
            state="complete", completed=1.0, files=stored, done_files=stored, bytes=SIZE,
            done_bytes=SIZE, used=image_copy.used(folder),
        )  # fmt: skip
        dataset.show_kept_figures()
        await dataset.publish(Stage.STORE)
        return dataset

    def known(self, name: str, *, mapped: bool = True, **settings: Any) -> Dataset:
        place = RbdSource(
            kind="rbd", monitors=["10.0.0.1"], pool="p", image=name, snapshot="v1",
            user="admin", secret_file=self.area / "secret",
        )  # fmt: skip
        own = DatasetSettings(name=name, freshness="snapshot", source=place, **settings)
        dataset = Dataset(own, self.cache, self.area / "state", lambda: None)
        dataset.current.source = Source(str(self.source) if mapped else "")
        self.datasets[name] = dataset
        return dataset

    def limit(self, budget: int) -> None:
        self.cache = self.cache.model_copy(update={"budget": budget})
        for each in self.datasets.values():
            each.cache = self.cache

    def shown(self, dataset: Dataset) -> bool:
        """The view has the right bytes, through whatever it is mounted."""
        return all((Path(dataset.view) / name).read_bytes() == data for name, data in FILES.items())


def loops(dataset: Dataset) -> list[str]:
    return loop.over(os.path.realpath(dataset.layer))


@pytest.fixture
def node(area: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(budgets, "LOOK_SECONDS", 0.0)
    return Node(area)  # what is mounted goes with the area


async def test_image_gives_room_and_jobs_read_its_source(node: Node) -> None:
    dataset = await node.add("a")
    copy = Path(dataset.layer)
    taken = dataset.used()
    assert taken > 0
    assert loops(dataset)
    node.limit(taken - 1)
    await node.budgets.keep()
    assert dataset.stage is Stage.SOURCE
    assert node.shown(dataset)
    assert not copy.exists()
    assert loops(dataset) == []
    assert (dataset.used(), dataset.freed) == (0, taken)
    record = dataset.generation
    assert (record.state, record.evicting, record.done_files) == ("partial", False, 0)
    assert record.left_files == record.files
    assert not dataset.whole()
    assert by_id.users(dataset.view, dataset.current.id, dataset.layer) == []


async def test_image_that_fits_stays(node: Node) -> None:
    dataset = await node.add("a")
    node.limit(dataset.used())
    await node.budgets.keep()
    assert dataset.generation.state == "complete"
    assert dataset.stage is Stage.STORE


async def test_image_that_was_used_last_stays_and_a_kept_one(node: Node) -> None:
    early, late = await node.add("z"), await node.add("a")
    early.use = dataclasses.replace(early.use, last=1.0)
    late.use = dataclasses.replace(late.use, last=2.0)
    node.limit(late.used())
    await node.budgets.keep()
    assert [each.generation.state for each in (early, late)] == ["partial", "complete"]
    late.settings = late.settings.model_copy(update={"keep": True})
    node.limit(late.used() - 1)
    await node.budgets.keep()
    assert late.generation.state == "complete"
    assert node.budgets.in_the_way("") == ["a"]


async def test_held_image_gives_last(node: Node) -> None:
    held, free = await node.add("a"), await node.add("b")
    held.use = dataclasses.replace(held.use, by="pid 1", last=1.0)
    free.use = dataclasses.replace(free.use, last=2.0)
    node.limit(free.used())
    await node.budgets.keep()
    assert [each.generation.state for each in (held, free)] == ["complete", "partial"]


async def test_file_that_a_job_holds_open_is_waited_for(node: Node) -> None:
    dataset = await node.add("a")
    copy = Path(dataset.layer)
    with (Path(dataset.view) / "f3").open("rb") as opened:
        assert opened.read(10) == FILES["f3"][:10]
        node.limit(1)
        await node.budgets.keep()
        assert copy.exists(), "its space would not be free"
        assert dataset.generation.evicting
        assert dataset.used() > 0
        assert node.shown(dataset), "new opens read the source"
        assert opened.read() == FILES["f3"][10:]
        assert dataset.generation.state == "partial"
        assert not await node.budgets.finish(dataset)
        assert "a job has a file of it open" in dataset.generation.why
    assert not await node.budgets.finish(dataset), "whoever lacked the room has it first"
    assert not copy.exists()
    assert (dataset.generation.evicting, dataset.used()) == (False, 0)


async def test_what_a_killed_agent_began_the_next_one_ends(node: Node) -> None:
    dataset = await node.add("a")
    record = dataset.generation
    await dataset.change(state="partial", evicting=True, left_files=record.files)
    again = node.known("a")
    again.generation = dataset.generation
    again.show_kept_figures()
    again.stage = dataset.stage
    assert not again.listed(), "no range is read from the copy any more"
    await node.budgets.finish(again)
    assert again.stage is Stage.SOURCE
    assert node.shown(again)
    assert not Path(again.layer).exists()
    assert not again.generation.evicting


async def test_image_that_nothing_can_map_gives_when_nobody_holds_it(node: Node) -> None:
    dataset = await node.add("a", mapped=False)
    node.limit(1)
    dataset.use = dataclasses.replace(dataset.use, by="pid 77 (train)")
    await node.budgets.keep()
    assert dataset.generation.state == "complete"
    assert node.shown(dataset)
    dataset.use = dataclasses.replace(dataset.use, by="")
    await node.budgets.keep()
    assert dataset.stage is Stage.NONE
    assert not Path(dataset.layer).exists()
    assert Path(dataset.view).is_dir(), "who was given the folder gets what is mounted later"
    assert mountinfo.top(dataset.view) is None


async def test_image_that_nothing_can_map_stays_while_a_pod_was_given_it(node: Node) -> None:
    """Also a pod that has no file of it open now."""
    dataset = await node.add("a", mapped=False)
    place = node.area / "pod"
    place.mkdir()
    script = f"""
    mount --bind {dataset.view} {place}
    echo ready
    read -r _
    """
    command = ["unshare", "--mount", str(blockdev.APART), str(node.area), "--"]
    with subprocess.Popen(
        [*command, "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as pod:
        assert pod.stdout is not None and pod.stdin is not None
        assert pod.stdout.readline() == "ready\n"
        with pytest.raises(kit.errors.HostError, match=f"{NOTHING_MAPS}.* at {place}"):
            await node.budgets._evictions.settle(
                dataset, grow=False, limits=dataclasses.replace(node.limits(dataset, "evict"),
                budget=1),
            )  # fmt: skip
        assert node.shown(dataset)
        assert dataset.generation.state == "complete"
        pod.stdin.close()
        pod.wait(waiting.limit(30))


async def test_operator_takes_an_image_out(node: Node) -> None:
    dataset = await node.add("a")
    component.refuse_eviction(dataset, force=False)
    dataset.eviction = dataclasses.replace(dataset.eviction, state="queued", to=0)
    await node.budgets.take_out(dataset)
    shown = status.of_dataset(dataset).evict
    assert shown is not None
    assert (shown.state, shown.bytes) == ("evicted", dataset.freed)
    assert dataset.freed > 0
    assert (dataset.generation.paused, dataset.state()) == ("evicted", "evicted")


async def test_inodes_of_an_image_are_those_of_two_files(node: Node) -> None:
    dataset = await node.add("a")
    assert limits.inodes_of(dataset) == 2
    share = limits.share_of(dataset)
    assert share.ready
    assert victims.next_one([share], victims.StoreBudget(share.bytes - 1), ()) == "a"
