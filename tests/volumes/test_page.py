"""What the status page says of the guard and of a device."""

from typing import Any

import pytest

from volumes import api

GUARD = {"wanted_mode": "enforce", "in_force": True, "reasons": [], "denials": [], "leases": []}
DEVICE: dict[str, Any] = {
    "title": "pool/img", "device": "/dev/rbd0", "size": 2**30, "looked_seconds_ago": 3.0,
    "verdict": {"verdict": "has_fs", "type": "ext4"}, "may_be_formatted": False,
    "formatted_by": 0, "reasons": ["it holds data"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "refuses every format"),
        ({"wanted_mode": "dry-run"}, "reports formats and refuses none"),
        ({"wanted_mode": "off"}, "nothing keeps a volume with data"),
        (
            {"in_force": False, "reasons": ["no cgroup"]},
            "not in force, although its mode is enforce",
        ),
        ({"leases": [1, 2]}, "Open permits to format: 2."),
        ({"denials": [1]}, "Refusals remembered: 1."),
    ],
)
def test_guard_in_a_sentence(more: dict[str, Any], text: str) -> None:
    assert text in api.said(GUARD | more)


@pytest.mark.parametrize(
    ("does", "may", "text", "tone"),
    [
        ("enforce", False, "refused", "good"),
        ("dry-run", False, "reported, not refused", "mid"),
        ("off", False, "not refused", "bad"),
        ("not in force", False, "not refused", "bad"),
        ("enforce", True, "permitted: it is blank", "mid"),
    ],
)
def test_a_format_is_called_refused_only_when_it_is(
    does: str, may: bool, text: str, tone: str
) -> None:
    _, _, _, answer, _ = api._row(DEVICE | {"may_be_formatted": may}, does, [])
    assert (answer.text, answer.tone) == (text, tone)


def test_a_format_at_work_is_not_called_refused() -> None:
    answer = api._row(DEVICE | {"formatted_by": 7}, "enforce", [])[3]
    assert (answer.text, answer.tone) == ("at work", "mid")
    answer = api._row(DEVICE | {"formatted_by": 7}, "dry-run", [])[3]
    assert answer.text == "reported, not refused", "any other may format, too"


def test_device_shows_what_it_holds_and_what_is_found() -> None:
    name, holds, size, _, found = api._row(DEVICE, "enforce", ["leaked-mount"])
    assert (name.text, name.below[0].text) == ("pool/img", "/dev/rbd0")
    assert (holds.text, holds.tone, holds.below[0].text) == ("a file system", "good", "ext4")
    assert (size.text, size.number) == ("1.0 GiB", True)
    assert (found.text, found.tone) == ("leaked-mount", "bad")
    unseen = api._row(DEVICE | {"verdict": None}, "enforce", [])[1]
    assert unseen.text == "not looked at yet"


@pytest.mark.parametrize(
    ("seconds", "below"),
    [
        (60.0, []),
        (600.0, [("looked at 10m00s ago", "")]),
        (4 * 3600.0, [("looked at 4h00m ago", "")]),  # as often as a device in use is looked at
        (5 * 3600.0, [("looked at 5h00m ago", "mid")]),
    ],
)
def test_a_last_look_stands_out_only_when_it_is_late(
    seconds: float, below: list[tuple[str, str]]
) -> None:
    holds = api._row(DEVICE | {"looked_seconds_ago": seconds}, "enforce", [])[1]
    assert [(each.text, each.tone) for each in holds.below[1:]] == below
