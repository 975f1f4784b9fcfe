"""A dataset on some of the nodes that its selector matches: which ones, and who moves."""

import contextlib
import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import kit.units
from kube import client
from nodeagent.cluster import follow, intent, kinds, rollup
from nodeagent.settings import ClusterSettings, Settings
from tests.kube import agents
from tests.kube.test_crds import dataset
from tests.testbed import waiting
from tests.testbed.control_plane import ControlPlane, unique

NOW = 1_800_000_000.0
NODES = st.sets(st.from_regex(r"[a-z0-9-]{1,12}", fullmatch=True), max_size=30)
SPREADS = st.integers(1, 12)


@given(NODES, SPREADS)
def test_as_many_nodes_as_wished_and_in_any_order_the_same(nodes: set[str], spread: int) -> None:
    chosen = rollup.choose_nodes("coco", nodes, spread)
    assert len(chosen) == min(spread, len(nodes)) and set(chosen) <= nodes
    assert chosen == rollup.choose_nodes("coco", sorted(nodes, reverse=True) * 2, spread)


@given(NODES.filter(bool), SPREADS, st.data())
def test_node_that_leaves_or_comes_moves_only_its_share(
    nodes: set[str], spread: int, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(nodes)))
    before = set(rollup.choose_nodes("coco", nodes, spread))
    after = set(rollup.choose_nodes("coco", nodes - {gone}, spread))
    assert before - {gone} <= after
    assert len(after - before) == (1 if gone in before and len(nodes) > spread else 0)


def test_datasets_are_spread_evenly() -> None:
    nodes = [f"gpu-{number:04}" for number in range(50)]
    held = Counter(
        node for number in range(500) for node in rollup.choose_nodes(f"set-{number}", nodes, 5)
    )
    assert len(held) == 50 and max(held.values()) < 2 * 50 and min(held.values()) > 50 / 2


def wish(spread: int = 2, chosen: tuple[str, ...] = (), created: str = "2026-01-01T00:00:00Z",
         **labels: str) -> intent.Wish:  # fmt: skip
    spec = {"source": {"kind": "dir", "path": "/a"}, "freshness": "frozen", "spread": spread}
    return intent.Wish(
        "CachedDataset", "coco", "u", 3, created, {**spec, "nodeSelector": labels}, chosen=chosen
    )


def test_node_keeps_what_it_is_chosen_for_and_gives_it_up_later() -> None:
    labels = {"pool": "a"}

    def step(
        known: intent.Known, asked: intent.Wish, now: float, *elsewhere: intent.Key
    ) -> intent.Known:
        seen = {asked.kind: {asked.name: asked}}
        return intent.step(known, seen, (), labels, now, 60.0, "n1", elsewhere)

    assert not step(intent.Known(), wish(pool="a"), NOW).wishes
    assert not step(intent.Known(), wish(chosen=("n1",), pool="b"), NOW).wishes
    mine = step(intent.Known(), wish(chosen=("n1", "n2"), pool="a"), NOW)
    assert mine.wishes
    assert intent.from_json(intent.to_json(mine)) == mine
    other = step(mine, wish(chosen=("n2",), pool="a"), NOW)
    assert other.wishes and not other.releasing  # a node that was away for a moment keeps it
    asked = wish(chosen=("n2",), pool="a")
    assert not step(other, asked, NOW + 60).releasing  # nobody has looked who keeps it
    assert not step(other, asked, NOW + 59, asked.key).releasing
    assert step(other, asked, NOW + 60, asked.key).releasing
    assert step(other, wish(chosen=("n2",), pool="b"), NOW + 60).releasing  # not selected


def node(name: str, observed: str = "now", age: float = 0.0, ready: bool = True) -> rollup.View:
    mine = kinds.ObjectStatus(
        kind="CachedDataset", name="coco", observed_generation=3, ready=ready, candidate=True,
        percent=100 if ready else 0,
    )  # fmt: skip
    return rollup.View(
        name, observed, kit.units.rfc3339(NOW - age), {("CachedDataset", "coco"): mine}
    )


