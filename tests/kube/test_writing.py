"""Who rolls up beside others: newer agents, many objects, a server that is ill."""

import asyncio
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kube import client
from nodeagent.cluster import follow, intent, rollup, storage, writing
from nodeagent.cluster.storage import Objects
from nodeagent.settings import ClusterSettings, Settings

KIND = "CachedDataset"


def test_node_of_a_newer_agent_counts_in_the_roll_up() -> None:
    entry = {
        "kind": KIND, "name": "coco", "ready": True, "later": {"a": 1},
        "requests": [{"verb": "verify", "value": "b", "state": "done", "later": 1}],
    }  # fmt: skip
    made = rollup.view({"metadata": {"name": "n1"}, "status": {"objects": [entry], "later": "x"}})
    mine = made.objects[KIND, "coco"]
    assert mine.ready and mine.requests[0].value == "b"


def test_what_is_not_there_is_tried_as_seldom_as_what_is_refused() -> None:
    """7,500 nodes whose kind or Node is missing would else ask hundreds of times a second."""

    def longest(status: int) -> float:
        pauses = client.Pauses(10.0)
        return max(pauses.after(client.KubeError("a", "b", status)) for _ in range(20))

    assert longest(404) > 2 * client.AWAY_SECONDS
    # Current 30 s after these are over.
    assert all(longest(each) <= client.AWAY_SECONDS for each in (0, 401, 429, 500, 503))


def writer(folder: Path) -> writing.Writer:
    asked = ClusterSettings(server="https://localhost:1", namespace="nodeagent")
    settings = Settings(state_dir=folder, node="n1")
    return writing.Writer(follow.Follower(asked, settings))


async def test_others_have_a_turn_between_two_objects_of_the_roll_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = writer(tmp_path)
    for number in range(5):
        asked = intent.Wish(KIND, f"set-{number}", "u", 1, "2026-01-01T00:00:00Z", {})
        made._follower.watches[KIND].objects[asked.name] = asked
        made._rolled[asked.key] = "", {}
    happened: list[str] = []

    def of_object(asked: intent.Wish, before: Any, *_: Any, **__: Any) -> Any:
        happened.append(asked.name)
        return before

    monkeypatch.setattr("nodeagent.cluster.rollup.of_object", of_object)

    async def other() -> None:
        while True:
            happened.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await made._write_rolls(made._nodes, patient=False)
    task.cancel()
    rolled = [number for number, each in enumerate(happened) if each != "other"]
    assert len(rolled) == 5
    assert all(after > before + 1 for before, after in itertools.pairwise(rolled))


async def test_status_that_another_one_wrote_is_read_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the leader once wrote is not what is there: others may write it, too."""
    made = writer(tmp_path)
    asked = intent.Wish(KIND, "coco", "u", 1, "2026-01-01T00:00:00Z", {}, version="1")
    server: dict[str, Any] = {"version": 1, "status": {}, "asked": []}

    async def request(method: str, path: str, body: Any = None, **_: Any) -> dict[str, Any]:
        server["asked"].append(method)
        if method == "PATCH":
            server["version"] += 1
            server["status"] = body["status"]
        meta = {"resourceVersion": str(server["version"])}
        return {"metadata": meta, "status": server["status"]}

    monkeypatch.setattr(made.server, "request", request)
    monkeypatch.setattr(type(made._lease), "held", property(lambda _: True))
    watched = made._follower.watches[KIND].objects

    async def rolled() -> list[str]:
        """What is asked while the watch tells of the version that is there."""
        server["asked"].clear()
        watched["coco"] = dataclasses.replace(asked, version=str(server["version"]))
        await made._write_rolls(made._nodes, patient=False)
        return list(server["asked"])

    assert await rolled() == ["GET", "PATCH"]
    good = server["status"]
    assert await rolled() == []
    server["status"], server["version"] = {"chosen": ["evil"]}, 7
    assert await rolled() == ["GET", "PATCH"]
    assert {**server["status"], "conditions": ()} == {**good, "conditions": ()}
    assert watched["coco"] == asked  # or each roll-up would be new settings for all nodes


def spread(number: int) -> intent.Wish:
    created = f"2026-01-01T00:{number // 60:02}:{number % 60:02}Z"
    return intent.Wish(KIND, f"imagenet-shard-{number:04}", "u", 3, created, {"spread": 3})


def test_entry_of_a_node_that_only_might_keep_a_dataset_is_small() -> None:
    """7,500 nodes with 500 of them are read by one agent."""
    asked = spread(0)
    (entry,) = storage.of_objects(Objects(candidates={asked.key: asked}), {})
    sent = storage.plain(entry)
    assert len(json.dumps(sent)) < 90
    status = {"objects": [sent]}
    made = rollup.view({"metadata": {"name": "n1"}, "status": status}).objects[asked.key]
    assert made.candidate and not made.ready
    # One that the node has keeps its figures.
    verdicts = [intent.Verdict(asked, True, ("a",))]
    (entry,) = storage.of_objects(Objects(verdicts, candidates={asked.key: asked}), {})
    assert storage.plain(entry)["accepted"] is True and storage.plain(entry)["ready"] is False


def test_a_deleted_object_is_listed_until_it_is_given_up() -> None:
    """Whoever deleted it sees when that is over; one that was made anew is not among them."""
    found = storage.of_objects(
        Objects(leaving={(KIND, "gone"): "", (KIND, "used"): "a pod uses it"}), {}
    )
    assert [(each.name, each.message) for each in found] == [
        ("gone", "deleted, and about to go"), ("used", "deleted, and waits: a pod uses it"),
    ]  # fmt: skip
    assert not any(each.accepted for each in found)
    verdicts = [intent.Verdict(spread(0), True, ("a",))]
    (entry,) = storage.of_objects(Objects(verdicts, {spread(0).key: ""}), {})
    assert entry.accepted


def test_what_a_node_says_has_room_for_what_it_has_and_the_rest_is_a_finding() -> None:
    many = {each.key: each for each in map(spread, reversed(range(storage.MOST_ENTRIES)))}
    assert storage.left_out(Objects(candidates=many).wanted) == []
    waits = {(KIND, "gone"): "a pod uses it"}
    names = [each.name for each in storage.of_objects(Objects(leaving=waits, candidates=many), {})]
    assert names[:2] == ["gone", "imagenet-shard-0000"] and len(names) == storage.MOST_ENTRIES
    (found,) = storage.left_out(Objects(leaving=waits, candidates=many).wanted)
    assert "501 objects select this node, 1 of them" in found.message
