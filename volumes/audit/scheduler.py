"""Chooses the next scan from the last inventory and what was scanned before. Pure.

Scans differ in cost. The quick one (sysfs, the host's mount tables and kubelet's records: 2 ms, and
30 ms with 500 volumes on LUKS) follows every change.
Visiting every mount namespace is done when a device is in use without a host mount, and at
intervals. Open files of all processes are searched only where a device is held and no mount
explains it, and then less and less often.

The service begins with ``first``, asks ``consider`` what else is due, scans that, and repeats until
nothing is due. ``ScanMemory`` is what is kept between scans.
Invariant: ``ScanMemory`` records scans that succeeded (``fulfilled``), never requests.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from linux import blockdev
from volumes.audit.inventory.model import Inventory
from volumes.audit.rules import mappings, mounting
from volumes.audit.types import Scene
from volumes.settings import AuditSettings

# A volume is between staging and publishing for a moment.
_BUSY_AFTER_SECONDS = 1.0
_IDLE_AFTER_SECONDS = 60.0
# First and longest wait between two searches for the open files of one device.
_USERS_AGAIN_SECONDS = (2.0, 60.0)
# A device that has waited for all but this share of its first wait joins a search that is due.
_JOIN_SHARE = 0.1
# While a finding about holders is raised: no event tells that a process ended. First, later wait.
RECHECK_SECONDS = (5.0, 30.0)
_RECHECK_SLOWER_AFTER_SECONDS = 60.0
RECHECKED = ("leaked-mount", "busy-mount", "unmap-failing")
# After a scan that failed.
RETRY_SECONDS = 5.0

Key = tuple[str, blockdev.Number, int | None]


def key(device: blockdev.BlockDevice) -> Key:
    """Identifies a device until it is detached."""
    return device.name, device.number, device.diskseq


@dataclass(frozen=True)
class Suspect:
    """A device whose users matter."""

    since: float
    first: float  # when its users are searched for the first time
    asked: float | None = None
    wait: float = _USERS_AGAIN_SECONDS[0]


@dataclass(frozen=True)
class ScanMemory:
    """What is known between two scans. Bounded by the number of devices."""

    deep_at: float = 0.0  # Unix time at which the last visit to the namespaces began
    changed_at: float = 0.0  # when a mount last came or went
    suspects: Mapping[Key, Suspect] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Mounts came or went since the last visit to the namespaces."""
        return self.changed_at > self.deep_at


@dataclass(frozen=True)
class Depth:
    """What a scan does beyond the quick part: visit namespaces, search users of some devices."""

    deep: bool
    users_of: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.deep or bool(self.users_of)


def first(memory: ScanMemory, settings: AuditSettings, now: float) -> Depth:
    """The scan that a round begins with: quick, unless a visit to the namespaces is due."""
    return Depth(deep=_overdue(memory, settings, now), users_of=())


def merged(new: Inventory, before: Inventory | None) -> Inventory:
    """``new``, completed with what an earlier scan saw and this one did not search for."""
    if before is None:
        return new
    if not new.deep:
        new = dataclasses.replace(
            new,
            spaces=before.spaces,
            spaces_at=before.spaces_at,
            namespaces=before.namespaces,
            deep_gaps=before.deep_gaps,
            space_gaps=before.space_gaps,
            processes=new.processes or before.processes,
            # Only a search of processes can tell that a kubelet runs, which must have a directory.
            no_records=before.no_records if new.kubelet is None else "",
            host_spaces=before.host_spaces if len(before.host_spaces) > 1 else new.host_spaces,
        )
    known = {key(device): device.numbers for device in before.devices}
    same = [d.numbers & known[key(d)] for d in new.devices if key(d) in known]
    numbers = frozenset[blockdev.Number]().union(*same) - set(new.users_of)
    kept = tuple(user for user in before.users if user.device in numbers)
    asked = tuple(number for number in before.users_of if number in numbers)
    return dataclasses.replace(new, users=new.users + kept, users_of=new.users_of + asked)