def roll(asked: intent.Wish, *nodes: rollup.View, **before: Any) -> tuple[Any, str, str]:
    made = rollup.of_object(asked, before, nodes, "now", NOW)
    (ready,) = [each for each in made["conditions"] if each["type"] == "Ready"]
    return made["chosen"], made["ready"], ready["status"]


def test_only_chosen_nodes_count() -> None:
    names = [f"n{number}" for number in range(6)]
    chosen = rollup.choose_nodes("coco", names, 2)
    there = [node(name, ready=name in chosen) for name in names]
    assert roll(wish(), *there) == (list(chosen), "2/2", "True")
    # One that is silent for half an hour is replaced; the other stays.
    silent = [node(n, age=3600.0 if n == chosen[0] else 0.0, ready=n == chosen[1]) for n in names]
    moved, ready, status = roll(wish(), *silent)
    assert chosen[1] in moved and chosen[0] not in moved
    assert (ready, status) == ("1/2", "False")


def test_nothing_moves_when_all_were_silent_because_nobody_could_write() -> None:
    names = [f"n{number}" for number in range(6)]
    chosen = list(rollup.choose_nodes("coco", names, 2))
    first = next(name for name in names if name not in chosen)  # it writes before the others
    back = [node(name, age=0.0 if name == first else 3600.0) for name in names]
    made = rollup.of_object(wish(), {"chosen": chosen}, back, "now", NOW, patient=True)
    assert made["chosen"] == chosen
    assert rollup.of_object(wish(), {"chosen": chosen}, back, "now", NOW)["chosen"] == [first]


def test_new_leader_moves_nothing_to_a_silent_node() -> None:
    names = [f"n{number}" for number in range(6)]
    dead, *others = rollup.choose_nodes("coco", names, 3)
    there = [node(name, age=3600.0 if name == dead else 0.0) for name in names]
    before = {"chosen": list(rollup.choose_nodes("coco", set(names) - {dead}, 3))}
    assert set(others) < set(before["chosen"])
    for patient in (False, True):
        made = rollup.of_object(wish(spread=3), before, there, "now", NOW, patient=patient)
        assert made["chosen"] == before["chosen"], patient


def test_new_object_is_placed_once_all_nodes_have_seen_it() -> None:
    fresh = wish(created=kit.units.rfc3339(NOW - 5))
    late = [node("n1"), node("n2", observed="before")]
    assert roll(fresh, *late)[0] == []
    assert roll(fresh, *late, chosen=["n1"])[0] == ["n1"]
    assert roll(wish(), *late)[0] == ["n1", "n2"]  # nobody waits for ever
    assert roll(fresh, node("n1"), node("n2"))[0] == ["n1", "n2"]


def follower(folder: Path, asked: intent.Wish) -> follow.Follower:
    """Of node n1, which holds ``asked``, at a time at which another choice is due."""
    settings = Settings(state_dir=folder, node="n1")
    made = follow.Follower(ClusterSettings(server="https://localhost:1", namespace="x"), settings)
    made.watches[asked.kind].objects[asked.name] = asked
    made.watches[asked.kind].synced = True
    held = dataclasses.replace(asked, chosen=("n1",))
    made._known = intent.Known({"pool": "a"}, {asked.key: held}, {asked.key: 1.0})
    return made


