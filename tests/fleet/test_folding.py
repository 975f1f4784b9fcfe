"""Many NodeStorage objects become one picture. Pure: objects as the API server gave them."""

import json
import sys
from typing import Any

import msgspec
import pytest

import kit.units
from fleet import folding, shapes

NOW = 1_800_000_000.0


def storage(name: str, age: float = 60.0, **status: Any) -> shapes.NodeStorage:
    """As read from JSON; ``age``: seconds since it was written."""
    written = kit.units.rfc3339(NOW - age)
    text = json.dumps({"metadata": {"name": name}, "status": {"written": written, **status}})
    return msgspec.json.decode(text, type=shapes.NodeStorage)


def dataset(name: str, percent: int = 100, **more: Any) -> dict[str, Any]:
    state = "complete" if percent == 100 else "filling"
    return {"name": name, "state": state, "percent": percent, "bytes": 2**30, **more}


def wish(name: str, wanted: int, reason: str = "", refused: int = 0) -> shapes.WishObject:
    condition = {"type": "Ready", "status": "False", "reason": reason, "message": "n1: why"}
    status = {
        "nodes": {"wanted": wanted, "refused": refused},
        "conditions": [condition] if reason else [],
    }
    return msgspec.convert({"metadata": {"name": name}, "status": status}, shapes.WishObject)


def folded(*storages: shapes.NodeStorage) -> folding.Fleet:
    fleet = folding.Fleet(NOW)
    for each in storages:
        fleet.add(each)
    return fleet


def finding(severity: str, rule: str, message: str = "is wrong") -> dict[str, Any]:
    return {"rule": rule, "severity": severity, "subject": "rbd4", "message": message}


@pytest.mark.parametrize(
    ("counts", "age", "wellness", "verdict"),
    [
        ({}, 60, "well", "well"),
        ({"info": 5}, 60, "well", "well"),
        ({"warning": 1}, 60, "warning", "attention"),
        ({"critical": 1, "warning": 2}, 60, "critical", "critical"),
        ({}, 3600, "silent", "attention"),
        ({"critical": 1}, 3600, "silent", "attention"),
    ],
)
def test_how_a_node_is(counts: dict[str, int], age: float, wellness: str, verdict: str) -> None:
    fleet = folded(storage("n", age=age, findingCounts=counts))
    assert (fleet.rows[0].wellness, fleet.verdict) == (wellness, verdict)


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"written": ""},
        {"written": "yesterday"},
    ],
    ids=["none", "empty", "no time"],
)
def test_a_node_that_never_wrote_is_silent(status: dict[str, Any]) -> None:
    text = json.dumps({"metadata": {"name": "n"}, "status": status, "kind": "NodeStorage"})
    fleet = folded(msgspec.json.decode(text, type=shapes.NodeStorage))
    assert fleet.nodes_by() == {"critical": 0, "silent": 1, "warning": 0, "well": 0}


def test_datasets_are_counted_over_nodes() -> None:
    fleet = folded(
        storage("a", datasets=[dataset("coco"), dataset("laion", 40, message="no room")]),
        storage("b", datasets=[dataset("coco")]),
        storage("late", age=3600, datasets=[dataset("coco")]),
    )
    coco, laion = fleet.datasets["coco"], fleet.datasets["laion"]
    assert (coco.whole, coco.wanted, coco.complete) == (2, 3, False)
    assert coco.why == "its agent is silent (late)"
    assert dict(coco.states) == {"complete": 2, "silent": 1}
    assert (laion.whole, laion.wanted, laion.percent, laion.why) == (0, 1, 40, "no room (a)")


@pytest.mark.parametrize(
    ("wanted", "complete", "percent"), [(1, True, 100), (2, False, 50), (0, True, 100)]
)
def test_nodes_that_do_not_know_an_object_yet_want_it(
    wanted: int, complete: bool, percent: int
) -> None:
    fleet = folded(storage("a", datasets=[dataset("coco")]))
    fleet.add_datasets([wish("coco", wanted)])
    found = fleet.datasets["coco"]
    assert (found.complete, found.percent) == (complete, percent)


def test_an_object_that_no_node_has_is_shown_with_its_own_words() -> None:
    fleet = folded(storage("a"))
    fleet.add_datasets([wish("coco", 3, "Refused", refused=3)])
    found = fleet.datasets["coco"]
    assert (found.whole, found.wanted, found.percent) == (0, 3, 0)
    assert found.said == "Refused: n1: why"
    assert (fleet.refused(), fleet.verdict) == (["coco"], "attention")


