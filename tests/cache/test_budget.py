"""A dataset beyond its budget, on a real view: what stays, what goes, what readers notice."""

import collections
import contextlib
import functools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cache.store import index
from linux import mountinfo
from tests.testbed import blockdev, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def complete(area: Path, node: Agent, files: int, *, mean: int = 12_000) -> Path:
    """The source of dataset "a", all of which is stored. ``mean``: bytes of a file."""
    source = area / "source"
    trees.plain(source, files, mean=mean)
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    return source


def apart(area: Path, propagation: str) -> list[str]:
    """Before a command that is to run in a mount namespace of its own."""
    unshare = ["unshare", "--mount", "--propagation", propagation]
    return [*unshare, str(blockdev.APART), str(area), "--"]


def kept(node: Agent) -> dict[str, int]:
    """Path and inode of each stored file; one that is evicted meanwhile is left out."""
    tree = node.tree("a")
    found = {}
    for folder, _, names in os.walk(tree):
        for name in names:
            path = Path(folder) / name
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(tree))] = path.lstat().st_ino
    return found


def taken(node: Agent, *, index_too: bool = True) -> int:
    """SSD bytes of the store, while it changes. The index grows while it is rewritten."""
    found = {}
    for folder, _, names in os.walk(node.store):
        for name in [".", *names]:
            if name.startswith(index.NAME) and not index_too:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = (Path(folder) / name).lstat()
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def set_budget(node: Agent, **budget: int) -> None:
    node.cache["datasets"][0] |= budget
    node.write()


def settled(node: Agent, wanted: int) -> bool:
    shown = node.dataset("a")
    return shown["state"] in ("partial", "complete") and taken(node) <= wanted


def shrank(node: Agent, budget: int, evictions: int) -> bool:
    """After the refresh, which the log's line follows."""
    return node.said().count("files evicted") > evictions and settled(node, budget)


