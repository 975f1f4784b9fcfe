"""Repair of a broken mapping: what is seen, what the journal says, and the next step. All pure.

A mapping whose client is blocklisted, or whose session is broken, never heals: its reads fail, and
the next attach of the image silently reuses it, so that a full volume looks empty. What heals is a
new mapping, by whoever needs one: kubelet and ceph-csi map at the next stage, with credentials that
this agent does not have. So the steps are

    taint (where configured), wait until nothing holds it, unmap, probe the next one, release

Invariants, in whatever order agents are killed:
* only UNMAP changes the node's volumes, and it is decided only in a sight of this moment: the same
  attachment, certainly broken, certainly held by nothing, claimed by nothing. What is not known is
  a doubt, and a doubt ends the turn.
* nothing is formatted, mounted, mapped or forced here: there are no such steps.
* each step is in the journal as ``begun`` before it is done, so the limits count also the attempts
  of agents that were killed; a step that was begun and has no outcome is decided on anew by what is
  seen, never taken for done.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kit.findings import Finding
from linux import blockdev
from volumes.audit.inventory.model import Inventory
from volumes.audit.rules import mappings
from volumes.audit.types import GuardView
from volumes.settings import RepairSettings

ACTION = "repair"
CERTAIN = frozenset({"blocklisted-client"})  # rules whose finding alone says "broken"
# A line of a log alone may be about what has passed; with a device that two looks could not read
# it is about now.
SUSPECTED = frozenset({"log-rbd-watch-lost", "log-rbd-io-error", "log-nbd-timeout"})
HOUR, DAY = 3600.0, 86400.0
MOST_CASES = 256
NOT_SEARCHED = "its users were not searched yet"


class Step(StrEnum):
    TAINT = "taint"  # no new pods on this node
    UNMAP = "unmap"
    PROBE = "probe"  # look at the volume when it is mapped again
    RELEASE = "release"  # take the taint away; the case is closed


@dataclass(frozen=True)
class Case:
    """One broken attachment, as the journal tells it. Times are Unix seconds."""

    id: str
    volume: str
    device: str
    begun: Mapping[Step, float] = field(default_factory=dict)  # the last time of each
    done: Mapping[Step, float] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return bool(self.begun) and Step.RELEASE not in self.done


@dataclass(frozen=True)
class Sight:
    """What is seen of one case now.

    ``mapped``: the attachment is there. ``broken``: why it is; empty when it is not, or nobody can
    say. ``doubt``: what is not known. ``held``: what holds or claims it. ``free_since``: since when
    nothing does (Unix seconds). ``again``: what a probe of the volume's next mapping said.
    """

    mapped: bool
    broken: str = ""
    doubt: str = ""
    held: str = ""
    free_since: float | None = None
    again: str = ""


@dataclass(frozen=True)
class Decision:
    """``step`` None: nothing is done now, and ``why``."""

    step: Step | None
    why: str


def decide(
    case: Case,
    sight: Sight,
    wanted: RepairSettings,
    now: float,
    attempts: Iterable[tuple[str, float]],
) -> Decision:
    """The next step. ``attempts``: volume and time of every unmap that was begun on this node."""
    if not sight.mapped:
        return _after(case, sight, wanted, now)
    if sight.doubt:
        return Decision(None, sight.doubt)
    if not sight.broken:
        if case.is_open:
            return Decision(Step.RELEASE, "the mapping is not broken any more")
        return Decision(None, "it is not broken")
    if wanted.taint and Step.TAINT not in case.done:
        return Decision(Step.TAINT, sight.broken)
    if sight.held:
        return Decision(None, f"it waits: {sight.held}")
    if sight.free_since is None or now - sight.free_since < wanted.settle:
        return Decision(None, f"it waits: nothing must hold it for {wanted.settle:g}s")
    past = list(attempts)
    if sum(now - at < HOUR for _, at in past) >= wanted.per_hour:
        return Decision(None, f"{wanted.per_hour} mappings of this node in this hour already")
    if sum(now - at < DAY for volume, at in past if volume == case.volume) >= wanted.per_volume:
        return Decision(
            None,
            f"{wanted.per_volume} attempts for this volume in a day: see why they did not help",
        )
    return Decision(Step.UNMAP, f"{sight.broken}; nothing holds it")


def _after(case: Case, sight: Sight, wanted: RepairSettings, now: float) -> Decision:
    """The attachment is gone, by us or by somebody else."""
    if not case.is_open:
        return Decision(None, "it is not mapped any more")
    if Step.UNMAP in case.begun and Step.PROBE not in case.done:
        if sight.again:
            return Decision(Step.PROBE, sight.again)
        if now - case.begun[Step.UNMAP] < wanted.follow:
            return Decision(None, "it waits for the volume to be mapped again")
        return Decision(Step.RELEASE, "the volume was not mapped here again")
    return Decision(Step.RELEASE, "the broken mapping is gone")


# --- the journal


def noted(case: Case, step: Step, outcome: str, now: float) -> Case:
    """After a line of the journal about it. Only ``done`` is done."""
    case = replace(case, begun={**case.begun, step: now}) if outcome == "begun" else case
    return replace(case, done={**case.done, step: now}) if outcome == "done" else case


def recall(
    entries: Iterable[Mapping[str, Any]],
) -> tuple[dict[str, Case], list[tuple[str, float]]]:
    """Cases and unmaps that were begun, from the journal. Lines of anything else are left out, and
    so are dry runs: they changed nothing."""
    cases: dict[str, Case] = {}
    attempts: list[tuple[str, float]] = []
    for entry in entries:
        try:
            if entry["action"] != ACTION or entry.get("dry_run"):
                continue
            step, at, id = Step(entry["step"]), float(entry["time"]), str(entry["case"])
            known = cases.get(id)
            if known is None or Step.RELEASE in known.done:
                known = Case(id, str(entry["volume"]), str(entry["device"]))
            cases[id] = noted(known, step, str(entry["outcome"]), at)
            if step is Step.UNMAP and entry["outcome"] == "begun":
                attempts.append((known.volume, at))
        except (LookupError, TypeError, ValueError):
            continue
    return {id: case for id, case in cases.items() if case.is_open}, attempts


# --- what is seen


def volume_of(device: blockdev.BlockDevice) -> str:
    """What stays the same when the volume is mapped again."""
    return device.image.spec if device.image is not None else device.volume or device.name


def case_of(device: blockdev.BlockDevice) -> Case:
    volume = volume_of(device)
    return Case(f"{volume}#{device.name}#{device.diskseq}", volume, device.name)


def broken(
    device: blockdev.BlockDevice, found: Iterable[Finding], guard: GuardView | None
) -> tuple[str, str]:
    """Why the mapping is certainly broken, and what is not known. A finding that nobody could look
    at again says nothing of this moment, and one about an earlier mapping's client nothing of this
    mapping."""
    unreadable = guard is not None and device.name in guard.unreadable
    doubt = ""
    for each in found:
        if each.evidence.get("device") != device.name:
            continue
        entry, client = each.evidence.get("entry"), device.client
        if entry and client and client.address and not mappings.is_listed(client.address, entry):
            continue  # of the mapping that had the name before: findings outlast their trouble
        if each.rule in CERTAIN or (unreadable and each.rule in SUSPECTED):
            if stale := each.evidence.get("not_looked_at_again"):
                doubt = f"{each.rule} could not be looked at again: {stale}"
            else:
                return each.message, ""
    return "", doubt


def why_held(inventory: Inventory, device: blockdev.BlockDevice) -> str:
    """What holds the mapping, or may hold it; empty only when it is certain that nothing does."""
    if not mappings.is_idle(inventory, device):
        return "it is in use again"
    if inventory.kubelet is None:
        return "kubelet's directory is not visible, so nobody can tell that it has no record"
    if volume := inventory.volume_of(device):
        return f"kubelet still has a record of it ({volume.staging})"
    if not inventory.deep or device.number not in inventory.users_of:
        return NOT_SEARCHED
    if users := inventory.users_on(device):
        return f"{users[0].owner.label} has it open"
    return ""


def companions(device: blockdev.BlockDevice, inventory: Inventory) -> tuple[str, ...]:
    """Other mappings of the same kernel client. krbd shares one between all mappings with the same
    options (rbd_client_find in drivers/block/rbd.c), so a new mapping gets the blocklisted client
    again until all of them are unmapped."""
    if device.client is None or not device.client.client:
        return ()
    return tuple(
        each.name
        for each in (*inventory.devices, *inventory.related)
        if each.client and each.client.client == device.client.client and each.name != device.name
    )
