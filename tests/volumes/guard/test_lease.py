"""The decision to permit a format: never where any source of truth says, or may say, 'data'."""

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from volumes.guard import lease
from volumes.ledger.entry import Entry, Knowledge, merge
from volumes.probe.verdict import Kind, Verdict

HERE = ((254, 0), 7, 2**30, "rbd:f/1//a")
OTHER = ((254, 0), 8, 2**30, "rbd:f/1//a")
BLANK = Verdict(Kind.BLANK_VERIFIED, size=2**30, diskseq=7)

GOOD = lease.Evidence(
    is_rbd=True, before=HERE, after=HERE, first=BLANK, second=BLANK,
    ledger=Knowledge.NONE, mirror=Knowledge.NONE, extents=Knowledge.NONE,
    quiet_for=math.inf, read_only=False, in_use=False, snapshot=False, cluster_size=2**30,
)  # fmt: skip


def test_a_verified_blank_volume_is_permitted() -> None:
    assert lease.refusals(GOOD, lease.Policy()) == ()


def test_without_credentials_local_knowledge_suffices_unless_extents_are_required() -> None:
    alone = dataclasses.replace(
        GOOD, mirror=Knowledge.NOT_ASKED, extents=Knowledge.NOT_ASKED, cluster_size=None
    )
    assert lease.refusals(alone, lease.Policy()) == ()
    assert lease.refusals(alone, lease.Policy(require_extents=True))


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


