"""What 'volume explain' says in each state in which somebody asks it: the page and the next step.

Each row is a state of the guard as it is kept, through the JSON that the command gets.
"""

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from linux import blockdev
from linux.rbd_sysfs import RbdImage
from volumes.guard import explain, status
from volumes.guard.pace import Doubt
from volumes.guard.steps import Known
from volumes.ledger.mirror import Answer
from volumes.ledger.statement import Statement
from volumes.ledger.store import Entry, Knowledge
from volumes.probe.examine import Kind, Verdict

IMAGE = RbdImage("rbd", "a", "", "", "101d", "f1", 3)
DEVICE = blockdev.BlockDevice("rbd9", (254, 9), "rbd", 2**30, False, diskseq=7, image=IMAGE)
BLANK = Verdict(Kind.BLANK_VERIFIED)
EXT4 = Verdict(Kind.HAS_FS, type="ext4", uuid="u1")
XFS = Verdict(Kind.HAS_FS, type="xfs", uuid="u2")
UNREADABLE = Verdict(Kind.UNREADABLE, where="offset 0", errno=5)
HELD = Entry(DEVICE.volume, "rbd/a", "ext4", "u1", last_seen=1e9, node="node-2")
PERMITTED = Entry(DEVICE.volume, "rbd/a", permitted=1e9)
ALLOCATED = Answer(Knowledge.NONE, Knowledge.CONTENT)
EMPTY = Answer(Knowledge.NONE, Knowledge.NONE)
ONE, TWO = Doubt(1, 1.0), Doubt(2, 9.0)
DENIAL = {
    "device": "rbd9", "volume": DEVICE.volume, "title": "rbd/a", "denied": True, "pid": 7,
    "program": "mkfs.xfs", "pod": "p", "command": "mkfs.xfs /dev/rbd9",
    "reasons": ["this device never gets an automatic lease"],
}  # fmt: skip


def known(seen: Verdict | None, reason: str = "a reason", **more: Any) -> Known:
    return Known(DEVICE, seen, (reason,) if reason else (), **more)


def page(
    state: Known, ledger: Entry | None = None, denials: Any = (), **more: Any
) -> tuple[str, str]:
    """The whole page, and its next step."""
    row = json.loads(json.dumps(status.describe_device(state, 10.0)))
    entry = None if ledger is None else dataclasses.asdict(ledger)
    mode = more.pop("mode", "enforce")
    lines = list(explain.page(row | more.pop("row", {}), entry, list(denials), mode, **more))
    assert [line.startswith("Next: ") for line in lines] == [False] * (len(lines) - 1) + [True]
    return "\n".join(lines), lines[-1]


