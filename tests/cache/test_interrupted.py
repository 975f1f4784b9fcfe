"""Killed, cut and full: what is in the tree is right, nothing is left lying about, it goes on."""

import contextlib
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests.testbed import held, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

ROUNDS = 9
FILES_A_ROUND = 100


def no_litter(node: Agent, name: str) -> None:
    (generation,) = node.generations(name)
    assert sorted(p.name for p in generation.iterdir() if not p.name.startswith("index.")) == [
        "extents",
        "generation.json",
        "links",
        "lock",
        "parts",
        "staging",
        "tree",
    ]
    assert list((generation / "staging").iterdir()) == []
    assert list((generation / "links").iterdir()) == []
    assert list((generation / "parts").iterdir()) == []
    assert {p.name for p in node.store.iterdir()} == {"nodeagent.json", ".trash", name}


def parent(pid: int) -> int:
    """Of a worker its coordinator, of a coordinator the agent; 0 when it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def make_linked(source: Path, files: int, *, directories: int = 6) -> None:
    """Ordinary files and, in every directory, names of files that others share."""
    trees.plain(source, files, directories=directories, mean=3000)
    for number in range(60):
        target = source / f"d{number % directories}" / f"shared{number:03}"
        os.link(source / "d0" / f"f{number % 5 * directories:05}", target)
    trees.settle(source)


@pytest.mark.parametrize("victim", ["agent", "pass", "workers"])
def test_fill_survives_random_kills(area: Path, node: Agent, victim: str) -> None:
    source = area / "source"
    make_linked(source, 1200, directories=60)
    node.add_dir("a", source)
    node.cache["fill"] = {"workers": 3}
    fill = held.Fill(node, FILES_A_ROUND, chunks=True)  # all of them together are not complete
    node.start()
    generator = random.Random(victim)
    done: list[int] = []
    killed = 0
    while len(done) < ROUNDS or (victim != "agent" and killed < 3):
        time.sleep(generator.uniform(0.05, 0.9))
        shown = node.dataset("a")
        assert shown["state"] != "complete", "nothing was at risk"
        done.append(shown["files"]["done"])
        if victim == "agent":
            node.kill()
            node.start()
            continue
        running = node.passes()
        workers = [pid for pid in running if parent(pid) in running]
        victims = workers if victim == "workers" else [p for p in running if p not in workers]
        killed += len(victims)
        for pid in generator.sample(victims, min(len(victims), 2)):
            with contextlib.suppress(ProcessLookupError):  # of a pass that was killed before
                os.kill(pid, signal.SIGKILL)
        if victim == "pass":
            node.tell("a", "warm")  # rather than wait for the next try
        else:  # the same fill goes on
            fill.hold(FILES_A_ROUND * (1 + len(done)), chunks=True)
    fill.go_on()
    node.tell("a", "warm")
    shown = node.wait_state("a", "complete", seconds=120)
    trees.assert_equal(source, node.view("a"))
    assert shown["files"]["done"] == shown["files"]["total"] == 1260
    no_litter(node, "a")


def test_second_agent_is_refused(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 10)
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    second = node.cli("run")
    assert second.returncode == 8
    assert "another agent runs with it" in second.stderr
    assert second.stderr.count("\n") == 1
    trees.assert_equal(source, node.view("a"))


def test_stopped_pass_ends_with_its_agent(area: Path, node: Agent) -> None:
    source = area / "source"
    make_linked(source, 300)
    node.add_dir("a", source)
    node.cache["fill"] = {"workers": 2}
    fill = held.Fill(node, 50)
    node.start()
    fill.wait()
    old = node.passes()
    assert old
    for pid in old:  # as if they hung in the kernel
        os.kill(pid, signal.SIGSTOP)
    node.kill()
    node.start()
    new = fill.wait()
    assert not set(old) & set(new)
    for pid in old:
        with contextlib.suppress(ProcessLookupError):  # ended with its agent, stopped or not
            os.kill(pid, signal.SIGCONT)
    node.wait_for(lambda: not set(old) & set(node.passes()), 20, "the old pass to end")
    fill.go_on()
    node.wait_state("a", "complete", seconds=60)
    trees.assert_equal(source, node.view("a"))
    no_litter(node, "a")


def test_files_lost_from_tree_are_copied_again(area: Path, node: Agent) -> None:
    # An index may be ahead of the tree after a power cut; that costs time, never a file.
    source = area / "source"
    trees.plain(source, 300, directories=5)
    node.add_dir("a", source)
    node.add_dir("b", area / "not there")
    node.cache["budget"] = 10**6
    node.start()
    node.wait_state("a", "partial")
    node.kill()
    tree = node.tree("a")
    sealed = [p for p in tree.iterdir() if "trusted.overlay.opaque" in os.listxattr(p)]
    stored = [p for folder in sorted(tree.iterdir()) for p in sorted(folder.iterdir())]
    assert stored
    lost = [stored[0], stored[-1], *[next(iter(sorted(s.iterdir()))) for s in sealed]]
    for path in set(lost):
        path.unlink()
    for folder in sealed:
        os.removexattr(folder, "trusted.overlay.opaque")
    node.cache["budget"] = "1GiB"
    node.start()
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))


def test_damaged_index_is_rebuilt(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 200)
    node.add_dir("a", source)
    fill = held.Fill(node, 60)
    node.start()
    fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 50, 30, "some files")
    node.kill()
    (generation,) = node.generations("a")
    # A pass that still ends would go on writing, and the pages of its log would hide the damage.
    node.wait_for(lambda: not node.passes(), 20, "the pass to end")
    kept = {p.name: p.stat().st_ino for p in (generation / "tree" / "d0").iterdir()}
    assert kept
    index = generation / "index.sqlite"
    with contextlib.closing(sqlite3.connect(index)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = index.read_bytes()
    assert len(data) > 4096
    index.write_bytes(data[:4096] + os.urandom(len(data) - 4096))
    fill.go_on()
    node.start()
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    assert {n: (generation / "tree" / "d0" / n).stat().st_ino for n in kept} == kept


def test_stopped_agent_keeps_store_and_views(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 200)
    node.add_dir("a", source)
    fill = held.Fill(node, 60)
    node.start()
    node.wait_served("a", "overlay")
    fill.wait()
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > 50, 30, "some files")
    assert node.stop() == 0
    assert node.passes() == []
    trees.assert_equal(source, node.view("a"))
    before = node.view("a").stat().st_dev
    fill.go_on()
    node.start()
    node.wait_state("a", "complete")
    trees.assert_equal(source, node.view("a"))
    assert before  # served all the time