def _may_hold_data(e: lease.Evidence, policy: lease.Policy) -> bool:
    """Written from the issue's text, independently of the decision."""
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
@settings(max_examples=1_500, deadline=None, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(st.one_of(_nearly_good, _nearly_good, _evidence), st.booleans())
def test_no_lease_where_anything_says_or_may_say_data(
    evidence: lease.Evidence, require: bool
) -> None:
    policy = lease.Policy(quiet=60.0, require_extents=require)
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


def test_a_hundred_thousand_seeded_states_agree_with_the_issues_words() -> None:
    given_, refused = 0, 0
    for seed in range(100_000):
        choose = random.Random(seed)
        evidence = _random_evidence(choose)
        policy = lease.Policy(quiet=60.0, require_extents=choose.random() < 0.5)
        no = bool(lease.refusals(evidence, policy))
        assert no == _may_hold_data(evidence, policy), evidence
        given_, refused = given_ + (not no), refused + no
    assert given_ > 10_000 and refused > 10_000, "both answers must be tried"


@dataclass
class World:
    """A volume, its ledger copies and the kernel, with everything that can go wrong.

    ``written``: something was written to it since it was created. ``lies``: its reads give zeros
    whatever it holds (the worst backend).
    """

    written: bool = False
    lies: bool = False
    entry: Entry = dataclasses.field(default_factory=lambda: Entry("rbd:f/1//a"))
    mirror: Entry | None = None
    cluster: bool = True  # configured, and its extents are the truth
    cluster_up: bool = True
    lease_until: float | None = None
    opens: int = 0
    now: float = 1000.0
    diskseq: int = 7

    def verdict(self) -> Verdict:
        if self.written and not self.lies:
            return Verdict(Kind.HAS_FS, type="ext4", uuid="u", size=2**30, diskseq=self.diskseq)
        return Verdict(Kind.BLANK_VERIFIED, size=2**30, diskseq=self.diskseq)

    def asked(self) -> tuple[Knowledge, Knowledge]:
        if not self.cluster:
            return Knowledge.NOT_ASKED, Knowledge.NOT_ASKED
        if not self.cluster_up:
            return Knowledge.UNKNOWN, Knowledge.UNKNOWN
        mirror = self.mirror.knowledge if self.mirror else Knowledge.NONE
        return mirror, Knowledge.CONTENT if self.written else Knowledge.NONE

    @property
    def leased(self) -> bool:
        return self.lease_until is not None and self.now < self.lease_until


def _step(world: World, step: lease.Step) -> None:
    match step:
        case lease.Step.RECORD_PERMISSION:
            world.entry = world.entry.permit("auto", world.now)
        case lease.Step.MIRROR:
            if world.cluster and world.cluster_up:
                world.mirror = world.entry
        case lease.Step.GRANT:
            world.lease_until, world.opens = world.now + 90, 0
        case lease.Step.SHORTEN:
            world.lease_until = min(world.lease_until or 0, world.now + lease.LINGER_SECONDS)
        case lease.Step.REVOKE:
            world.lease_until, world.opens = None, 0
        case lease.Step.RECORD_CONTENT:
            world.entry = world.entry.saw("ext4", "u", "", world.now, "n")
        case lease.Step.CLOSE_PERMISSION:
            world.entry = world.entry.unused()


def _look(world: World, choose: random.Random) -> None:
    """The judge's look, interrupted (the agent is killed) after any number of steps."""
    seen = world.verdict()
    if seen.has_content and world.mirror and world.cluster_up:
        world.entry = merge(world.entry, world.mirror)
    held = world.lease_until is not None
    steps = list(lease.conclude(
        has_content=seen.has_content, verdict_known=seen.verdict is Kind.BLANK_VERIFIED,
        leased=held, expired=held and world.now > (world.lease_until or 0) + 1,
        opens=world.opens, open_=world.entry.permitted > 0,
    ))  # fmt: skip
    if not seen.has_content and not world.leased:
        mirror, extents = world.asked()
        attachment = ((254, 0), world.diskseq, 2**30, world.entry.volume)
        after_steps = world.entry
        if lease.Step.CLOSE_PERMISSION in steps:
            after_steps = after_steps.unused()
        evidence = lease.Evidence(
            is_rbd=True, before=attachment, after=attachment, first=seen, second=seen,
            ledger=after_steps.knowledge, mirror=mirror, extents=extents, quiet_for=math.inf,
            read_only=False, in_use=False,
        )  # fmt: skip
        if not lease.refusals(evidence, lease.Policy()):
            # Invariant: what may hold data by the world's own truth is never leased.
            assert not world.written, (world, evidence)
            steps += lease.GRANTING
    for step in steps[: choose.randrange(len(steps) + 1) if choose.random() < 0.5 else None]:
        _step(world, step)
        if world.leased:
            assert world.entry.permitted or world.entry.type, "a lease without a trace"


def _event(world: World, choose: random.Random) -> None:
    match choose.randrange(8):
        case 0 | 1 | 2:
            _look(world, choose)
        case 3:
            if world.leased:  # mkfs gets in
                world.opens += 2
                world.written = world.written or choose.random() < 0.8
        case 4:
            world.now += choose.choice([0.5, 5, 60, 92, 1000])
        case 5:
            world.lies = not world.lies
        case 6:
            world.cluster_up = not world.cluster_up
        case 7:  # detached and attached: the kernel forgets leases; on another node, the ledger too
            world.lease_until, world.opens = None, 0
            world.diskseq += 1
            if choose.random() < 0.3 and world.cluster:
                world.entry = Entry(world.entry.volume)


@pytest.mark.timeout(240)
def test_interrupted_at_any_step_a_volume_that_was_written_is_never_leased_again() -> None:
    """20,000 random lives of a volume, each up to 40 events, killed within decisions; half of
    them with a cluster that can be asked (and then seen by nodes without memory)."""
    leased = 0
    for seed in range(20_000):
        choose = random.Random(seed)
        world = World(cluster=choose.random() < 0.5)
        for _ in range(choose.randrange(5, 40)):
            _event(world, choose)
            leased += world.leased
    assert leased > 10_000, "the lives must have leases in them, or this proves nothing"


@pytest.mark.parametrize("broken", [
    {"extents": Knowledge.UNKNOWN}, {"mirror": Knowledge.UNKNOWN}, {"ledger": Knowledge.UNKNOWN},
    {"quiet_for": None}, {"quiet_for": 59.9}, {"in_use": None}, {"after": OTHER}, {"second": None},
])  # fmt: skip
def test_each_unknown_is_a_no_with_its_reason(broken: dict[str, Any]) -> None:
    reasons = lease.refusals(dataclasses.replace(GOOD, **broken), lease.Policy())
    assert len(reasons) >= 1 and all(reasons)
