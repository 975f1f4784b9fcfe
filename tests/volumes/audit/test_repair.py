"""Repair of broken mappings: what is decided, also by agents that are killed after any step."""

import contextlib
import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kit.child
from kit.findings import Finding, Severity
from linux import loop
from linux.rbd_sysfs import RbdClient
from tests.testbed import constants, examples
from tests.volumes.audit.world import INVENTORY, device
from volumes.audit import executors, repair, repairer
from volumes.audit.repair import Case, Sight, Step
from volumes.audit.types import GuardView
from volumes.settings import RepairSettings

NOW = 1_000_000.0
CASE = Case("rbd/a#rbd0#7", "rbd/a", "rbd0")
FREE = Sight(mapped=True, broken="blocklisted", free_since=NOW - 100)


def _policy(**given: Any) -> RepairSettings:
    policy: RepairSettings = constants.made(RepairSettings, **given)
    return policy


def _decide(sight: Sight, case: Case = CASE, **policy: Any) -> repair.Decision:
    return repair.decide(case, sight, _policy(**policy), NOW, [])


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_agent_asks_for_loop_devices_before_an_unmap_of_nbd(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """It remembers a child that hangs with one; a child of its own for the unmap would not."""
    called = []

    async def call(function: object, *words: object, deadline: float) -> object:
        called.append((function, words[-1:]))
        if hangs:
            raise kit.child.DeadlineError("backings", "no answer", "")
        return ([("loop3", "/x", [[43, 0]])], []) if function is loop.backings else 1

    monkeypatch.setattr(kit.child, "call", call)
    made = repairer.Repairer(_policy(), None, None)  # type: ignore[arg-type]
    nbd = dataclasses.replace(device(), driver="nbd")
    with pytest.raises(kit.child.DeadlineError) if hangs else contextlib.nullcontext():
        await made._do(Step.UNMAP, CASE, nbd)
    unmap = (executors.unmap, ([("loop3", "/x", [[43, 0]])],))
    assert called == [(loop.backings, ()), *([] if hangs else [unmap])]


def test_free_and_broken_mapping_is_unmapped() -> None:
    assert _decide(FREE).step is Step.UNMAP
    assert _decide(FREE, taint=True).step is Step.TAINT
    tainted = dataclasses.replace(CASE, begun={Step.TAINT: NOW}, done={Step.TAINT: NOW})
    assert _decide(FREE, tainted, taint=True).step is Step.UNMAP
    begun_only = dataclasses.replace(CASE, begun={Step.TAINT: NOW})
    assert _decide(FREE, begun_only, taint=True).step is Step.TAINT  # killed before it was there


@pytest.mark.parametrize(
    ("sight", "why"),
    [
        (dataclasses.replace(FREE, held="pid 7 has it open"), "pid 7"),
        (dataclasses.replace(FREE, doubt="the API server is silent"), "silent"),
        (dataclasses.replace(FREE, broken=""), "not broken"),
        (dataclasses.replace(FREE, free_since=None), "60s"),
        (dataclasses.replace(FREE, free_since=NOW - 59), "60s"),
        (Sight(mapped=False), "not mapped"),
    ],
)
def test_anything_else_is_left_alone(sight: Sight, why: str) -> None:
    decision = _decide(sight)
    assert decision.step is None
    assert why in decision.why


def test_limits_count_attempts_that_were_begun() -> None:
    def step(*attempts: tuple[str, float]) -> Step | None:
        return repair.decide(
            CASE, FREE, constants.made(RepairSettings, per_hour=3, per_volume=2), NOW, attempts
        ).step

    other, long_ago = ("rbd/b", NOW - 10), ("rbd/a", NOW - repair.DAY - 1)
    assert step(other, other, long_ago, long_ago) is Step.UNMAP
    assert step(other, other, other) is None
    assert step(("rbd/a", NOW - 4000), ("rbd/a", NOW - 5000)) is None


def test_volume_that_comes_back_is_probed_and_the_case_closed() -> None:
    gone = Sight(mapped=False)
    unmapped = dataclasses.replace(CASE, begun={Step.UNMAP: NOW - 10}, done={Step.UNMAP: NOW - 9})
    assert _decide(gone, unmapped).step is None
    assert _decide(dataclasses.replace(gone, again="rbd0: has_fs"), unmapped).step is Step.PROBE
    probed = repair.noted(unmapped, Step.PROBE, "done", NOW)
    assert _decide(gone, probed).step is Step.RELEASE
    late = dataclasses.replace(unmapped, begun={Step.UNMAP: NOW - 901})
    assert _decide(gone, late).step is Step.RELEASE
    assert not repair.noted(probed, Step.RELEASE, "done", NOW).is_open


def _finding(rule: str, **evidence: str) -> Finding:
    return Finding(
        "i", rule, Severity.CRITICAL, "rbd0", f"{rule}!", "a", {"device": "rbd0", **evidence}
    )


def test_only_the_cluster_or_a_line_with_an_unreadable_device_says_broken() -> None:
    blind = GuardView(enforcing=True, unreadable=("rbd0",))
    sees = GuardView(enforcing=True)
    listed = _finding("blocklisted-client")
    assert repair.broken(device(), [listed], sees) == ("blocklisted-client!", "")
    stale = _finding("blocklisted-client", not_looked_at_again="no answer")
    assert repair.broken(device(), [stale], sees) == (
        "", "blocklisted-client could not be looked at again: no answer"
    )  # fmt: skip
    line = _finding("log-rbd-io-error")
    assert repair.broken(device(), [line], blind)[0]
    for found, guard in (([line], sees), ([line], None), ([], blind)):
        assert repair.broken(device(), found, guard) == ("", "")
    other = dataclasses.replace(listed, evidence={"device": "rbd1"})
    assert repair.broken(device(), [other, _finding("leaked-mount")], blind) == ("", "")


def test_finding_about_the_client_before_says_nothing_of_a_new_mapping() -> None:
    """A finding stays for a while after its trouble, and the next mapping gets the same name."""
    listed = _finding("blocklisted-client", entry="10.0.0.5:0/111")
    assert repair.broken(device(), [listed], None)[0]
    anew = device(diskseq=8, client=RbdClient("0", "client12", "10.0.0.5:0/999"))
    assert repair.broken(anew, [listed], None) == ("", "")


def test_mappings_of_the_same_kernel_client_are_named() -> None:
    same = device(name="rbd1", number=(252, 16))
    other = device(name="rbd2", client=RbdClient("2", "client11", "10.0.0.5:0/112"))
    at = dataclasses.replace(INVENTORY, devices=(device(), same, other))
    assert repair.companions(device(), at) == ("rbd1",)
    assert repair.companions(device(client=None), at) == ()
    left_out = dataclasses.replace(INVENTORY, devices=(device(),), related=(same, other))
    assert repair.companions(device(), left_out) == ("rbd1",)  # it keeps the client, too


# --- agents that are killed -----------------------------------------------------------------------


class Node:
    """A node whose agent may be killed after each write and each effect. ``lines``: the journal."""

    def __init__(self, choose: random.Random, policy: RepairSettings) -> None:
        self.choose, self.policy = choose, policy
        self.lines: list[dict[str, Any]] = []
        self.now = NOW
        self.mapped = self.broken = True
        self.tainted = False
        self.unmaps: list[float] = []
        self.again = ""

    def sight(self) -> Sight:
        if not self.mapped:
            return Sight(mapped=False, again=self.again)
        choose = self.choose
        return Sight(
            mapped=True,
            broken="blocklisted" if self.broken else "",
            doubt=choose.choice(["", "", "unknown"]),
            held=choose.choice(["", "", "a pod"]),
            free_since=choose.choice([None, self.now - 100, self.now - 100, self.now]),
        )

    def turn(self) -> None:
        """One round of an agent that remembers only the journal."""
        cases, attempts = repair.recall(json.loads(json.dumps(self.lines)))
        case = cases.get(CASE.id, CASE)
        if case is CASE and not (self.mapped and self.broken):
            return
        sight = self.sight()
        step = repair.decide(case, sight, self.policy, self.now, attempts).step
        if step is None:
            return
        self._write(step, "begun")
        if self.choose.random() < 0.3:
            return  # killed before it was done
        failed = self.choose.random() < 0.2
        if not failed:
            self._do(step, sight)
        if self.choose.random() < 0.3:
            return  # killed before its outcome was written
        self._write(step, "failed" if failed else "done")

    def _write(self, step: Step, outcome: str) -> None:
        self.lines.append(
            {"action": "repair", "step": str(step), "case": CASE.id, "volume": CASE.volume,
             "device": CASE.device, "time": self.now, "outcome": outcome}
        )  # fmt: skip

    def _do(self, step: Step, sight: Sight) -> None:
        if step is Step.UNMAP:
            assert sight.mapped and sight.broken and not sight.doubt and not sight.held
            assert sight.free_since is not None
            assert self.now - sight.free_since >= self.policy.settle
            assert self.tainted or not self.policy.taint
            assert [line["step"] for line in self.lines if line["outcome"] == "begun"][
                -1
            ] == "unmap"
            self.unmaps.append(self.now)
            self.mapped = False
        elif step is Step.TAINT:
            self.tainted = True
        elif step is Step.RELEASE:
            assert not (self.mapped and self.broken)
            self.tainted = False


_policies = st.builds(
    _policy, settle=st.sampled_from([0.0, 60.0]), per_hour=st.integers(1, 3),
    per_volume=st.integers(1, 3), follow=st.sampled_from([10.0, 900.0]), taint=st.booleans(),
)  # fmt: skip


@settings(max_examples=examples.number(150))
@given(st.randoms(use_true_random=False), _policies)
def test_killed_agents_unmap_only_what_is_free_and_end_at_rest(
    choose: random.Random, policy: RepairSettings
) -> None:
    node = Node(choose, policy)
    for _ in range(40):
        node.turn()
        node.now += choose.choice([1.0, 120.0, 4000.0])
        if choose.random() < 0.1 and node.mapped:
            node.broken = False
        if not node.mapped and choose.random() < 0.2:
            node.again = "rbd0: has_fs"
    begun = [e["time"] for e in node.lines if (e["step"], e["outcome"]) == ("unmap", "begun")]
    for at in begun:  # kills included
        assert sum(at - repair.HOUR < other <= at for other in begun) <= policy.per_hour
        assert sum(at - repair.DAY < other <= at for other in begun) <= policy.per_volume
    assert len(node.unmaps) <= 1  # one attachment
    node.broken = node.broken and node.mapped  # whatever was left is over now
    choose.random = lambda: 0.99  # type: ignore[method-assign]  # and nobody is killed any more
    choose.choice = lambda seq: seq[0]  # type: ignore[method-assign]
    if not (node.mapped and node.broken):
        for _ in range(6):
            node.now += 1000.0
            node.turn()
        assert not node.tainted
        assert repair.recall(node.lines)[0] == {}


def test_damaged_lines_and_other_actions_are_left_out() -> None:
    good = {"action": "repair", "step": "unmap", "case": "c", "volume": "v", "device": "d",
            "time": 1.0, "outcome": "begun"}  # fmt: skip
    lines: list[dict[str, Any]] = [
        {}, {"action": "detach-leaked"}, {**good, "step": "format"}, {**good, "time": "x"},
        {**good, "dry_run": True}, good,
    ]  # fmt: skip
    cases, attempts = repair.recall(lines)
    assert list(cases) == ["c"]
    assert attempts == [("v", 1.0)]
