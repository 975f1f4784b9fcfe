"""What the soak of the field's reports makes of errors, lines and figures."""

import json

import pytest

from tests.deploy import field_judge
from tests.deploy.field_judge import Fault

HUNG = Fault("source hung", 100.0, 130.0)


def event(**fields: object) -> dict[str, object]:
    return {"began": 110.0, "at": 111.0, "reader": "mmap", "dataset": "hung-a", "step": "read",
            "what": "slow", "text": "12 s", **fields}  # fmt: skip


@pytest.mark.parametrize("each", field_judge.NAMED, ids=lambda each: each.page)
def test_each_page_and_heading_exists(each: field_judge.Named) -> None:
    assert field_judge.heading(each.page)


@pytest.mark.parametrize(
    ("fields", "page"),
    [
        ({}, "docs/cache.md#While the source does not answer"),
        ({"dataset": "stopped-a"}, ""),  # a complete dataset needs no source
        ({"what": "wrong bytes"}, ""),  # whatever fault is in force
        ({"began": 140.0, "at": 160.0}, ""),  # the fault is over
        ({"began": 90.0, "at": 101.0}, "docs/cache.md#While the source does not answer"),
        ({"reader": "getcwd", "dataset": "plain-a", "what": "ENOENT", "step": "getcwd"},
         "docs/mount.md#When it is swapped"),
        ({"reader": "getcwd", "dataset": "plain-a", "what": "ENOENT", "step": "relative open"}, ""),
    ],
)  # fmt: skip
def test_an_error_is_named_only_under_its_fault(fields: dict[str, object], page: str) -> None:
    assert field_judge.page(event(**fields), [HUNG]) == page


def line(**fields: object) -> str:
    return json.dumps({"event": "view published", "level": "info", "dataset": "a", **fields})


def test_lines_of_one_fact_differ_in_times_counts_and_ids_only() -> None:
    here = line(timestamp="2026-01-01", files=3, id="0123456789abcdef")
    assert field_judge.fact(here) == field_judge.fact(line(timestamp="x", files=17, id="9" * 16))
    assert field_judge.fact(here) != field_judge.fact(line(timestamp="x", files=3, dataset="b"))
    assert field_judge.fact("plain 12") == field_judge.fact("plain 13")


@pytest.mark.parametrize(
    ("moments", "most", "noisy"),
    [
        ([0, 10, 20], 3, False),  # a burst
        ([0, 1, 60, 61, 120, 121], 2, True),
        ([0, 60, 120, 180], 1, False),  # one a minute
        ([0, 1, 60, 61, 240, 241], 2, False),  # not running
    ],
)
def test_more_than_one_line_a_minute_for_minutes_is_noise(
    moments: list[float], most: int, noisy: bool
) -> None:
    (found,) = field_judge.loud((moment, line(n=moment)) for moment in moments)
    assert (found.most, field_judge.too_loud(found)) == (most, noisy)


def test_lines_of_different_passes_are_no_noise() -> None:
    moments = (0, 1, 60, 61, 120, 121)
    (found,) = field_judge.loud((moment, line(event="pass started")) for moment in moments)
    assert found.minutes == 3
    assert not field_judge.too_loud(found)


def test_flat_is_at_most_a_tenth_more() -> None:
    assert field_judge.thirds([1, 1, 5, 5, 3, 3]) == (1, 3)
    assert field_judge.flat(100, 109)
    assert not field_judge.flat(100, 111)