# State, the ledger's entry, words of the page, words of the next step, words that would be wrong.
CASES: dict[str, tuple[Known, Entry | None, list[str], list[str], list[str]]] = {
    # (a) The accident: this node never saw the volume, and it reads as empty.
    "metadata knows, extents allocated": (
        known(BLANK, missing="ext4 u1", cluster=Answer(Knowledge.CONTENT, Knowledge.CONTENT, HELD)),
        None,
        ["knows nothing of it", "metadata   ext4 u1, seen on node-2", "extents are allocated"],
        ["held ext4 u1", "something was written", "Do not format", "end its pod", "rbd diff"],
        ["asks again", "allow-format"],
    ),
    "only the extents know": (
        known(BLANK, cluster=ALLOCATED), None,
        ["metadata   of the image knows nothing"],
        ["its cluster says that something was written", "Do not format", "blocklist"],
        ["asks again", "held"],
    ),
    "only the ledger knows": (
        known(BLANK, missing="ext4 u1"), HELD, ["ledger     ext4 u1, seen on node-2"],
        ["It reads as empty, and held ext4 u1. Do not format", "end its pod"], ["asks again"],
    ),
    "only its PersistentVolume knows": (
        known(BLANK, witness=Statement(Knowledge.CONTENT, "pvc-a", "ext4 u1"), cluster=ALLOCATED),
        None, ["pvc-a says that it holds data"],
        ["It reads as empty, and its PersistentVolume pvc-a says", "Do not format"], ["asks again"],
    ),
    "held content, and nothing of it is allocated": (
        known(BLANK, missing="ext4 u1", cluster=Answer(Knowledge.CONTENT, Knowledge.NONE, HELD)),
        HELD, ["nothing is allocated where data leaves"],
        ["held ext4 u1", "was emptied", "rbd snap ls", "emptied on purpose"],
        ["most likely the data is there", "end its pod"],
    ),
    "a format was permitted before": (
        known(BLANK), PERMITTED, ["no content seen, a format was permitted"],
        ["permitted before", "rbd du", "owner", "Formatting by hand"], ["asks again"],
    ),
    "permitted before, and extents allocated": (
        known(BLANK, cluster=ALLOCATED), PERMITTED, [], ["Do not format it: most likely"], [],
    ),
    "permitted before, and nothing is allocated": (
        known(BLANK, "an I/O error 3s ago", cluster=EMPTY), PERMITTED,
        ["because an I/O error 3s ago"], ["next attempt to write asks again"], ["by hand"],
    ),
    "new, and waits": (
        known(BLANK, cluster=EMPTY), None, [], ["next attempt to write asks again"], [],
    ),
    "nobody was asked": (
        known(BLANK, "the guard is not attached"), None, ["because the guard is not attached"],
        ["nobody has asked the other sources", "guard status"], ["asks again"],
    ),
    # (b) One look without an answer.
    "one timeout": (
        known(Verdict(Kind.TIMEOUT), doubt=ONE), HELD, [],
        ["Wait", "ten seconds", "Stop nothing, unmap nothing"], ["end its pod", "two looks"],
    ),
    "one failed read": (
        known(UNREADABLE, doubt=ONE), HELD, ["unreadable (offset 0: Input/output error)"],
        ["Wait", "Stop nothing"], ["end its pod", "held"],
    ),
    "two timeouts": (
        known(Verdict(Kind.TIMEOUT), doubt=TWO, missing="ext4 u1"), HELD, [],
        ["It held ext4 u1", "two looks agree", "blocklist", "format nothing"], ["Wait"],
    ),
    "two failed reads": (
        known(UNREADABLE, doubt=TWO, missing="ext4 u1"), HELD, [],
        ["It held ext4 u1", "blocklist", "end its pod", "format nothing"], ["Wait"],
    ),
    "two looks at nothing": (
        known(Verdict(Kind.NO_MEDIA), doubt=TWO), None, [],
        ["not connected", "end its pod", "Format nothing"], ["Wait"],
    ),
    # (c) The first content could not be written down. Nothing has changed.
    "content, no entry was written": (
        known(EXT4, "the decision failed: No space left on device"), None, ["No space left"],
        ["holds ext4 u1", "not in the ledger", "state directory", "Accept nothing"],
        ["--accept", "other content", "Nothing:"],
    ),
    "content, the permission is still open": (
        known(EXT4, "the decision failed: Read-only file system"), PERMITTED, [],
        ["not in the ledger", "state directory"], ["--accept", "who did it"],
    ),
    # (d) No entry: nobody may say that all is as expected.
    "not looked at yet": (
        known(None), None, ["seen       not looked at yet"],
        ["Nobody has looked at it yet", "ten seconds"], ["Nothing:", "expected"],
    ),
    "content, and the metadata agrees": (
        known(EXT4, cluster=Answer(Knowledge.CONTENT, Knowledge.NOT_ASKED, HELD)), None, [],
        ["Nothing: it holds what was last seen on it, ext4 u1"], ["state directory"],
    ),
    "content, and the metadata is its parent's": (
        known(EXT4, cluster=Answer(
            Knowledge.CONTENT, Knowledge.NOT_ASKED, replace(HELD, volume="rbd:parent"))),
        None, [], ["not in the ledger yet"], ["Nothing:"],
    ),
    # And the rest.
    "as it was": (known(EXT4), HELD, [], ["Nothing: it holds what was last seen"], ["correct"]),
    "changed": (
        known(XFS, changed_from="ext4 u1"), HELD, [],
        ["held ext4 u1 and holds xfs u2", "Stop its users", f"ledger --accept {DEVICE.volume}"],
        ["Nothing:"],
    ),
    "marks are gone": (
        known(Verdict(Kind.UNKNOWN_CONTENT), missing="ext4 u1"), HELD, [],
        ["It held ext4 u1", "snapshot", "Format nothing"], [],
    ),
    "leased": (known(BLANK, ""), None, ["allowed now"], ["Nothing: kubelet formats"], []),
    "raw": (known(None, "", raw=True), None, ["raw block"], ["its pod writes"], ["looked at it"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_state_has_its_page_and_its_next_step(case: str) -> None:
    state, ledger, on_page, said, wrong = CASES[case]
    whole, step = page(state, ledger)
    for words in on_page:
        assert words in whole
    for words in said:
        assert words in step
    for words in wrong:
        assert words not in step


def test_attempts_to_format_what_holds_data_are_corrected_not_allowed() -> None:
    whole, step = page(known(EXT4), HELD, [DENIAL])
    assert "refused    mkfs.xfs (pid 7, pod p): mkfs.xfs /dev/rbd9" in whole
    assert "Nothing: it holds what was last seen" in step and "correct that, and never" in step


@pytest.mark.parametrize("mode", ["dry-run", "off"])
@pytest.mark.parametrize("case", [c for c in CASES if c not in ("leased", "raw")])
def test_where_the_mode_refuses_nothing_the_page_says_so(case: str, mode: str) -> None:
    """Whoever decides about data here must not believe that the kernel stands before it."""
    state, ledger, _, _, _ = CASES[case]
    whole, _ = page(state, ledger, mode=mode)
    assert f"formatting NOT refused: the mode is {mode}" in whole
    assert "stays refused" not in whole and "formatting refused" not in whole
    enforced, _ = page(state, ledger)
    assert "formatting refused\n" in enforced and "NOT refused" not in enforced


# (e) A partition, and a device outside volumes.guard.names: their denials are known.
@pytest.mark.parametrize(
    ("partition_of", "seen", "said"),
    [
        ("", EXT4, "holds ext4 u1"),
        ("rbd9", EXT4, "only its owner can say"),
        ("rbd9", BLANK, "it is a partition of rbd9"),
        ("", BLANK, "volumes.guard.names"),
        ("", UNREADABLE, "Wait"),
    ],
)
def test_devices_that_are_never_examined_have_a_page(
    partition_of: str, seen: Verdict, said: str
) -> None:
    device = replace(DEVICE, parent=partition_of)
    row = explain.unwatched(status.describe_probe(device, seen, HELD), [DENIAL])
    lines = list(explain.page(json.loads(json.dumps(row)), None, [DENIAL], "enforce"))
    assert "             because this device never gets an automatic lease" in lines
    assert "  ledger     none is kept of it" in lines
    assert said in lines[-1]
    assert "--accept" not in lines[-1] and "asks again" not in lines[-1]


def test_device_that_is_gone_has_a_page_of_its_denials() -> None:
    row = explain.gone("/dev/rbd9", "it cannot be looked at: No such file", [DENIAL])
    lines = list(explain.page(row, None, [DENIAL], "enforce"))
    assert "             because it cannot be looked at: No such file" in lines
    assert "Nothing on this node: it could not be looked at" in lines[-1]


# (f) Without an agent.
def test_without_an_agent_nobody_permits_and_nobody_looks_again() -> None:
    whole, step = page(known(BLANK, cluster=EMPTY), None, agent=False)
    assert "no agent answers" in whole and "Start the agent" in step and "asks again" not in step
    _, step = page(known(EXT4), None, agent=False)
    assert "An agent writes it down when it runs" in step and "next look" not in step
    _, step = page(known(XFS, changed_from="ext4 u1"), HELD, agent=False)
    assert "it needs an agent" in step
    _, step = page(known(BLANK, missing="ext4 u1"), HELD, agent=False)
    assert "Do not format" in step and "Start the agent" not in step


@pytest.mark.parametrize("seen", [BLANK, Verdict(Kind.UNKNOWN_CONTENT), EXT4])
def test_a_format_at_work_is_not_called_refused(seen: Verdict) -> None:
    text, following = page(known(seen, writer=7))
    assert "formatting process 7 is at it; any other: refused" in text
    assert following == "Next: Wait: process 7 formats it now. Then run this again"
    text, _ = page(known(seen, writer=7), mode="dry-run")
    assert "any other: NOT refused" in text, "the guard only reports"


def test_a_lease_that_the_next_look_frees_is_waited_for() -> None:
    """Its permission is open, which otherwise means that nobody knows whether an mkfs began."""
    _, following = page(known(BLANK, freed_next=True), Entry("v", permitted=1.0))
    assert following == "Next: Wait: the next look frees the lease. Then run this again"
    _, following = page(known(BLANK, freed_next=True, missing="ext4 u1"))
    assert "ext4 u1" in following and "Wait" not in following


@pytest.mark.parametrize("lost", [{"missing": "ext4 u1"}, {"changed_from": "ext4 u1"}])
def test_a_format_at_work_hides_no_loss(lost: dict[str, str]) -> None:
    seen = BLANK if "missing" in lost else XFS
    _, following = page(known(seen, writer=7, **lost))
    assert "ext4 u1" in following and "Wait" not in following


def test_an_agent_before_this_version_tells_no_formatter() -> None:
    row = status.describe_device(known(BLANK), 0.0)
    del row["formatted_by"]
    assert "formatting refused" in "\n".join(explain.page(row, None, [], "enforce"))
