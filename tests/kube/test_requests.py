"""What ``kubectl annotate`` asks of the nodes: each value once, and its end in the status."""

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import kit.errors
import kit.units
from kit.room import Asking, End
from nodeagent.cluster import intent, kinds, requests, rollup
from nodeagent.state import State
from tests.kube import agents
from tests.kube.test_crds import dataset
from tests.testbed import agent, damage, waiting
from tests.testbed.control_plane import ControlPlane, unique

NOW = 1_800_000_000.0
ASKED = intent.Wish("CachedDataset", "coco", "u", 3, "2026-01-01T00:00:00Z", {}, {"verify": "b"})


def test_annotations_of_an_object_are_what_it_asks_for() -> None:
    thing = {
        "metadata": {
            "name": "coco", "uid": "u", "generation": 1,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "annotations": {"nodeagent.io/verify": "x" * 100, "nodeagent.io/a": "y", "warm": ""},
        },
        "spec": {},
    }  # fmt: skip
    assert intent.wish("CachedDataset", thing).asks == {"verify": "x" * 63}
    assert intent.wish("ImageSet", thing).asks == {}


# --- one node


class Room:
    """Counts what was begun; ``busy``: it cannot now. ``open``: until it is set, begin waits.
    ``inside``: how often it was called. ``over``: how it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.begun: list[str] = []
        self.busy = False
        self.inside = 0
        self.open = asyncio.Event()
        self.open.set()
        self.over: End | None = None
        self.woken = 0
        asking = Asking("verify", self.begin, lambda component, name: self.over)
        made = type("Intent", (), {"kind": ASKED.kind, "requests": (asking,)})
        room = type("Room", (), {"name": "cache"})
        monkeypatch.setattr("nodeagent.cluster.kinds.intents", lambda: [(room, made)])
        running = type("Running", (), {"room": room, "started": True, "component": None})
        self.state = cast(State, type("Works", (), {"running": (running,)})())
        self.requests = requests.Requests(folder, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    async def begin(self, component: Any, name: str) -> None:
        self.inside += 1
        await self.open.wait()
        if self.busy:
            raise kit.errors.RefusedError(name, "a fill is running", "wait")
        self.begun.append(name)

    async def step(self, *names: str, value: str = "a") -> list[requests.ObjectRequest]:
        """What is known of objects of these names, after a step and once tasks had their turn."""
        wishes = [dataclasses.replace(ASKED, name=n, asks={"verify": value}) for n in names]
        await self.requests.step(self.state, [intent.Verdict(w, True, (w.name,)) for w in wishes])
        for _ in range(5):
            await asyncio.sleep(0)
        return [self.requests.of(each.key)["verify"] for each in wishes]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Room:
    return Room(monkeypatch, tmp_path)


async def test_request_is_begun_once_and_waits_until_it_is_possible(room: Room) -> None:
    room.busy = True
    await room.step("coco")
    (now,) = await room.step("coco")
    assert (now.state, "a fill is running" in now.message) == ("pending", True)
    assert not room.woken  # what is not possible is tried again after the usual pause
    room.busy = False
    for _ in range(4):
        (now,) = await room.step("coco")
    assert (now.state, room.begun, room.woken) == ("pending", ["coco"], 1)
    room.over = End(False, "bad: 1 file")
    assert await room.step("coco") == [requests.ObjectRequest("a", "failed", "bad: 1 file")]
    assert room.begun == ["coco"]


async def test_object_that_is_busy_holds_up_no_other_and_is_asked_once(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SLOW_SECONDS", -1.0)
    room.over = End(True, "")
    room.open.clear()
    async with asyncio.timeout(waiting.limit(30)):
        (now,) = await room.step("coco")  # it does not wait for the object
        tasks = [each.task for each in room.requests._beginning.values()]
        (now,) = await room.step("coco")
        assert now == requests.ObjectRequest("a", message="it takes longer than expected")
        # Another value meanwhile does not end the first in the middle, and comes after it.
        (now,) = await room.step("coco", value="b")
    assert [each.task for each in room.requests._beginning.values()] == tasks
    room.open.set()
    assert await room.step("coco", value="b") == [requests.ObjectRequest("b")]
    assert (room.begun, now.state) == (["coco"], "pending")
    for _ in range(2):
        (now,) = await room.step("coco", value="b")
    assert (now, room.begun) == (requests.ObjectRequest("b", "done"), ["coco"] * 2)


async def test_few_objects_begin_at_once_and_all_of_them_in_turn(room: Room) -> None:
    names = [f"set-{number:02}" for number in range(3 * requests.MOST_AT_ONCE)]
    room.open.clear()
    await room.step(*names)
    assert room.inside == requests.MOST_AT_ONCE
    room.busy = True
    room.open.set()
    for _ in range(12):
        known = await room.step(*names)
    assert all("a fill is running" in each.message for each in known)


async def test_what_nobody_asks_for_any_more_is_not_begun(room: Room) -> None:
    names = [f"set-{number:02}" for number in range(requests.MOST_AT_ONCE)]
    room.open.clear()
    await room.step(*names, "coco")  # it waits for its turn
    await room.step(*names)
    room.open.set()
    for _ in range(12):
        await room.step(*names)
    assert sorted(room.begun) == names


def test_finished_values_are_remembered_and_begun_ones_are_not(tmp_path: Path) -> None:
    made = requests.Requests(tmp_path)
    made.asked = {
        ("CachedDataset", "coco", "verify"): requests.ObjectRequest("a", "done"),
        ("CachedDataset", "coco", "warm"): requests.ObjectRequest("b", begun=True),
    }
    asyncio.run(made._save())
    assert requests.Requests(tmp_path).of(ASKED.key) == {
        "verify": requests.ObjectRequest("a", "done")
    }
    (tmp_path / requests.FILE).write_text("[[1]]")
    assert requests.Requests(tmp_path).asked == {}


def test_request_ends_with_its_annotation(tmp_path: Path) -> None:
    made = requests.Requests(tmp_path)
    made.asked = {("CachedDataset", "coco", "warm"): requests.ObjectRequest("a", "done")}
    state = cast(State, type("Idle", (), {"running": ()})())
    asyncio.run(made.step(state, [intent.Verdict(ASKED, True, ("coco",))]))
    assert made.of(ASKED.key) == {"verify": requests.ObjectRequest("b")}
    assert requests.Requests(tmp_path).asked == {}


def test_object_that_is_refused_for_a_moment_forgets_nothing_and_begins_nothing(
    tmp_path: Path,
) -> None:
    done = {"verify": requests.ObjectRequest("b", "done")}
    made = requests.Requests(tmp_path)
    made.asked = {(*ASKED.key, "verify"): done["verify"]}
    asyncio.run(made._save())
    working = type("Running", (), {"room": type("Room", (), {"name": "cache"}), "started": True})
    state = cast(State, type("Works", (), {"running": (working,)})())
    asyncio.run(made.step(state, [intent.Verdict(ASKED, False, message="no such pool")]))
    assert made.of(ASKED.key) == done
    assert requests.Requests(tmp_path).of(ASKED.key) == done
    # A new value waits until the object is in force.
    other = dataclasses.replace(ASKED, asks={"verify": "c"})
    asyncio.run(made.step(state, [intent.Verdict(other, False)]))
    assert made.of(ASKED.key) == {"verify": requests.ObjectRequest("c")}


# --- all nodes


def node(name: str, state: str = "done", value: str = "b", message: str = "") -> rollup.View:
    mine = kinds.ObjectStatus(
        kind=ASKED.kind, name=ASKED.name, observed_generation=3, ready=True, percent=100,
        requests=(kinds.RequestStatus(verb="verify", value=value, state=state, message=message),),
    )  # fmt: skip
    return rollup.View(name, "now", kit.units.rfc3339(NOW), {ASKED.key: mine})


def roll(*nodes: rollup.View, before: dict[str, Any] | None = None) -> tuple[str, str, str, Any]:
    made = rollup.of_object(ASKED, before or {}, nodes, "now", NOW)
    (found,) = [each for each in made["conditions"] if each["type"] == "Verified"]
    return found["status"], found["reason"], found["message"], made["carriedOut"].get("verify")


def test_value_is_carried_out_when_every_selected_node_says_so() -> None:
    assert roll(node("n1"), node("n2")) == ("True", "CarriedOut", "b: on 2 nodes", "b")
    waits = roll(node("n1"), node("n2", "pending", message="a fill is running"))
    assert waits == ("False", "Pending", "b: n2: a fill is running", None)
    # Of the value before nobody is fooled: its end stays visible until the new one has one.
    old = {"carriedOut": {"verify": "a"}}
    late = roll(node("n1"), node("n2", value="a"), before=old)
    assert late == ("False", "Pending", "b: n2: has not seen it", "a")
    bad = roll(node("n1", "failed", message="bad: 1 file"), node("n2"), before=old)
    assert bad == ("False", "Failed", "b: n1: bad: 1 file", "b")
    assert roll() == ("False", "Pending", "b: on 0 nodes", None)


def merged(there: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """What the API server makes of a merge patch (RFC 7396)."""
    made = dict(there)
    for key, each in patch.items():
        if each is None:
            made.pop(key, None)
        elif isinstance(each, dict):
            made[key] = merged(made.get(key) or {}, each)
        else:
            made[key] = each
    return made


def test_value_whose_annotation_is_gone_is_not_carried_out_any_more() -> None:
    """Or a wait for the same value would end at once when it is asked for again."""
    there = rollup.of_object(ASKED, {}, [node("n1")], "now", NOW)
    assert there["carriedOut"] == {"verify": "b"}
    plain = dataclasses.replace(ASKED, asks={})
    made = rollup.of_object(plain, there, [node("n1")], "now", NOW)
    assert merged(there, rollup.patch(there, made)) == made
    assert made["carriedOut"] == {}
    assert merged({}, rollup.patch({}, there)) == there


# --- real


@pytest.fixture
def pair(plane: ControlPlane, area: Path) -> Iterator[list[agent.Agent]]:
    with agents.several(plane, area, "asked", ("gpu-r1", "gpu-r2")) as both:
        yield both


@pytest.mark.real
@pytest.mark.timeout(200)
def test_kubectl_annotates_and_waits(
    plane: ControlPlane, pair: list[agent.Agent], area: Path
) -> None:
    files = area / "files"
    files.mkdir()
    (files / "a").write_bytes(b"x" * 100_000)
    name = unique("asked")
    for each in pair:
        each.start()
    source = {"kind": "dir", "path": str(files)}
    plane.apply(dataset(name, source=source, nodeSelector={"pool": "asked"}, warm=False))

    def ask(verb: str, value: str) -> dict[str, Any]:
        """The condition once all nodes carried it out."""
        plane.kubectl("annotate", "--overwrite", "cds", name, f"nodeagent.io/{verb}={value}")
        plane.kubectl(
            "wait", f"--for=jsonpath={{.status.carriedOut.{verb}}}={value}", f"cds/{name}",
            "--timeout=240s", seconds=250,
        )  # fmt: skip
        kind = rollup.CONDITIONS[verb]
        conditions = plane.get("cds", name)["status"]["conditions"]
        (found,) = [each for each in conditions if each["type"] == kind]
        return dict(found)

    assert ask("pause", "maintenance-7")["status"] == "True"
    assert [each.dataset(name)["state"] for each in pair] == ["paused", "paused"]
    assert ask("warm", "nightly-1")["status"] == "True"
    plane.kubectl("wait", "--for=condition=Ready", f"cds/{name}", "--timeout=120s", seconds=130)
    assert ask("verify", "nightly-1")["status"] == "True"

    damage.flip(pair[1].tree(name) / "a")
    assert ask("verify", "nightly-2")["status"] == "True"
    (mine,) = plane.get("nst", "gpu-r2")["status"]["objects"]
    (verify,) = [each for each in mine["requests"] if each["verb"] == "verify"]
    assert (verify["value"], verify["state"]) == ("nightly-2", "done")
    assert verify["message"] == "1 files or directories were bad, 1 of them are replaced"

    damage.flip(pair[1].tree(name) / "a")
    moment = files.stat().st_mtime_ns
    (files / "a").unlink()
    os.utime(files, ns=(moment, moment))
    found = ask("verify", "nightly-3")
    assert (found["status"], found["reason"]) == ("False", "Failed")
    assert "gpu-r2: bad" in found["message"] and "gpu-r1" not in found["message"]

    # Each value once, over a restart too.
    pair[1].stop()
    pair[1].start()
    assert ask("pause", "maintenance-8")["status"] == "True"
    for each in pair:
        done = [line for line in each.said().splitlines() if "carried out" in line]
        assert len(done) == 6, done