@pytest.mark.parametrize(
    ("others", "stays"),
    [
        ((), True),  # nobody else may keep it: whoever wrote that it is elsewhere is wrong
        (("n2", "n3", "n4", "n5", "n6"), False),
        (client.KubeError("nodestorages", "nobody answers"), True),
    ],
)
async def test_node_gives_its_share_up_only_when_the_nodes_own_reports_say_so(
    others: Any, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is broken into can write a wrong status.chosen for all datasets."""
    asked = wish(spread=1, chosen=("evil",), pool="a")
    made = follower(tmp_path, asked)
    now = time.time() - NOW  # the reports are fresh

    async def look() -> None:
        if isinstance(others, Exception):
            raise others
        for name in ("n1", *others):
            made.shares.nodes.objects[name] = node(name, age=-now)

    assert rollup.choose_nodes("coco", ["n1", "n2", "n3", "n4", "n5", "n6"], 1) != ("n1",)
    monkeypatch.setattr(made.shares.nodes, "look", look)
    assert await made._elsewhere() == set()  # not at the same moment as all the others
    assert not made.shares.nodes.objects
    made.shares._look_at = 0.0
    made._known = made._step(await made._elsewhere())
    assert (asked.key in made._known.wishes) == stays
    assert (asked.key in made._known.releasing) != stays
    told = [each.message for each in made._findings()]
    assert any("status.chosen" in each for each in told) == (stays and others == ())
    assert not made.shares.nodes.objects  # nothing of 7,500 nodes is held


async def test_what_comes_due_during_a_look_is_not_given_up_unseen(tmp_path: Path) -> None:
    asked = wish(spread=1, chosen=("evil",), pool="a")
    made = follower(tmp_path, asked)
    made._known = made._step(await made._elsewhere())  # what the look was about is another's
    assert asked.key in made._known.wishes


@pytest.mark.parametrize("own_age", [None, 86400.0])
def test_a_node_without_a_report_of_its_own_gives_nothing_up(
    own_age: float | None, tmp_path: Path
) -> None:
    asked = wish(spread=1, chosen=("evil",), pool="a")
    shares = follower(tmp_path, asked).shares
    views = [node("n2"), node("n3")]
    views += [] if own_age is None else [node("n1", age=own_age)]
    shares._judge({asked.key: asked}, views, NOW)
    assert shares._elsewhere == set()
    shares._judge({asked.key: asked}, [], NOW)  # all are silent
    assert shares._elsewhere == set()


def test_more_nodes_than_asked_for_are_no_choice() -> None:
    """A wrong choice of all nodes would fill them all."""
    assert wish(spread=2, chosen=("n1", "n2"), pool="a").kept_by("n1", {"pool": "a"})
    assert not wish(spread=1, chosen=("n1", "n2"), pool="a").kept_by("n1", {"pool": "a"})


@pytest.mark.real
@pytest.mark.timeout(200)
def test_dataset_is_kept_on_as_many_nodes_as_it_says_and_moves_with_a_node(
    plane: ControlPlane, area: Path
) -> None:
    files = area / "files"
    files.mkdir()
    (files / "a").write_text("data of a")
    name = unique("spread")
    names = ("gpu-s1", "gpu-s2", "gpu-s3")
    with contextlib.ExitStack() as stack:
        nodes = {
            each: stack.enter_context(
                agents.made(plane, area / each, each, {"pool": "spread"}, drop_after="1s")
            )
            for each in names
        }
        for made in nodes.values():
            made.start()

        def holders() -> set[str]:
            return {each for each, made in nodes.items() if (made.view(name) / "a").exists()}

        def chosen() -> set[str]:
            return set((plane.get("cds", name).get("status") or {}).get("chosen") or ())

        source = {"kind": "dir", "path": str(files)}
        plane.apply(dataset(name, source=source, nodeSelector={"pool": "spread"}, spread=2))
        plane.kubectl("wait", "--for=condition=Ready", f"cds/{name}", "--timeout=240s", seconds=250)
        first = set(rollup.choose_nodes(name, names, 2))
        assert chosen() == holders() == first
        assert plane.get("cds", name)["status"]["ready"] == "2/2"

        gone = min(first)
        plane.kubectl("label", "node", gone, "pool-")
        waiting.until(lambda: chosen() == set(names) - {gone}, 60, "another choice", detail=chosen)
        waiting.until(lambda: holders() == set(names) - {gone}, 60, "the move", detail=holders)