def test_nothing_is_whole_before_all_nodes_are() -> None:
    """999 of 1000 is not 100 %."""
    nodes = (
        storage(f"n{i}", datasets=[dataset("coco", 0 if i == 7 else 100)]) for i in range(1000)
    )
    assert folded(*nodes).datasets["coco"].percent == 99


def test_the_oldest_scrub_names_dataset_and_node() -> None:
    times = {name: kit.units.rfc3339(NOW - days * 86400) for name, days in (("a", 3), ("b", 27))}
    fleet = folded(
        storage("n1", datasets=[dataset("coco", scrubbed=times["a"]), dataset("new")]),
        storage("n2", datasets=[dataset("coco", scrubbed=times["b"])]),
    )
    oldest = fleet.oldest_scrub()
    assert oldest == folding.Moment(NOW - 27 * 86400, "coco", "n2")
    assert fleet.as_json("here")["oldest_scrub"]["node"] == "n2"
    assert folded(storage("n")).oldest_scrub() is None


def test_findings_are_counted_by_rule_and_by_severity() -> None:
    told = [finding("warning", "leaked-mount"), finding("warning", "leaked-mount")]
    fleet = folded(
        storage("a", findings=told, findingCounts={"warning": 40}),
        storage("b", findings=[*told, finding("critical", "disk")], findingCounts={"critical": 1}),
    )
    rules = sorted(fleet.rules.values(), key=lambda each: each.order)
    assert [(each.rule, each.nodes) for each in rules] == [("disk", 1), ("leaked-mount", 2)]
    assert rules[1].example == "rbd4: is wrong (a)"
    assert (fleet.severities["warning"], fleet.severities["critical"]) == (40, 1)
    assert [row.worst for row in fleet.rows] == ["rbd4: is wrong", "rbd4: is wrong"]


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ({"mode": "enforce", "inForce": True}, "enforce"),
        ({"mode": "enforce", "inForce": False}, "enforce, not in force"),
        ({"mode": "off"}, "off"),
        (None, "-"),
    ],
)
def test_guard_of_a_node(guard: dict[str, Any] | None, said: str) -> None:
    given: dict[str, Any] = {"guard": guard} if guard else {}
    fleet = folded(storage("a", **given))
    assert fleet.rows[0].guard == said


def test_names_without_end_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MOST_NAMES", 3)
    fleet = folded(*(storage(f"n{i}", datasets=[dataset(f"d{i}")]) for i in range(5)))
    assert (len(fleet.datasets), fleet.left_out, len(fleet.rows)) == (3, 2, 5)


def test_a_node_costs_one_row_whatever_it_holds() -> None:
    """7,500 nodes with 500 datasets each: what is kept does not grow with what each node holds."""
    page = [dataset(f"d{i}", message="m" * 400) for i in range(500)]
    fleet = folded(*(storage(f"n{i}", datasets=page) for i in range(4)))
    assert len(fleet.datasets) == 500
    assert all(sys.getsizeof(part) < 500 for row in fleet.rows for part in vars(row).values())
    assert not any(isinstance(part, tuple | list) for part in vars(fleet.rows[0]).values())


def test_newest_events_are_kept_and_the_newest_is_last() -> None:
    newest = folding.NewestEvents(3)
    for age in (5, 1, 9, 3, 7):
        text = {
            "metadata": {"name": f"e{age}", "namespace": "default"},
            "involvedObject": {"kind": "Node", "name": "n"},
            "lastTimestamp": kit.units.rfc3339(NOW - age),
            "message": f"{age} s ago",
        }
        newest.add(msgspec.convert(text, shapes.EventObject))
    assert [each["message"] for each in newest.listed()] == ["5 s ago", "3 s ago", "1 s ago"]


def test_what_is_json_has_no_rows_of_nodes_in_the_status() -> None:
    made = folded(storage("a", datasets=[dataset("coco")])).as_json("here")
    assert json.loads(json.dumps(made)) == made
    assert made["nodes"] == {"all": 1, "critical": 0, "silent": 0, "warning": 0, "well": 1}
    assert made["datasets"][0]["name"] == "coco"
