"""Which volumes of pods with users of their own are exchanged for the store, and how often."""

import asyncio
import types
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import kit.child
import kit.errors
from cache.csi import driver, mounts, node, records
from cache.views.view import Stage
from linux import mountinfo
from tests.testbed import waiting

TYPES = ("overlay", "xfs", "zfs")  # a device of each
TOLD = "volume could not be renewed"


class Node:
    """A node of one volume each of some datasets: what is mounted, and what is exchanged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.datasets: dict[str, Any] = {}
        self.driver = driver.Driver(self.datasets, folder)
        self.service = self.driver.node
        self.folder = folder
        self.types: dict[str, str] = {}  # by mount point
        self.ids: dict[str, int] = {}
        self.reads = 0
        self.asked: list[str] = []
        self.trouble: dict[str, kit.errors.AgentError] = {}
        self.exchanges = True
        monkeypatch.setattr(mountinfo, "read", self.read)
        monkeypatch.setattr(kit.child, "call", self.call)
        monkeypatch.setattr(node, "shown", lambda dataset: dataset)

    def add(self, name: str, stage: Stage, view: str, shows: str = "overlay") -> None:
        target = self.target(name)
        self.datasets[name] = types.SimpleNamespace(stage=stage, view=f"/views/{name}")
        self.types |= {f"/views/{name}": view, target: shows}
        self.service.volumes[target] = records.DatasetVolume(name, target, name, "direct", name)
        users = Path(target).parents[3] / "userns"
        users.parent.mkdir(parents=True)
        users.touch()

    def target(self, name: str) -> str:
        return f"{self.folder}/pods/{name}/volumes/kubernetes.io~csi/v/mount"

    def read(self) -> list[mountinfo.Mount]:
        self.reads += 1
        return [
            mountinfo.Mount(
                self.ids.setdefault(target, len(self.ids) + 1), 0, 0, TYPES.index(fstype), "/",
                target, frozenset(), None, None, fstype, "none", "",
            )
            for target, fstype in self.types.items()
        ]  # fmt: skip

    async def call(self, function: Any, target: str, view: str, *_: Any, deadline: float) -> None:
        assert function is mounts.renew
        name = view.removeprefix("/views/")
        self.asked.append(name)
        await asyncio.sleep(0)
        if name in self.trouble:
            raise self.trouble[name]
        if self.exchanges:
            self.types[target] = self.types[view]

    def told(self) -> dict[str, str]:
        return {each.subject: each.message for each in self.driver.findings()}


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


async def test_volumes_that_are_not_stored_keep_no_other_one_waiting(pods: Node) -> None:
    for each in range(node.MOST_AT_ONCE):
        pods.add(f"fills{each}", Stage.OVERLAY, "overlay")
    pods.add("done", Stage.STORE, "xfs")
    await pods.service.renew()
    assert pods.asked == ["done"]
    assert "done" not in pods.told() and len(pods.told()) == node.MOST_AT_ONCE


async def test_volumes_whose_renewal_fails_come_after_the_others(pods: Node) -> None:
    bad = [f"bad{each}" for each in range(node.MOST_AT_ONCE)]
    for name in (*bad, "good"):
        pods.add(name, Stage.STORE, "xfs")
        pods.trouble[name] = kit.errors.RefusedError(f"volume {name}", "it hangs", "")
    del pods.trouble["good"]
    await pods.service.renew()
    assert pods.asked == bad
    await pods.service.renew()
    assert pods.asked[len(bad) :] == ["good", *bad[:-1]]
    await pods.service.renew()
    assert pods.asked[2 * len(bad)] == bad[-1], "each has its turn"


@pytest.mark.parametrize(
    ("store", "shows", "asked", "told"),
    [
        ("xfs", "overlay", 1, False),
        ("zfs", "overlay", 0, True),  # whether it can be mapped is not known
        ("zfs", "zfs", 0, False),  # it may run well
        ("xfs", "xfs", 0, False),
    ],
)
async def test_a_volume_is_exchanged_for_what_can_be_mapped(
    store: str, shows: str, asked: int, told: bool, pods: Node
) -> None:
    pods.add("a", Stage.STORE, store, shows)
    for _ in range(3):
        await pods.service.renew()
    assert len(pods.asked) == asked
    assert bool(pods.told()) == told
    if told:
        assert store in pods.told()["a"]


async def test_a_volume_is_exchanged_once_for_each_mount_of_the_view(pods: Node) -> None:
    """The view was swapped between the look and the exchange: it shows an overlay again."""
    pods.add("a", Stage.STORE, "xfs")
    pods.exchanges = False
    for _ in range(3):
        await pods.service.renew()
    assert pods.asked == ["a"]
    pods.ids["/views/a"] = 99  # it was swapped once more
    await pods.service.renew()
    assert pods.asked == ["a", "a"]


async def test_why_a_volume_is_not_renewed_is_logged_once_and_told(pods: Node) -> None:
    pods.add("a", Stage.STORE, "xfs")
    with capture_logs() as logs:
        for why in ("it hangs", "it hangs", "it hangs", "it is closed", "it is closed"):
            pods.trouble["a"] = kit.errors.RefusedError("volume a", why, "")
            await pods.service.renew()
            assert why in pods.told()["a"]
        pods.trouble = {}
        await pods.service.renew()
    assert pods.told() == {}
    said = [each["why"] for each in logs if each["event"] == TOLD]
    assert ["hangs" in each for each in said] == [True, False]


async def test_volumes_that_hang_do_so_at_the_same_time(
    pods: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there may be, not the one after the other."""
    all_there = asyncio.Barrier(node.MOST_AT_ONCE)

    async def call(*_: Any, deadline: float) -> None:
        await all_there.wait()

    monkeypatch.setattr(kit.child, "call", call)
    for each in range(node.MOST_AT_ONCE):
        pods.add(f"a{each}", Stage.STORE, "xfs")
    async with asyncio.timeout(waiting.limit(20)):
        await pods.service.renew()


async def test_without_a_direct_volume_the_mount_table_is_not_read(pods: Node) -> None:
    pods.add("a", Stage.OVERLAY, "overlay")
    await pods.service.renew()
    assert pods.told() and pods.reads == 1
    pods.service.volumes.clear()
    await pods.service.renew()
    assert not pods.told() and pods.reads == 1