def consider(
    scene: Scene,
    inventory: Inventory,
    memory: ScanMemory,
    *,
    fresh: bool,
    unconfirmed: bool = False,
) -> tuple[Depth, ScanMemory]:
    """What else must be scanned now, and the memory with today's suspects.

    ``fresh``: the namespaces in this inventory were visited in this round. ``unconfirmed``: a
    trouble has lasted long enough, but only one visit to the namespaces saw it.
    """
    now = scene.now
    leaked = any(mounting.is_leaked(inventory, device) for device in inventory.devices)
    overdue = _overdue(memory, scene.settings, now)
    deep = not fresh and (leaked or unconfirmed or overdue)
    suspects: dict[Key, Suspect] = {}
    for each, after in _suspicious(scene, inventory).items():
        known = memory.suspects.get(each)
        since = known.since if known is not None else now
        suspects[each] = dataclasses.replace(known or Suspect(since, 0.0), first=since + after)
    # Users are searched only when the namespaces do not explain the device.
    due = () if deep else _due(suspects, now)
    return Depth(deep, tuple(name for name, _, _ in due)), dataclasses.replace(
        memory, suspects=suspects
    )


def _overdue(memory: ScanMemory, settings: AuditSettings, now: float) -> bool:
    return now - memory.deep_at >= _interval(memory, settings)


def _interval(memory: ScanMemory, settings: AuditSettings) -> float:
    return settings.busy_interval if memory.changed else settings.interval


def _suspicious(scene: Scene, inventory: Inventory) -> dict[Key, float]:
    """Devices whose users matter -> how many seconds they must have been suspicious."""
    found: dict[Key, float] = {}
    for device in inventory.devices:
        if mounting.is_leaked(inventory, device) and not mounting.copies(inventory, device):
            found[key(device)] = 0.0
        elif mappings.is_idle(inventory, device):
            found[key(device)] = _IDLE_AFTER_SECONDS
    for device in mounting.busy_suspects(scene, inventory):
        found[key(device)] = _BUSY_AFTER_SECONDS
    for failing, _ in mappings.failing_unmaps(scene, inventory):
        if failing is not None:
            found[key(failing)] = 0.0
    return found


def _due(suspects: Mapping[Key, Suspect], now: float) -> tuple[Key, ...]:
    """Suspects whose users are searched now. One search of all processes serves many devices, so
    those that have nearly waited long enough join it."""

    def is_due(suspect: Suspect, ahead: float) -> bool:
        if suspect.asked is None:
            waited = suspect.first - suspect.since
            return now >= suspect.first - waited * ahead
        return now - suspect.asked >= suspect.wait

    if not any(is_due(suspect, 0.0) for suspect in suspects.values()):
        return ()
    return tuple(each for each, suspect in suspects.items() if is_due(suspect, _JOIN_SHARE))


def fulfilled(memory: ScanMemory, depth: Depth, began: float) -> ScanMemory:
    """The memory after a scan of ``depth`` that began at ``began`` succeeded."""
    suspects = {
        each: _asked(suspect, began) if each[0] in depth.users_of else suspect
        for each, suspect in memory.suspects.items()
    }
    deep_at = began if depth.deep else memory.deep_at
    return dataclasses.replace(memory, suspects=suspects, deep_at=deep_at)


def _asked(suspect: Suspect, now: float) -> Suspect:
    shortest, longest = _USERS_AGAIN_SECONDS
    wait = shortest if suspect.asked is None else min(suspect.wait * 2, longest)
    return dataclasses.replace(suspect, asked=now, wait=wait)


def next_round(
    memory: ScanMemory,
    settings: AuditSettings,
    now: float,
    pending: float | None,
    raised: float | None,
    *,
    blind: bool = False,
) -> float:
    """Seconds until the next round when nothing happens.

    ``pending``: until a finding may be raised or cleared. ``raised``: age of the youngest finding
    of RECHECKED. ``blind``: the last scan failed.
    """
    if blind:
        return max(settings.settle, RETRY_SECONDS)
    waits = [max(0.0, memory.deep_at + _interval(memory, settings) - now)]
    if pending is not None:
        waits.append(pending)
    if raised is not None:
        waits.append(RECHECK_SECONDS[raised > _RECHECK_SLOWER_AFTER_SECONDS])
    waits += [s.first - now for s in memory.suspects.values() if s.asked is None]
    return max(settings.settle, min(waits))
