"""Room between datasets, on real views: who gives it, who keeps it, what operators take back."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import mounts
from tests.cache.test_budget import taken
from tests.testbed import held, trees
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

FILES = 400


def add(area: Path, node: Agent, name: str, **settings: object) -> None:
    trees.plain(area / name, FILES, mean=24_000, seed=ord(name))
    node.add_dir(name, area / name, **settings)


def two_with_room_for_them(area: Path, node: Agent, **of_a: object) -> None:
    """Datasets a and b are complete, and a third one does not fit beside them."""
    add(area, node, "a", **of_a)
    add(area, node, "b")
    node.start()
    for name in ("a", "b"):
        node.wait_state(name, "complete")
    node.cache["budget"] = int(taken(node) * 1.2)
    node.write()


@contextlib.contextmanager
def reader(node: Agent, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has a file of the view open."""
    path = next(each for each in sorted(node.view(name).rglob("*")) if each.is_file())
    with path.open("rb") as opened, subprocess.Popen(["sleep", "600"], stdin=opened) as holder:
        opened.close()
        try:
            yield holder
        finally:
            holder.kill()


def last_uses(node: Agent) -> dict[str, float]:
    """As a killed agent leaves them."""
    try:
        found: dict[str, float] = json.loads((node.state / "dataset-uses.json").read_text())["used"]
    except OSError:
        return {}
    return found


def later(node: Agent, name: str, other: str) -> bool:
    uses = last_uses(node)
    return uses.get(name, 0.0) > uses.get(other, 0.0) > 0.0


def stored(node: Agent, name: str) -> int:
    done: int = node.dataset(name)["files"]["done"]
    return done


def assert_views(area: Path, node: Agent, *names: str) -> None:
    for name in names:
        trees.assert_equal(area / name, node.view(name))


def test_dataset_that_was_not_read_goes_and_the_read_one_stays(area: Path, node: Agent) -> None:
    """Also over kills of the agent; by name or age alone the read one would go."""
    two_with_room_for_them(area, node)
    node.kill()
    with reader(node, "a"):
        node.start()  # and looks at once
        node.wait_for(lambda: node.dataset("a")["used_by"], 60, "the reader to be seen")
        assert "sleep" in node.dataset("a")["used_by"]
        node.wait_for(lambda: later(node, "a", "b"), 60, "the use to be kept")
    node.kill()
    node.start()
    add(area, node, "c")
    node.write()
    node.wait_for(lambda: "c" in node.get("/v1/datasets")["datasets"][-1]["name"], 60, "c to come")
    node.wait_state("c", "complete", seconds=120)
    assert stored(node, "a") == FILES
    assert node.dataset("a")["state"] == "complete"
    given = node.dataset("b")
    assert given["state"] == "partial"
    assert given["kept_share"] < 1
    assert taken(node) <= node.cache["budget"]
    assert_views(area, node, "a", "b", "c")


def test_evict_gives_room_back_and_names_who_uses_it(area: Path, node: Agent) -> None:
    fill = held.Fill(node)
    two_with_room_for_them(area, node)
    with reader(node, "a") as holder:
        refused = node.cli("dataset", "evict", "a")
        assert refused.returncode == 6, refused
        assert f"pid {holder.pid} (sleep)" in refused.stderr
        assert stored(node, "a") == FILES
    before = taken(node)
    half = node.dataset("a")["store_bytes"] // 2
    said = node.cli("dataset", "evict", "a", "--to", str(half))
    assert said.returncode == 0, said.stderr
    shown = node.dataset("a")
    assert shown["state"] == "evicted"
    assert 0 < shown["files"]["done"] < FILES
    assert shown["store_bytes"] <= half
    assert f"{shown['files']['done']} files" in said.stdout
    assert shown["evict"]["files"] == FILES - shown["files"]["done"]
    assert taken(node) <= before - shown["evict"]["bytes"] + 2**16
    node.kill()
    node.start()
    assert node.dataset("a")["state"] == "evicted", "it stays out until it is asked for"
    shown = node.cli_json("dataset", "evict", "a")
    assert shown["files"]["done"] == 0
    assert_views(area, node, "a", "b")
    fill.hold(10)
    node.tell("a", "warm")
    node.wait_for(lambda: stored(node, "a"), 60, "a to be filled again")
    # Meanwhile another one gives what it is asked for, and what is beyond a budget.
    half = node.dataset("b")["store_bytes"] // 2
    said = node.cli("dataset", "evict", "b", "--to", str(half))
    assert said.returncode == 0, said.stderr
    assert 0 < node.dataset("b")["store_bytes"] <= half
    node.cache["datasets"][1]["budget"] = half // 2
    node.write()
    node.wait_for(lambda: node.dataset("b")["store_bytes"] <= half // 2, 60, "b to give more")
    assert node.dataset("a")["state"] == "filling"
    fill.go_on()
    node.wait_state("a", "complete", seconds=120)
    assert_views(area, node, "a", "b")
    said_so = [json.loads(line) for line in node.said().splitlines() if line.startswith("{")]
    fills = [
        each for each in said_so if (each["event"], each.get("kind")) == ("pass started", "fill")
    ]
    assert [each["dataset"] for each in fills][-1:] == ["a"]
    assert "fill stops for another dataset" not in {each["event"] for each in said_so}


def test_kept_dataset_gives_nothing_and_says_so(area: Path, node: Agent) -> None:
    two_with_room_for_them(area, node, keep=True)
    node.cache["datasets"][1]["keep"] = True
    node.write()
    node.wait_for(lambda: node.dataset("b")["keep"], 60, "the setting to be taken")
    add(area, node, "c")
    node.write()
    node.wait_for(
        lambda: any(each["rule"] == "dataset-kept" for each in node.findings()), 120, "the finding"
    )
    shown = node.wait_state("c", "partial")
    assert "in the way: a, b" in shown["why"]
    assert [stored(node, name) for name in ("a", "b")] == [FILES, FILES]
    with pytest.raises(ApiError, match="it is kept"):
        node.tell("a", "evict")
    node.tell("a", "evict", {"force": True})
    node.wait_for(lambda: node.dataset("a")["evict"]["state"] == "evicted", 60, "the files to go")
    assert stored(node, "a") == 0
    node.tell("c", "warm")
    node.wait_state("c", "complete", seconds=120)
    assert_views(area, node, "a", "b", "c")


def test_evict_does_not_wait_for_a_fill_of_a_source_without_a_disk(area: Path, node: Agent) -> None:
    """CephFS, NFS, FUSE, memory: its workers keep a mount of the source that is nowhere attached,
    with a device like that of an overlay. Nobody reads a view through it."""
    fill = held.Fill(node)
    memory = area / "b"
    memory.mkdir()
    mounts.mount("none", memory, "tmpfs", 0)
    try:
        for name in ("a", "b"):
            trees.plain(area / name, FILES)
            node.add_dir(name, area / name)
        node.cache["datasets"][0]["priority"] = 1
        node.start()
        node.wait_state("a", "complete")
        node.wait_state("b", "complete")
        fill.hold(10)
        assert node.cli("dataset", "evict", "b").returncode == 0
        node.tell("b", "warm")
        fill.wait()
        half = node.dataset("a")["store_bytes"] // 2
        said = node.cli("dataset", "evict", "a", "--to", str(half))
        assert said.returncode == 0, said.stderr
        fill.go_on()
        node.wait_state("b", "complete")
    finally:
        node.end()
        mounts.detach(memory)
