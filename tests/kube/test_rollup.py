"""What all nodes together say of one object. Pure."""

from typing import Any

import kit.units
from nodeagent.cluster import intent, kinds, rollup

NOW = 1_800_000_000.0
ASKED = intent.Wish("CachedDataset", "coco", "u", 3, "2026-01-01T00:00:00Z", {})


def node(name: str, observed: str = "now", age: float = 0.0, **entry: Any) -> rollup.View:
    given = {"observed_generation": 3, "ready": True, "percent": 100, "bytes": 2**30, **entry}
    mine = kinds.ObjectStatus(kind=ASKED.kind, name=ASKED.name, **given)
    objects = {} if entry.get("observed_generation") == 0 else {ASKED.key: mine}
    return rollup.View(name, observed, kit.units.rfc3339(NOW - age), objects)


def roll(*nodes: rollup.View, before: dict[str, Any] | None = None) -> dict[str, Any]:
    return rollup.of_object(ASKED, before or {}, nodes, "now", NOW)


def condition(made: dict[str, Any], kind: str = "Ready") -> tuple[str, str, str]:
    (found,) = [each for each in made["conditions"] if each["type"] == kind]
    return found["status"], found["reason"], found["message"]


def test_all_nodes_have_it() -> None:
    made = roll(node("a"), node("b"))
    assert (made["ready"], made["percent"], made["size"]) == ("2/2", 100, "1.0 GiB")
    assert condition(made) == ("True", "Complete", "on 2 nodes")
    assert condition(made, "Accepted")[0] == "True"


def test_nodes_that_wait_are_named() -> None:
    made = roll(node("a"), *(node(f"n{i}", ready=False, percent=40) for i in range(5)))
    assert (made["ready"], made["percent"]) == ("1/6", 50)
    assert condition(made)[:2] == ("False", "Filling")
    assert condition(made)[2] == "n0: 40 %; n1: 40 %; n2: 40 % and 2 more"


def test_node_that_says_why_it_lacks_it_does_not_look_like_a_fill() -> None:
    why = "waiting: claim train/imagenett does not exist"
    made = roll(node("a", ready=False, percent=40), node("b", ready=False, percent=0, message=why))
    assert condition(made) == ("False", "Waiting", f"a: 40 %; b: {why}")
    assert condition(roll(node("b", ready=False, age=3600.0)))[1] == "Waiting"


def test_refusal_says_who_and_why() -> None:
    made = roll(node("a"), node("b", ready=False, accepted=False, message="no 'cache'"))
    assert condition(made) == ("False", "Refused", "b: no 'cache'")
    assert condition(made, "Accepted") == ("False", "Refused", "b: no 'cache'")
    assert made["nodes"] == {"wanted": 2, "ready": 1, "refused": 1}


def test_ready_waits_for_nodes_that_do_not_know_the_object_yet() -> None:
    late = node("b", observed="before", observed_generation=0)
    made = roll(node("a"), late)
    assert condition(made)[:2] == ("False", "Unknown")
    after = roll(node("a"), node("b"), before=made)
    assert condition(after)[0] == "True"
    # Another object of another name changes digests, and takes nothing back.
    assert condition(roll(node("a"), node("b", observed="other"), before=after))[0] == "True"


def test_older_generation_of_the_spec_is_not_ready() -> None:
    made = roll(node("a", observed_generation=2))
    assert condition(made)[0] == "False"


def test_silent_node_is_not_ready_and_holds_up_nobody_who_never_wanted_it() -> None:
    assert condition(roll(node("a"), node("b", age=3600.0)))[2] == "b: its agent is silent"
    gone = node("b", observed="before", age=3600.0, observed_generation=0)
    assert condition(roll(node("a"), gone))[0] == "True"


def test_no_node_wants_it() -> None:
    made = roll(node("a", observed_generation=0))
    assert condition(made)[:2] == ("False", "NoNodes")
    assert made["ready"] == "0/0"


def test_unchanged_nodes_give_an_unchanged_status() -> None:
    """Or the leader would write for nothing."""
    first = roll(node("a"), node("b", ready=False, percent=10))
    later = rollup.of_object(
        ASKED, first, [node("b", ready=False, percent=10), node("a")], "now", NOW + 100
    )
    assert later == first
