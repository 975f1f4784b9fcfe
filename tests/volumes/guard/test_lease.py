"""Who may format a device: never where any source says, or may say, "data"."""

import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.testbed import examples
from volumes.guard import lease
from volumes.guard.lease import Step
from volumes.ledger.store import Knowledge
from volumes.probe.examine import Kind, Verdict

HERE: lease.Attachment = ((254, 0), 7, 2**30, "rbd:f/1//a")
OTHER: lease.Attachment = ((254, 0), 8, 2**30, "rbd:f/1//a")
BLANK = Verdict(Kind.BLANK_VERIFIED, size=2**30, diskseq=7)

GOOD = lease.Evidence(
    is_rbd=True, before=HERE, after=HERE, first=BLANK, second=BLANK,
    ledger=Knowledge.NONE, mirror=Knowledge.NONE, extents=Knowledge.NONE,
    quiet_for=math.inf, read_only=False, in_use=False, snapshot=False, cluster_size=2**30,
)  # fmt: skip


def test_refusals_empty_for_verified_blank_volume() -> None:
    assert lease.refusals(GOOD, lease.LeasePolicy()) == ()


def test_refusals_without_credentials_depend_on_require_extents() -> None:
    alone = dataclasses.replace(
        GOOD, mirror=Knowledge.NOT_ASKED, extents=Knowledge.NOT_ASKED, cluster_size=None
    )
    assert lease.refusals(alone, lease.LeasePolicy()) == ()
    assert lease.refusals(alone, lease.LeasePolicy(require_extents=True))


_verdicts = st.one_of(
    st.none(),
    st.builds(
        Verdict,
        verdict=st.sampled_from(Kind),
        size=st.sampled_from([2**30, 2**31]),
        diskseq=st.sampled_from([7, 8, None]),
    ),
    st.just(BLANK),
)
_attachments = st.sampled_from([None, HERE, HERE, OTHER, ((254, 0), None, 2**30, "rbd:f/1//a"),
                                ((254, 0), 7, 2**30, "")])  # fmt: skip
_evidence = st.builds(
    lease.Evidence,
    is_rbd=st.booleans(),
    before=_attachments,
    after=_attachments,
    first=_verdicts,
    second=_verdicts,
    ledger=st.sampled_from(Knowledge),
    mirror=st.sampled_from(Knowledge),
    extents=st.sampled_from(Knowledge),
    quiet_for=st.one_of(st.none(), st.floats(allow_nan=True), st.just(math.inf)),
    read_only=st.sampled_from([None, False, True]),
    in_use=st.sampled_from([None, False, True]),
    snapshot=st.booleans(),
    cluster_size=st.sampled_from([None, 2**30, 2**31]),
)
_FIELDS = [f.name for f in dataclasses.fields(lease.Evidence) if f.name != "why_unknown"]
# Random evidence is nearly always refused for several reasons at once; what could slip through is
# one wrong thing among right ones, so most cases change a few fields of the good evidence.
_nearly_good = st.builds(
    lambda changed, names: dataclasses.replace(GOOD, **{n: getattr(changed, n) for n in names}),
    _evidence,
    st.sets(st.sampled_from(_FIELDS), max_size=3),
)


def _may_hold_data(e: lease.Evidence, policy: lease.LeasePolicy) -> bool:
    """Written from the promise's text, independently of the product's decision."""
    blank_twice = all(
        v is not None and v.verdict is Kind.BLANK_VERIFIED and e.after is not None
        and (v.diskseq, v.size) == (e.after[1], e.after[2])
        for v in (e.first, e.second)
    )  # fmt: skip
    same_attach = e.before is not None and e.before == e.after and e.after[1] is not None
    ledger_silent = e.ledger is Knowledge.NONE or (
        e.ledger is Knowledge.MAYBE and e.extents is Knowledge.NONE
    )
    mirror_silent = e.mirror in (Knowledge.NONE, Knowledge.NOT_ASKED) or (
        e.mirror is Knowledge.MAYBE and e.extents is Knowledge.NONE
    )
    extents_silent = e.extents is Knowledge.NONE or (
        e.extents is Knowledge.NOT_ASKED and not (e.is_rbd and policy.require_extents)
    )
    quiet = e.quiet_for is not None and e.quiet_for >= policy.quiet
    named = e.after is not None and e.after[3] != ""
    free = e.read_only is False and e.in_use is False and not e.snapshot
    size = e.cluster_size is None or (e.after is not None and e.cluster_size == e.after[2])
    return not (
        blank_twice and same_attach and ledger_silent and mirror_silent and extents_silent
        and quiet and named and free and size
    )  # fmt: skip


