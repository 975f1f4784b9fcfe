"""The scrub over a real store: after trouble of its disk, in rounds, from a kept cursor."""

import contextlib
import ctypes
import json
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.fill import protocol, verify
from cache.store import generations, index
from tests.cache import passes
from tests.cache import test_generations_served as served
from tests.cache.test_space import disk as plain_disk
from tests.testbed import blockdev, trees, waiting
from tests.testbed.agent import Agent, ApiError
from tests.testbed.damage import flip

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

FILES = 240  # thirty in each of eight directories


def scrub(node: Agent, name: str = "a") -> dict[str, Any]:
    found: dict[str, Any] = node.dataset(name)["scrub"]
    return found


def rules(node: Agent) -> list[str]:
    return [each["rule"] for each in node.findings()]


@pytest.fixture
def stored(area: Path, node: Agent) -> Iterator[Agent]:
    """An agent with a complete dataset on an ext4 of its own."""
    trees.plain(area / "source", FILES, mean=20_000)
    with plain_disk(area, "ext4", 100 * 2**20) as ssd:
        node.put_store(ssd / "store")
        node.add_dir("a", area / "source")
        node.start()
        node.wait_state("a", "complete")
        yield node
        node.end()


def test_files_are_verified_before_a_disk_that_failed_serves_again(
    area: Path, stored: Agent
) -> None:
    """A file whose bytes changed while the disk was in trouble never reaches a job."""
    node = stored
    mounted = node.store.parent
    subprocess.run(
        ["mount", "-o", "remount,ro", str(mounted)], check=True, timeout=waiting.limit(30)
    )
    node.wait_served("a", "source")
    subprocess.run(
        ["mount", "-o", "remount,rw", str(mounted)], check=True, timeout=waiting.limit(30)
    )
    flip(node.tree("a") / "d7" / "f00007")
    (node.tree("a") / "d3" / "f00003").unlink()
    os.removexattr(node.tree("a") / "d4" / "f00004", "trusted.nodeagent.xxh3-128")
    node.wait_for(lambda: "dataset-suspect" in rules(node), 60, "the doubt to be told")
    assert node.dataset("a")["served_by"] == "source"
    seen: list[bool] = []

    def settled() -> bool:
        seen.append((node.view("a") / "d7" / "f00007").read_bytes()
                    == (area / "source" / "d7" / "f00007").read_bytes())  # fmt: skip
        shown = node.dataset("a")
        return bool(shown["state"] == "complete" and shown["served_by"] == "store")

    node.wait_for(settled, 60, "the dataset to be served by the store again")
    assert all(seen), "a job saw the damaged file"
    found = scrub(node)
    assert (found["state"], found["reason"], found["suspect"]) == ("good", "suspect", False)
    assert (found["bad"], found["replaced"]) == (3, 3)
    trees.assert_equal(area / "source", node.view("a"))
    trees.assert_equal(area / "source", node.tree("a"))
    node.wait_for(lambda: rules(node) == ["store-damage"], 30, "the damage to be told")
    assert 'nodeagent_cache_scrub_bad_total{dataset="a"} 3.0' in node.get("/metrics")


def test_doubt_outlives_the_agent(area: Path, stored: Agent) -> None:
    node = stored
    mounted = node.store.parent
    subprocess.run(
        ["mount", "-o", "remount,ro", str(mounted)], check=True, timeout=waiting.limit(30)
    )
    node.wait_served("a", "source")
    kept = node.state / "cache-trust.json"
    node.wait_for(lambda: json.loads(kept.read_bytes())["troubles"] == 1, 30, "the note")
    node.kill()
    subprocess.run(
        ["mount", "-o", "remount,rw", str(mounted)], check=True, timeout=waiting.limit(30)
    )
    flip(node.tree("a") / "d7" / "f00007")
    node.start()
    node.wait_state("a", "complete")
    assert (scrub(node)["reason"], scrub(node)["bad"]) == ("suspect", 1)
    trees.assert_equal(area / "source", node.view("a"))


def test_rounds_find_damage_and_withdraw_and_refill_it(area: Path, stored: Agent) -> None:
    """The source is not mounted for a complete dataset: the damage is withdrawn, then filled. Who
    has a directory of the view open, and would miss the file, is waited for."""
    node = stored
    flip(node.tree("a") / "d7" / "f00007")
    (node.tree("a") / "d2" / "f00002").unlink()
    before = os.open(node.view("a"), os.O_RDONLY | os.O_DIRECTORY)
    node.cache["scrub"] = {"every": "1s"}
    node.write()
    node.wait_for(lambda: "bad files wait for readers" in node.said(), 60, "readers to be seen")
    os.close(before)
    node.wait_for(lambda: "store-damage" in rules(node), 60, "the damage to be found")
    node.wait_state("a", "complete", seconds=60)
    node.wait_for(lambda: scrub(node)["state"] == "good" and not scrub(node)["bad"], 60, "good")
    trees.assert_equal(area / "source", node.view("a"))
    trees.assert_equal(area / "source", node.tree("a"))