def test_lowered_budget_takes_out_a_part_and_readers_go_on(area: Path, node: Agent) -> None:
    source = complete(area, node, 800)
    whole, before = taken(node), kept(node)
    first = sorted(before)[0]
    held = [os.open(node.view("a") / path, os.O_RDONLY) for path in sorted(before)[:50]]
    script = f"import os; os.chdir({str((node.view('a') / first).parent)!r}); print(1, flush=True)"
    script += f"; input(); assert open({Path(first).name!r}, 'rb').read()"
    standing = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert standing.stdout is not None
        assert standing.stdout.readline() == b"1\n"
        set_budget(node, budget=whole // 2)
        node.wait_served("a", "overlay")
        node.wait_for(
            lambda: "an earlier view" in node.said(), 60, "the eviction to wait for the reader"
        )
        assert kept(node) == before, "a process stands in the earlier view"
        standing.communicate(b"\n", timeout=waiting.limit(60))
        assert standing.returncode == 0
        node.wait_for(lambda: settled(node, whole // 2), 120, "the store to shrink")
        for descriptor, path in zip(held, sorted(before), strict=False):
            assert os.pread(descriptor, 2**20, 0) == (source / path).read_bytes()
    finally:
        standing.kill()
        standing.wait(waiting.limit(10))
        for descriptor in held:
            os.close(descriptor)
    half = kept(node)
    assert 0.3 * len(before) < len(half) < 0.7 * len(before)
    assert half.items() <= before.items(), "what stays is not touched"
    trees.assert_equal(source, node.view("a"))
    node.kill()
    set_budget(node, budget_inodes=len(half) // 2)
    node.start()
    wanted = len(half) // 2
    node.wait_for(lambda: len(kept(node)) < wanted, 120, "the inodes to be within the budget")
    assert kept(node).items() <= half.items()
    trees.assert_equal(source, node.view("a"))


def stands(view: Path) -> "subprocess.Popen[bytes]":
    """A process with its working directory in the view, as a pod that runs for days."""
    script = f"import os; os.chdir({str(view)!r}); print(1, flush=True); input()"
    standing = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert standing.stdout is not None
    assert standing.stdout.readline() == b"1\n"
    return standing


def test_raised_budget_ends_an_eviction_that_waits_for_readers(area: Path, node: Agent) -> None:
    """Its dataset is not partial for as long as the pod has its volume."""
    source = complete(area, node, 200)
    whole, before = taken(node), kept(node)
    with stands(node.view("a")) as standing:
        try:
            set_budget(node, budget=whole // 2)
            node.wait_for(
                lambda: "an earlier view" in node.said(), 60, "the eviction to wait for the reader"
            )
            set_budget(node, budget=2 * whole)
            node.wait_state("a", "complete")
            assert kept(node) == before, "nothing was taken out"
            trees.assert_equal(source, node.view("a"))
        finally:
            standing.kill()


def test_pods_that_come_while_an_eviction_waits_are_not_waited_for(area: Path, node: Agent) -> None:
    """Each of them is given what the view shows then, and keeps that."""
    source = complete(area, node, 200)
    whole, volume = taken(node), area / "volume"
    volume.mkdir()

    def said(*words: str) -> int:
        return sum(all(word in line for word in words) for line in node.said().splitlines())

    with stands(node.view("a")) as standing:
        try:
            set_budget(node, budget=whole // 2)
            node.wait_for(lambda: "an earlier view" in node.said(), 60, "the eviction to wait")
            blockdev.run("mount", "--bind", str(node.view("a")), str(volume))
            tried, shown = said("pass started", '"evict"'), said("view published")
            node.wait_for(
                lambda: said("pass started", '"evict"') > tried + 2, 120, "a try, and another one"
            )
            assert said("view published") == shown
        finally:
            standing.kill()
    node.wait_for(lambda: settled(node, whole // 2), 120, "the store to shrink")
    trees.assert_equal(source, volume)
    trees.assert_equal(source, node.view("a"))
    blockdev.run("umount", str(volume))


def test_epochs_hit_as_much_as_is_cached(area: Path, node: Agent) -> None:
    """Real reads of a real view: the inode of an open file tells which layer served it.

    Store and source are on one file system, so an overlay shows their own inode numbers.
    """
    source = complete(area, node, 400, mean=8_000)
    whole = taken(node)
    files = [str(p.relative_to(source)) for p in sorted(source.rglob("f*"))]
    origin = {path: (source / path).lstat().st_ino for path in files}
    order = random.Random(7)
    for part in (0.75, 0.5, 0.25):
        budget, evictions = int(whole * part), node.said().count("files evicted")
        set_budget(node, budget=budget)
        shrunk = functools.partial(shrank, node, budget, evictions)
        node.wait_for(shrunk, 120, "the store to shrink, and the view to be refreshed")
        stored = kept(node)
        lru: collections.OrderedDict[str, None] = collections.OrderedDict()
        hits = lru_hits = 0
        for epoch in range(4):  # the first one fills the cache beside
            order.shuffle(files)
            for path in files:
                with (node.view("a") / path).open("rb") as opened:
                    inode = os.fstat(opened.fileno()).st_ino
                    opened.read()
                assert inode in (stored.get(path), origin[path])
                hits += epoch > 0 and inode == stored.get(path)
                lru_hits += epoch > 0 and path in lru
                lru[path] = lru.pop(path, None)
                if len(lru) > len(stored):
                    lru.popitem(last=False)
        assert kept(node) == stored, "reads change nothing"
        reads = 3 * len(files)
        print(f"{part}: cached {len(stored) / len(files):.3f}, hits {hits / reads:.3f}, "
              f"LRU of the same size {lru_hits / reads:.3f}")  # fmt: skip
        assert hits == 3 * len(stored)
        assert hits > lru_hits


READER = """
import os, sys
source, by_id = sys.argv[1:]
names = [os.path.relpath(os.path.join(at, each), source)
         for at, _, found in os.walk(source) for each in found]
rounds = 0
while not os.path.exists(source + "/../enough"):
    for name in names:
        with open(f"{by_id}/{name}", "rb") as mine, open(f"{source}/{name}", "rb") as truth:
            assert mine.read() == truth.read(), name
    rounds += 1
print(rounds)
"""


def test_reader_by_id_reads_on_while_files_go(area: Path, node: Agent) -> None:
    """Its mount hides the source as the view's does; in a namespace of its own, as a pod's."""
    source = complete(area, node, 300)
    by_id = node.views / "a" / "by-id" / node.dataset("a")["generation"]
    node.wait_for(lambda: by_id.exists() and os.listdir(by_id), 30, "the mount by id")
    whole, before = taken(node), kept(node)
    command = [sys.executable, "-c", READER, str(source), str(by_id)]
    readers = [
        subprocess.Popen([*within, *command], stdout=subprocess.PIPE)
        for within in ([], apart(area, "slave"))
    ]
    try:
        set_budget(node, budget=whole // 2)
        node.wait_for(lambda: settled(node, whole // 2), 120, "the store to shrink")
        assert len(kept(node)) < len(before)
        trees.assert_equal(source, by_id)
        set_budget(node, budget=0)
        node.wait_state("a", "complete", seconds=120)

        def whole_again() -> bool:
            """By id the store itself is shown again: its inodes, and no overlay."""
            mount = mountinfo.top(by_id)
            return mount is not None and mount.fstype != "overlay"

        node.wait_for(whole_again, 60, "the store to be shown by id")
    finally:
        (area / "enough").touch()
        said = [reader.communicate(timeout=waiting.limit(120))[0] for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0]
    assert all(int(each) > 0 for each in said)


def test_mount_that_does_not_follow_is_waited_for(area: Path, node: Agent) -> None:
    source = complete(area, node, 100)
    whole, before = taken(node), kept(node)
    command = [*apart(area, "private"), "sh", "-c", "echo; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"\n"
            set_budget(node, budget=whole // 2)
            node.wait_for(lambda: "sees it at" in node.said(), 60, "the eviction to wait")
            assert kept(node) == before
        finally:
            other.kill()
    node.wait_for(lambda: settled(node, whole // 2), 120, "the store to shrink")
    trees.assert_equal(source, node.view("a"))


def test_ten_random_budgets(area: Path, node: Agent) -> None:
    """Bytes or inodes are the scarce thing; at no moment is more taken than a budget allows."""
    source = complete(area, node, 400)
    whole, everything = taken(node), len(kept(node))
    order = random.Random(11)
    for _ in range(10):
        part = order.uniform(0.15, 1.2)
        scarce = order.choice(["budget", "budget_inodes"])
        size = {"budget": int(whole * part), "budget_inodes": 0}
        if scarce == "budget_inodes":
            size = {"budget": 0, "budget_inodes": int(everything * part) + 10}
        most = max(taken(node), size["budget"] or 2**62)
        most_files = max(len(kept(node)), size["budget_inodes"] or 2**62)
        set_budget(node, **size)

        def within(size: dict[str, int] = size, most: int = most, files: int = most_files) -> bool:
            stored = len(kept(node))
            assert taken(node, index_too=False) <= most
            assert stored <= files
            shown = node.dataset("a")
            full = shown["state"] == "complete" or shown["kept_share"] < 1
            done = shown["state"] in ("partial", "complete") and full
            return (
                done
                and taken(node) <= (size["budget"] or 2**62)
                and stored <= (size["budget_inodes"] or 2**62)
            )

        node.wait_for(within, 120, f"{size} to be kept")
        trees.assert_equal(source, node.view("a"))
