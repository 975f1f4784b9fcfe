"""Views that follow snapshots of a real CephFS, and views that swap, each under readers."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cache.sources.test_cephfs import dataset
from tests.cache.test_generations_served import add, generations, serves, snap
from tests.testbed import ceph, leftovers, pod, trees, waiting, whole_reader
from tests.testbed.agent import Agent

# 600, 20 and 100 in 'make soak-follow'.
SECONDS = float(os.environ.get("FOLLOW_SECONDS", "16"))
EVERY = float(os.environ.get("FOLLOW_EVERY", "4"))
SWAPS = int(os.environ.get("FOLLOW_SWAPS", "20"))
LEAST = 3  # snapshots, on a slow machine too

pytestmark = [pytest.mark.real, pytest.mark.timeout(300 + SECONDS * 2)]


@contextmanager
def reading(area: Path, roots: list[tuple[list[str], str]]) -> Iterator[list[dict[str, Any]]]:
    """Whole readers of each (command in front, root); what they saw, when the block has ended."""
    seen: list[dict[str, Any]] = []
    reports = [area / f"report{number}" for number in range(len(roots))]
    environment = {
        **os.environ, "PYTHONPATH": str(pod.REPO), leftovers.MARK: str(area),
    }  # fmt: skip
    readers = [
        subprocess.Popen(
            [*front, sys.executable, "-m", "tests.testbed.whole_reader", root, str(report),
             report.name],
            env=environment, cwd="/",
        )
        for (front, root), report in zip(roots, reports, strict=True)
    ]  # fmt: skip
    try:
        begun = [Path(f"{report}.begun") for report in reports]
        waiting.until(lambda: all(each.exists() for each in begun), 30, "the readers to begin")
        yield seen
    finally:
        for reader in readers:
            reader.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.wait(waiting.limit(60))
    seen += [json.loads(report.read_text()) for report in reports]


def test_swaps_show_one_generation_or_the_other_whole(area: Path, node: Agent) -> None:
    top = area / "source"
    for name in ("s1", "s2"):
        trees.plain(snap(top, name), 60, directories=6, seed=ord(name[1]), mean=2000)
        whole_reader.describe(snap(top, name))
    add(node, top)
    node.start()
    serves(node, "s1")
    first = node.dataset("a")["generation"]
    node.cli("dataset", "update", "a", "--snapshot", "s2", "--wait")
    by_id = f"by-id/{first}"
    node.wait_for(lambda: os.listdir(node.views / "a" / by_id), 30, "the first by its id")
    with pod.pod(area / "pod", node.views / "a") as inside:
        front = inside.command()
        data, kept = str(node.view("a")), str(node.views / "a" / by_id)
        roots: list[tuple[list[str], str]] = [([], data)] * 4 + [(front, inside.data)] * 4
        roots += [([], kept), (front, f"{inside.volume}/{by_id}")]
        with reading(area, roots) as seen:
            for number in range(SWAPS):
                name = "s1" if number % 2 == 0 else "s2"
                node.tell("a", "update", {"snapshot": name})
                serves(node, name)
    opens = sum(each["opens"] for each in seen)
    print(f"{SWAPS} swaps: {opens} opens, {[each['versions'] for each in seen]} versions seen")
    assert [each["troubles"] for each in seen] == [[]] * 10
    assert [each["versions"] for each in seen] == [2] * 8 + [1] * 2
    trees.assert_equal(snap(top, "s2"), node.view("a"))


def change(client: Path, folders: list[str], number: int, generator: random.Random) -> int:
    """Change, add, rename and delete files below ``folders``; the bytes that are new by path."""
    moved = 0
    for folder in folders:
        files = sorted((client / folder).iterdir())
        one, two, three, four = generator.sample(files, 4)
        status = one.stat()
        data = bytes(255 - byte for byte in one.read_bytes())
        one.write_bytes(data)  # as 'cp -p' over it: size and mtime stay
        os.utime(one, ns=(status.st_mtime_ns, status.st_mtime_ns))
        added = os.urandom(generator.randrange(20_000))
        (client / folder / f"new{number}").write_bytes(added)
        two.rename(two.with_name(f"renamed{number}-{two.name}"[:60]))
        moved += (
            len(data)
            + len(added)
            + two.with_name(f"renamed{number}-{two.name}"[:60]).stat().st_size
        )
        three.unlink()
        four.chmod(0o600 if four.stat().st_mode & 0o777 != 0o600 else 0o640)
        moved += four.stat().st_size
    return moved


def test_follow_shows_each_snapshot_exactly(
    area: Path, node: Agent, cluster: ceph.CephCluster, run_folder: Path
) -> None:
    generator = random.Random(5)
    clients = [run_folder / f"fs-{os.urandom(3).hex()}" for _ in range(2)]
    with cluster.mounted(clients[0]), cluster.mounted(clients[1]):
        one, two = (client / "follow" for client in clients)
        trees.plain(one, 480, directories=8, mean=6000)
        whole_reader.describe(one)
        (one / ".snap" / "r000").mkdir()
        wanted = dataset(cluster, area, "/follow")
        del wanted["source"]["snapshot"]
        node.cache["datasets"] = [{**wanted, "freshness": "follow", "earlier": 2}]
        node.cache["follow_interval"] = "1s"
        node.start()
        serves(node, "r000")
        delays, served, number = [], 1, 0
        bytes_new = bytes_moved = 0
        with reading(area, [([], str(node.view("a")))] * 4) as seen:
            until = time.monotonic() + SECONDS
            while number < LEAST or time.monotonic() < until:
                number += 1
                name, began = f"r{number:03}", time.monotonic()
                bytes_new += change(one, ["d0", "d1", "d2", "d3"], number, generator)
                bytes_new += change(two, ["d4", "d5", "d6", "d7"], number, generator)
                whole_reader.describe(one)
                bytes_new += (one / "manifest.json").stat().st_size
                (one / ".snap" / name).mkdir()
                serves(node, name)
                (current, *_) = generations(node)
                made = float(os.getxattr(one / ".snap" / name, "ceph.snap.btime"))
                delays.append(current["served"] - made)
                total = (one / ".snap" / name).rglob("*")
                copied = sum(1 for path in total if path.is_file()) - current["shared_files"]
                # Changed, added, renamed, chmod: 4 in each of 8 directories, and the manifest.
                assert copied <= 4 * 8 + 1, current
                bytes_moved += moved(node, current["generation"])
                trees.assert_equal(one / ".snap" / name, node.views / "a/by-id" / by_id(node))
                served += 1
                time.sleep(max(0.0, min(until, began + EVERY) - time.monotonic()))  # the pace
        assert [each["troubles"] for each in seen] == [[]] * 4
        assert all(each["versions"] > 1 for each in seen)
        delays.sort()
        print(
            f"{served} snapshots served in {SECONDS:.0f} s, {sum(e['opens'] for e in seen)} opens; "
            f"snapshot to served: median {delays[len(delays) // 2]:.1f} s, most {delays[-1]:.1f} s;"
            f" {bytes_moved} bytes moved, {bytes_new} bytes changed"
        )
        assert bytes_moved <= bytes_new
        assert len(node.generations("a")) <= 2 + 3


def by_id(node: Agent) -> str:
    current: str = node.dataset("a")["generation"]
    folder = node.views / "a" / "by-id" / current
    node.wait_for(lambda: folder.exists() and os.listdir(folder), 30, "the generation by its id")
    return current


def moved(node: Agent, current: str) -> int:
    """Bytes of files whose inode no other generation has."""
    tree = node.store / "a" / current / "tree"
    return sum(
        path.stat().st_size
        for path in tree.rglob("*")
        if path.is_file() and path.stat().st_nlink == 1
    )