@pytest.mark.timeout(240)
@settings(max_examples=examples.number(300), deadline=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(st.one_of(_nearly_good, _nearly_good, _evidence), st.booleans())
def test_refusals_agree_with_the_written_rule(evidence: lease.Evidence, require: bool) -> None:
    policy = lease.LeasePolicy(quiet=60.0, require_extents=require)
    refused = bool(lease.refusals(evidence, policy))
    assert refused == _may_hold_data(evidence, policy)


def _random_evidence(choose: random.Random) -> lease.Evidence:
    """Good evidence with up to three fields drawn anew; plain random, because hypothesis is a
    thousand times slower."""
    kinds = list(Kind)
    verdict = choose.choice(
        [
            None,
            BLANK,
            Verdict(
                choose.choice(kinds),
                size=choose.choice([2**30, 2**31]),
                diskseq=choose.choice([7, 8]),
            ),
        ]
    )
    attachment = choose.choice([None, HERE, OTHER, (*HERE[:3], "")])
    drawn: dict[str, Any] = {
        "is_rbd": choose.random() < 0.5, "before": attachment, "after": attachment,
        "first": verdict, "second": verdict,
        **{name: choose.choice(list(Knowledge)) for name in ("ledger", "mirror", "extents")},
        "quiet_for": choose.choice([None, math.nan, -1.0, 0.0, 59.9, 60.0, math.inf]),
        "read_only": choose.choice([None, False, True]),
        "in_use": choose.choice([None, False, True]),
        "snapshot": choose.random() < 0.5, "cluster_size": choose.choice([None, 2**30, 2**31]),
    }  # fmt: skip
    names = choose.sample(list(drawn), choose.randrange(4))
    return dataclasses.replace(GOOD, **{name: drawn[name] for name in names})


@pytest.mark.random
@pytest.mark.timeout(240)
def test_refusals_agree_with_the_written_rule_in_many_states() -> None:
    given_, refused = 0, 0
    for seed in (seeds := examples.seeds(20_000)):
        choose = random.Random(seed)
        evidence = _random_evidence(choose)
        policy = lease.LeasePolicy(quiet=60.0, require_extents=choose.random() < 0.5)
        no = bool(lease.refusals(evidence, policy))
        assert no == _may_hold_data(evidence, policy), evidence
        given_, refused = given_ + (not no), refused + no
    assert min(given_, refused) > len(seeds) / 10, "both answers must be tried"


def test_met_keeps_only_a_lease_of_the_same_attachment() -> None:
    assert lease.met(None, None, HERE) == ()  # no lease
    assert lease.met(7, None, HERE) == ()  # an earlier agent's, DISKSEQ 7
    assert lease.met(7, HERE, HERE) == ()
    grown = (HERE[0], HERE[1], 2 * HERE[2], HERE[3])
    assert lease.met(7, HERE, grown) == ()  # online growth: the same medium
    # nbd over netlink connects another volume without a new number.
    assert lease.met(7, HERE, (*HERE[:3], "another")) == (Step.REVOKE,)
    assert lease.met(0, HERE, HERE) == ()  # no DISKSEQ on this kernel, but seen by this agent
    for held, known, now in ((7, None, OTHER), (7, HERE, OTHER), (0, None, HERE),
                             (0, None, (HERE[0], None, *HERE[2:]))):  # fmt: skip
        assert lease.met(held, known, now) == (Step.REVOKE,)


@pytest.mark.parametrize("steps", [lease.GRANTING, lease.PUBLISHING, lease.RENEWING])
def test_broken_off_closes_only_what_certainly_was_not_granted(steps: tuple[Step, ...]) -> None:
    for count in range(1, len(steps) + 1):
        begun = steps[:count]
        granted_maybe = Step.GRANT in begun
        recorded = count > 1 and steps[0] is Step.RECORD_PERMISSION
        assert bool(lease.broken_off(begun)) is (recorded and not granted_maybe), begun


@pytest.mark.parametrize("broken", [
    {"extents": Knowledge.UNKNOWN}, {"mirror": Knowledge.UNKNOWN}, {"ledger": Knowledge.UNKNOWN},
    {"quiet_for": None}, {"quiet_for": 59.9}, {"in_use": None}, {"after": OTHER}, {"second": None},
])  # fmt: skip
def test_refusals_name_each_unknown(broken: dict[str, Any]) -> None:
    reasons = lease.refusals(dataclasses.replace(GOOD, **broken), lease.LeasePolicy())
    assert len(reasons) >= 1 and all(reasons)


# --- facts


@pytest.mark.parametrize(("line", "device", "is_rbd"), [
    ("I/O error, dev rbd0, sector 2048 op 0x0:(READ) flags 0x0 phys_seg 1", "rbd0", True),
    ("Buffer I/O error on dev rbd0, logical block 0, async page read", "rbd0", True),
    ("rbd: rbd0: read at objno 4 593920~4096 result -108", "rbd0", True),
    ("rbd: rbd0: encountered watch error: -107", "rbd0", True),
    ("block nbd3: Connection timed out", "nbd3", False),
    ("block nbd3: Possible stuck request 00000000c01dcafe: control (read@0,4096B)",
     "nbd3", False),
    ("block nbd3: Dead connection, failed to find a fallback", "nbd3", False),
    ("EXT4-fs error (device rbd0): ext4_find_entry:1455", "rbd0", True),
    ("EXT4-fs error (device dm-0) in ext4_reserve_inode_write:5730: IO failure", "dm-0", True),
    ("XFS (dm-0): Metadata I/O Error (0x1) detected at x (y.c:1).  Shutting down filesystem.",
     "dm-0", True),
    ("BTRFS: error (device dm-0: state A) in x:2418: errno=-5 IO failure", "dm-0", True),
    ("BTRFS error (device dm-0): bdev /dev/dm-0 errs: wr 1, rd 0, flush 0, corrupt 0, gen 0",
     "dm-0", True),
    ("libceph: osd0 down", "rbd7", True),
    ("libceph: mon0 (1)10.0.0.1:6789 session lost, hunting for new mon", "rbd7", True),
    ("libceph: osd1 (1)10.0.0.2:6801 socket closed (con state CONNECTING)", "rbd7", True),
    ("libceph: osd0 (1)10.0.0.1:6801 feature set mismatch, my 1 < server's 2, missing 1", "rbd7",
     True),
    ("blk_print_req_error: 12 callbacks suppressed", "anything", False),
])  # fmt: skip
def test_error_log_counts_device_and_client_errors(line: str, device: str, is_rbd: bool) -> None:
    log = lease.ErrorLog()
    log.readable = True
    assert log.quiet_for(device, lease.Mapped() if is_rbd else None, 100.0) == math.inf
    log.note(line, 90.0)
    assert log.quiet_for(device, lease.Mapped() if is_rbd else None, 100.0) == 10.0


@pytest.mark.parametrize("line", [
    "rbd: rbd0: capacity 1073741824 features 0x3d",
    "libceph: osd1 (1)10.0.0.2:6801 socket closed (con state OPEN)",
    "EXT4-fs (rbd0): mounted filesystem with ordered data mode",
    "I/O error, dev rbd1, sector 2048",
])  # fmt: skip
def test_error_log_ignores_normal_lines_and_other_devices(line: str) -> None:
    log = lease.ErrorLog()
    log.readable = True
    log.note(line, 90.0)
    assert log.quiet_for("rbd0", lease.Mapped(), 100.0) == math.inf


@pytest.mark.parametrize(("line", "ours"), [
    ("libceph: mon0 (1)10.0.0.1:6789 session lost, hunting for new mon", True),
    ("libceph: mon0 (1)10.9.9.9:6789 session lost, hunting for new mon", False),
    ("libceph: mon1 (1)10.9.9.9:6789 socket closed (con state CONNECTING)", False),
    ("libceph: mon2 (1)10.7.7.7:6789 session lost, hunting for new mon", True),  # learnt later
    ("libceph (f1 4711): osd1 down", True),
    ("libceph (f2 4711): osd1 down", False),
    ("libceph (f2 4711): mon0 (1)10.0.0.1:6789 session lost, hunting for new mon", False),
    ("libceph: osd1 down", True),  # of a cluster that the line does not name
])  # fmt: skip
def test_error_log_counts_lines_of_the_devices_own_cluster(line: str, ours: bool) -> None:
    log = lease.ErrorLog()
    log.readable = True
    log.note(line, 90.0)
    given, others = {"10.0.0.1:6789", "10.0.0.2:6789"}, {"10.0.0.1:6789", "10.9.9.9:6789"}
    mapped = lease.Mapped("f1", frozenset(given), frozenset(others))
    assert log.quiet_for("rbd0", mapped, 100.0) == (10.0 if ours else math.inf)
    assert log.quiet_for("rbd0", lease.Mapped(), 100.0) == 10.0  # in doubt it is ours
    assert log.quiet_for("nbd0", None, 100.0) == math.inf


def test_error_log_unreadable_or_overwritten_is_not_quiet() -> None:
    log = lease.ErrorLog()
    assert log.quiet_for("rbd0", lease.Mapped(), 1.0) is None
    log.readable = True
    log.lost(5.0)
    assert log.quiet_for("rbd0", lease.Mapped(), 6.0) == 1.0


def test_error_log_forgets_oldest_device_as_error_of_all() -> None:
    log = lease.ErrorLog()
    log.readable = True
    for number in range(last := log.MOST_DEVICES + 10):
        log.note(f"I/O error, dev rbd{number}, sector 1", float(number))
    assert log.quiet_for("rbd0", None, float(last)) < last  # type: ignore[operator]


def test_raw_seconds_need_the_kernel_to_end_them() -> None:
    assert lease.raw_seconds("rbd", True) == math.inf
    assert lease.raw_seconds("rbd", False) == lease.raw_seconds("nbd", True) == 120