def test_scrub_gives_way_and_goes_on_after_a_restart(area: Path, stored: Agent) -> None:
    node = stored
    node.cache["scrub"] = {"every": "1s", "bytes_per_second": "400KiB"}
    node.write()
    node.wait_for(lambda: scrub(node)["files"]["checked"] > FILES // 8, 120, "some progress")
    assert node.tell("a", "verify", {})["verify"]["state"] in ("queued", "running")
    node.wait_for(
        lambda: (found := node.dataset("a")["verify"]) and found["state"] == "good", 60, "verify"
    )
    node.wait_for(lambda: scrub(node)["state"] == "running", 60, "the scrub to go on")
    node.wait_for(lambda: scrub(node)["files"]["checked"] > FILES // 8, 120, "some progress")
    assert node.stop() == 0
    with_cursor = index.Index.open(node.generations("a")[0] / "index.sqlite")
    with with_cursor.transaction() as db:
        (text,) = db.execute("SELECT cursor FROM scrub").fetchone()
    with_cursor.close()
    before = json.loads(text)
    assert before["checked_files"] > FILES // 8
    node.cache["scrub"] = {"every": "1s"}
    node.start()
    node.wait_for(lambda: scrub(node)["state"] == "good", 60, "the round to end")
    assert scrub(node)["files"]["checked"] == FILES


def test_unclean_shutdown_brings_the_next_round_at_once(area: Path, stored: Agent) -> None:
    node = stored
    node.kill()
    kept = node.state / "cache-trust.json"
    fields = json.loads(kept.read_bytes())
    assert fields["clean"] is False
    kept.write_text(json.dumps({**fields, "boot": "another kernel"}))
    flip(node.tree("a") / "d7" / "f00007")
    node.start()
    node.wait_for(lambda: scrub(node)["reason"] == "crash" and scrub(node)["bad"], 60, "a round")
    node.wait_state("a", "complete")
    trees.assert_equal(area / "source", node.view("a"))
    assert node.stop() == 0
    assert json.loads(kept.read_bytes())["clean"] is True


OWN, SHARED = Path("d0/f00000"), Path("d7/f00007")


@pytest.fixture
def two(area: Path, node: Agent) -> Iterator[tuple[Path, Path, Path]]:
    """The sources of a generation that serves and an earlier one; the trees of both; by-id of the
    earlier one. A pod has its tree itself."""
    top = served.versions(area, 2)
    served.add(node, top)
    node.start()
    served.serves(node, "s1")
    old = node.dataset("a")["generation"]
    node.tell("a", "update", {"snapshot": "s2"})
    served.serves(node, "s2")
    by_id = node.views / "a" / "by-id" / old
    node.wait_for(lambda: by_id.exists() and os.listdir(by_id), 30, "by-id")
    trees_of = {each.name: each / "tree" for each in node.generations("a")}
    earlier, current = trees_of.pop(old), *trees_of.values()
    assert (earlier / SHARED).samefile(current / SHARED)
    pod = area / "pod"
    pod.mkdir()
    blockdev.run("mount", "--bind", str(by_id), str(pod))
    try:
        yield top, earlier, by_id
    finally:
        blockdev.run("umount", str(pod))


def roles(node: Agent) -> list[str]:
    return [each["state"] for each in served.generations(node)]


@pytest.mark.parametrize("path", [OWN, SHARED], ids=["own", "shared"])
def test_damage_of_an_earlier_generation_is_found_and_it_goes(
    node: Agent, two: tuple[Path, Path, Path], path: Path
) -> None:
    """What both have is read once and bad in both: the one that serves is put right. Who reads the
    earlier one by its id has its source; by then nobody does, so it may have gone."""
    top, earlier, by_id = two
    flip(earlier / path)
    node.cache["scrub"] = {"every": "1s"}
    node.write()
    # What the serving one had of it is told until its next round.
    node.wait_for(lambda: {"generation-damaged", "store-damage"} <= set(rules(node)), 90, "both")
    node.wait_for(lambda: not (earlier / path).exists(), 90, "what is bad to be taken out")
    with contextlib.suppress(FileNotFoundError):
        trees.assert_equal(served.snap(top, "s1"), by_id)
    node.wait_state("a", "complete")
    trees.assert_equal(served.snap(top, "s2"), node.view("a"))
    assert roles(node) == ["current", "retired"]
    told = [line for line in node.get("/metrics").splitlines() if "scrub_bad_total{" in line]
    assert [float(line.split()[-1]) >= 1 + (path == SHARED) for line in told] == [True]
    if path == OWN:
        said = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
        rounds = [each for each in said if each["event"] == "scrub ended"]
        read = [(each["checked_files"], each["shared_files"]) for each in rounds
                if each["generation"] == by_id.name]  # fmt: skip
        assert (120, 117) in read, "what the other one reads is not read again"


def test_damage_without_a_source_is_missing_and_a_rollback_fills_it_again(
    node: Agent, two: tuple[Path, Path, Path]
) -> None:
    top, earlier, _ = two
    away = served.snap(top, "s1").rename(top / "away")
    right = flip(earlier / OWN)
    shared = (earlier / SHARED).read_bytes()
    node.cache["scrub"] = {"every": "1s"}
    node.write()
    node.wait_for(lambda: not (earlier / OWN).exists(), 90, "what is bad to be taken out")
    assert (earlier / SHARED).read_bytes() == shared
    trees.assert_equal(served.snap(top, "s2"), node.view("a"))
    with pytest.raises(ApiError):
        node.tell("a", "rollback")
    node.kill()
    node.start()  # what is on the list outlives the agent
    node.wait_state("a", "complete")
    assert roles(node) == ["current", "retired"]
    away.rename(served.snap(top, "s1"))
    node.tell("a", "rollback")
    served.serves(node, "s1")
    assert (earlier / OWN).read_bytes() == right
    trees.assert_equal(served.snap(top, "s1"), node.view("a"))
    node.wait_for(lambda: "generation-damaged" not in rules(node), 30, "the finding to go")


# --- passes without an agent


@pytest.fixture
def complete(area: Path) -> passes.Generation:
    return passes.complete(area, FILES)


def run(made: passes.Generation, name: str = "round-1") -> protocol.VerifyEnd:
    task = protocol.VerifyTask(**made.common, against_source=False, reachable=True, scrub=name)
    end = passes.run("verify", task)
    assert end.verify is not None
    return end.verify


def test_round_begins_at_its_cursor(complete: passes.Generation) -> None:
    opened = index.Index.open(complete.folder / index.NAME)
    number = opened.find(["d3"])
    assert number is not None
    names = sorted(os.listdir(complete.tree / "d3"))
    with opened.transaction() as db:
        kept = verify.load_cursor(db, "round-1")
        assert kept == verify.Cursor("round-1")
        verify.save_cursor(db, verify.Cursor("round-1", number - 1, number, names[9], 1000, 10**6))
    later = len(opened.known_directories(number, 100, listed=True))
    opened.close()
    for path in ("d3/" + names[3], "d3/" + names[20]):
        flip(complete.tree / path)
    found = run(complete)
    assert found.checked_files == 1000 + len(names) - 10 + later * len(names)
    assert (found.bad, found.replaced) == (1, 1)  # the other one lies before the cursor
    found = run(complete, "round-2")
    assert (found.checked_files, found.bad, found.replaced) == (FILES, 1, 1)


def test_directory_that_the_index_lost_is_damage(complete: passes.Generation) -> None:
    opened = index.Index.open(complete.folder / index.NAME)
    with opened.transaction() as db:
        db.execute("DELETE FROM directories WHERE name = 'd3'")
    opened.close()
    flip(complete.tree / "d3" / "f00003")
    assert run(complete).bad >= 1


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def resident(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    size = path.stat().st_size
    vector = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as stream:
        mapped = _libc.mmap(None, ctypes.c_size_t(size), 1, 1, stream.fileno(), ctypes.c_long(0))
    at = ctypes.c_void_p(mapped)
    assert _libc.mincore(at, ctypes.c_size_t(size), vector) == 0
    _libc.munmap(at, ctypes.c_size_t(size))
    return sum(each & 1 for each in vector)


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_page_cache_of_jobs_is_left_alone(area: Path, kind: str) -> None:
    """What a job has in memory stays there, and what nobody reads does not come in."""
    with plain_disk(area, kind, 400 * 2**20) as ssd:
        made = passes.Generation(ssd)
        trees.plain(made.source, FILES, mean=30_000)
        generations.save(str(made.folder), {"state": "complete", "done_files": FILES})
        assert made.fill().result == "complete"
        files = sorted(p for p in made.tree.rglob("f*") if p.stat().st_size)
        hot, cold = files[::2], files[1::2]
        for number in range(4):
            for path in files:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
            for path in hot:
                path.read_bytes()
            before = sum(map(resident, hot))
            assert before and not sum(map(resident, cold))
            found = run(made, f"round-{number}")
            assert (found.checked_files, found.bad) == (FILES, 0)
            assert sum(map(resident, cold)) == 0
            after = sum(map(resident, hot))
            if after == before:  # else another test may have emptied the whole machine's cache
                break
        assert after == before
