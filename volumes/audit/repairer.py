"""Carries out the steps that ``repair`` decides: in the journal first, then on the node.

Called after each round of the audit, so on every change of mounts and devices and else at
intervals. Before an unmap it scans once more, users included, and decides once more.
"""

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import kit.child
import kit.errors
from kit.findings import Finding
from linux import blockdev
from volumes.audit import actions, executors, repair
from volumes.audit.inventory import scan
from volumes.audit.inventory.model import Inventory
from volumes.audit.repair import Case, Decision, Sight, Step
from volumes.audit.rules.mounting import forgotten
from volumes.audit.types import GuardView
from volumes.ledger.witness import Witness
from volumes.settings import RepairSettings

_SAY_AGAIN_SECONDS = 3600.0  # a dry run is not journalled again sooner
_RETRY_SECONDS = 60.0  # least time between two attempts of a step that failed
ASK_SECONDS = 60.0  # between two questions about one volume that kubelet forgot
_MOST_ASKED = 4  # of them in one round
_PROBED = ("has_fs", "partitioned", "encrypted", "blank_verified")  # verdicts that are an answer


@dataclass(frozen=True)
class Look:
    """What one round saw."""

    inventory: Inventory
    found: Sequence[Finding]
    guard: GuardView | None


class Repairer:
    """``witness``: says what claims a volume for this node, and taints the node."""

    def __init__(
        self, wanted: RepairSettings, written: actions.ActionJournal, witness: Witness
    ) -> None:
        self.settings = wanted
        self.counts: dict[tuple[str, str], int] = {}  # (step, outcome)
        self.shown: dict[str, dict[str, Any]] = {}  # by device: the case for operators
        self._journal = written
        self._witness = witness
        self._cases: dict[str, Case] = {}
        self._attempts: list[tuple[str, float]] = []
        self._free: dict[str, float] = {}  # case -> since when nothing holds it
        self._said: dict[tuple[str, Step], float] = {}
        self._not_before: dict[tuple[str, Step], float] = {}
        self._recalled = False
        self.detached: frozenset[str] = frozenset()  # see Scene
        # By handle: when the cluster was asked, and whether it has the volume attached here. None:
        # it was never seen attached.
        self._attached: dict[str, tuple[float, bool | None]] = {}

    def users_of(self, look: Look) -> tuple[str, ...]:
        """Broken devices, whose users the next scan must search."""
        devices = look.inventory.devices
        return tuple(d.name for d in devices if repair.broken(d, look.found, look.guard)[0])

    async def work(self, look: Look, afresh: Callable[[], Awaitable[Look | None]]) -> float | None:
        """One step of each case at most. Seconds until the next round is wanted; None: the audit's
        schedule is soon enough. ``afresh``: a look of this moment with the users of all broken
        devices; None when the node cannot be scanned."""
        if not self._recalled:
            entries = await self._journal.recall()
            if entries is None:
                return None  # without them an interrupted repair is not recognised
            self._cases, self._attempts = repair.recall(entries)
            self._recalled = True
        look = _about_broken(look)
        if not look.found and not self._cases:
            self.shown = {}
            return None
        attachments = {repair.case_of(device).id: device for device in look.inventory.devices}
        self._free = {id: at for id, at in self._free.items() if id in attachments}
        pauses: list[float | None] = []
        shown: dict[str, dict[str, Any]] = {}
        for case in list(self._concerned(look, attachments)):
            device = attachments.get(case.id)
            decision, sight = await self._decide(case, device, look)
            unsearched = sight.held == repair.NOT_SEARCHED
            if self.settings.mode != "off" and (decision.step is Step.UNMAP or unsearched):
                fresh = await afresh()
                if fresh is None:
                    continue
                fresh = _about_broken(fresh)
                devices = {repair.case_of(each).id: each for each in fresh.inventory.devices}
                device = devices.get(case.id)
                decision, sight = await self._decide(case, device, fresh)
            shown[case.device] = self._shown(case, device, decision, look.inventory)
            if decision.step is not None and self._mode(case, decision.step) != "off":
                pauses.append(await self._carry_out(case, device, decision))
            elif sight.free_since is not None:
                pauses.append(max(1.0, sight.free_since + self.settings.settle - time.time()))
        self.shown = shown
        return min((each for each in pauses if each is not None), default=None)

    async def ask_attached(self, inventory: Inventory) -> bool:
        """Ask the cluster about the volumes that kubelet seems to have forgotten. Whether
        ``detached`` changed."""
        volumes = {each.handle: each for each in forgotten(inventory)}
        now = time.monotonic()
        # At once, though each volume passes through this state when its last pod ends: the cluster
        # may detach it in a moment.
        known = {handle: self._attached.get(handle, (-math.inf, None)) for handle in volumes}
        due = [handle for handle, (at, _) in known.items() if now - at >= ASK_SECONDS]
        for handle in due[:_MOST_ASKED]:
            before = known[handle][1]
            try:
                there = await self._witness.is_attached(volumes[handle].driver, handle)
            except (kit.errors.AgentError, OSError):
                known[handle] = now, before
                break  # the others would wait as long
            # Some drivers' volumes are never attached: what was not there is not gone.
            known[handle] = now, there if there or before is not None else None
        self._attached = known
        gone = frozenset(handle for handle, (_, there) in known.items() if there is False)
        changed, self.detached = gone != self.detached, gone
        return changed

    def _mode(self, case: Case, step: Step) -> str:
        """What was begun is released in every mode: a taint must not stay."""
        return "on" if step is Step.RELEASE and case.is_open else self.settings.mode

    def _concerned(
        self, look: Look, attachments: Mapping[str, blockdev.BlockDevice]
    ) -> Iterator[Case]:
        """Open cases, and those of devices that look broken."""
        yield from self._cases.values()
        for id, device in attachments.items():
            if id not in self._cases and any(repair.broken(device, look.found, look.guard)):
                yield repair.case_of(device)

    async def _decide(
        self, case: Case, device: blockdev.BlockDevice | None, look: Look
    ) -> tuple[Decision, Sight]:
        now = time.time()
        sight = await self._sight(case, device, look, now)
        self._attempts = [each for each in self._attempts if now - each[1] < repair.DAY]
        return repair.decide(case, sight, self.settings, now, self._attempts), sight

    async def _sight(
        self, case: Case, device: blockdev.BlockDevice | None, look: Look, now: float
    ) -> Sight:
        if device is None:
            return Sight(mapped=False, again=self._again(case, look))
        why, doubt = repair.broken(device, look.found, look.guard)
        if not why:
            return Sight(mapped=True, doubt=doubt)
        held = repair.why_held(look.inventory, device)
        if not held:
            try:
                held = await self._witness.attached_here(device)
            except (kit.errors.AgentError, OSError) as error:
                return Sight(mapped=True, broken=why, doubt=f"who claims it is not known: {error}")
        if held:
            if held != repair.NOT_SEARCHED:  # a quick scan refutes nothing
                self._free.pop(case.id, None)
            return Sight(mapped=True, broken=why, held=held)
        return Sight(mapped=True, broken=why, free_since=self._free.setdefault(case.id, now))

    def _again(self, case: Case, look: Look) -> str:
        """What the guard saw on the volume's next mapping."""
        verdicts = look.guard.verdicts if look.guard else {}
        for device in look.inventory.devices:
            seen = verdicts.get(device.name, "")
            if repair.volume_of(device) == case.volume and seen in _PROBED:
                return f"{device.name}: {seen}"
        return ""

    # --- steps

    async def _carry_out(
        self, case: Case, device: blockdev.BlockDevice | None, decision: Decision
    ) -> float | None:
        """Seconds until the next round is wanted."""
        step = decision.step
        assert step is not None
        now = time.monotonic()
        self._not_before = {k: at for k, at in self._not_before.items() if at > now}
        if (case.id, step) in self._not_before:
            return self._not_before[case.id, step] - now
        entry = {
            "time": time.time(), "action": repair.ACTION, "step": str(step), "case": case.id,
            "volume": case.volume, "device": case.device, "what": f"{step} {case.volume}",
            "by": "audit", "dry_run": self._mode(case, step) != "on",
        }  # fmt: skip
        if entry["dry_run"]:
            await self._say_once(
                case, step, {**entry, "outcome": "dry-run", "detail": decision.why}
            )
            return False
        if not await self._journal.write({**entry, "outcome": "begun", "detail": decision.why}):
            return _RETRY_SECONDS  # what cannot be written down is not done
        case = self._cases[case.id] = repair.noted(case, step, "begun", time.time())
        if step is Step.UNMAP:
            self._attempts.append((case.volume, time.time()))
        try:
            await self._do(step, case, device)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            outcome, detail = "failed", str(error)
        else:
            outcome, detail = "done", decision.why
        await self._journal.write({**entry, "time": time.time(), "outcome": outcome,
                                   "detail": detail})  # fmt: skip
        self._count(step, outcome)
        case = self._cases[case.id] = repair.noted(case, step, outcome, time.time())
        if outcome == "failed":
            self._free.pop(case.id, None)  # and the wait begins anew
            self._not_before[case.id, step] = time.monotonic() + _RETRY_SECONDS
        if not case.is_open or len(self._cases) > repair.MOST_CASES:
            del self._cases[case.id]
        return _RETRY_SECONDS if outcome == "failed" else 0.0

    async def _do(self, step: Step, case: Case, device: blockdev.BlockDevice | None) -> None:
        if step is Step.UNMAP:
            assert device is not None
            nbd = device.driver == "nbd"
            backings, silent = await scan.backings(scan.LOOPS_SECONDS) if nbd else ([], [])
            if silent:
                raise kit.child.DeadlineError(
                    f"loop devices {kit.errors.some(silent, scan.MOST_NAMES)}",
                    "do not say whether they lie on it", "detach those whose server is dead",
                )  # fmt: skip
            await kit.child.call(
                executors.unmap, device.name, device.driver, list(device.number), device.diskseq,
                device.client.mapping_id if device.client else "", backings,
                deadline=executors.DEADLINE_SECONDS,
            )  # fmt: skip
        elif step is Step.TAINT:
            await self._witness.taint(True)
        elif step is Step.RELEASE:
            others = [e for e in self._cases.values() if e.id != case.id and Step.TAINT in e.begun]
            if Step.TAINT in case.begun and not others:
                await self._witness.taint(False)

    async def _say_once(self, case: Case, step: Step, entry: dict[str, Any]) -> None:
        now = time.monotonic()
        self._said = {k: at for k, at in self._said.items() if now - at < _SAY_AGAIN_SECONDS}
        if self._said.setdefault((case.id, step), now) == now:
            self._count(step, "dry-run")
            await self._journal.write(entry)

    def _count(self, step: Step, outcome: str) -> None:
        self.counts[str(step), outcome] = self.counts.get((str(step), outcome), 0) + 1

    def _shown(
        self, case: Case, device: blockdev.BlockDevice | None, decision: Decision,
        inventory: Inventory,
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "device": case.device,
            "volume": case.volume,
            "mode": self.settings.mode,
            "next": str(decision.step or "wait"),
            "why": decision.why,
            "begun": sorted(case.begun),
            "done": sorted(case.done),
            "same_client": list(repair.companions(device, inventory)) if device else [],
        }


def _about_broken(look: Look) -> Look:
    """With the findings that can say "broken" only: usually none of hundreds."""
    rules = repair.CERTAIN | repair.SUSPECTED
    return replace(look, found=[each for each in look.found if each.rule in rules])
