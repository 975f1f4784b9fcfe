"""What to look at next. Pure: an inventory and a memory in, a wish out.

The quick look (sysfs and the host's mounts, 2 ms) comes after every change. Namespaces are visited
when something does not add up, or when it is time; open files are looked for only where a device
is held and no mount explains it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from volumes.audit.settings import AuditSettings
from volumes.inventory.model import Device, Inventory, Number
from volumes.rules import busy_mount, leaked_mount, mapped_unmounted, unmap_failing
from volumes.rules.base import Scene

# A staged volume is between staging and publishing for moments.
BUSY_AFTER_SECONDS = 1.0
ASK_AGAIN_SECONDS = (2.0, 60.0)  # first and longest wait between two looks for open files
JOIN_SHARE = 0.1  # of the first wait
# While a finding about holders stands: the end of a process is no event. First and later wait.
RECHECK_SECONDS = (5.0, 30.0)
RECHECK_SLOWER_AFTER_SECONDS = 60.0
# After a look that failed: a wish that was not fulfilled is wished for again.
RETRY_SECONDS = 5.0
RECHECKED = ("leaked-mount", "busy-mount", "unmap-failing")

Key = tuple[str, Number, int]


def key(device: Device) -> Key:
    """A device until it is detached."""
    return device.name, device.number, device.diskseq


@dataclass(frozen=True)
class Suspect:
    since: float
    first: float  # when its users are asked for the first time
    asked: float | None = None
    wait: float = ASK_AGAIN_SECONDS[0]


@dataclass(frozen=True)
class Memory:
    """Between two looks. Bounded by the number of devices.

    Invariant: ``deep_at`` and a suspect's ``asked`` tell of looks that were done, never of wishes.
    """

    deep_at: float = 0.0  # Unix time at which the last visit to the namespaces began
    changed_at: float = 0.0  # when mounts came or went last
    suspects: Mapping[Key, Suspect] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Mounts came or went since the last visit to the namespaces."""
        return self.changed_at > self.deep_at


@dataclass(frozen=True)
class Wish:
    deep: bool
    users_of: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.deep or bool(self.users_of)


QUICK = Wish(deep=False, users_of=())


def merged(new: Inventory, before: Inventory | None) -> Inventory:
    """``new`` with what an earlier look saw and this one did not look for."""
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
            # Whether there is a kubelet that must have a directory, only its process tells.
            no_records=before.no_records if new.kubelet is None else "",
            host_spaces=before.host_spaces if len(before.host_spaces) > 1 else new.host_spaces,
        )
    known = {key(device): device.numbers for device in before.devices}
    same = [d.numbers & known[key(d)] for d in new.devices if key(d) in known]
    numbers = frozenset[Number]().union(*same) - set(new.users_of)
    kept = tuple(user for user in before.users if user.device in numbers)
    asked = tuple(number for number in before.users_of if number in numbers)
    return dataclasses.replace(new, users=new.users + kept, users_of=new.users_of + asked)


def _questionable(scene: Scene, inventory: Inventory) -> dict[Key, float]:
    """Devices whose users matter -> how long they must have been so."""
    found: dict[Key, float] = {}
    for device in inventory.devices:
        if leaked_mount.is_leaked(inventory, device) and not leaked_mount.copies(inventory, device):
            found[key(device)] = 0.0
        elif mapped_unmounted.is_idle(inventory, device):
            found[key(device)] = 60.0
    for device in busy_mount.suspects(scene, inventory):
        found[key(device)] = BUSY_AFTER_SECONDS
    for failing, _ in unmap_failing.failing(scene, inventory):
        if failing is not None:
            found[key(failing)] = 0.0
    return found


def _due(suspects: Mapping[Key, Suspect], now: float) -> tuple[Key, ...]:
    """Whose users are asked for now. One visit to all processes answers for many devices: those
    that have nearly waited long enough come along."""

    def is_due(suspect: Suspect, ahead: float) -> bool:
        if suspect.asked is None:
            waited = suspect.first - suspect.since
            return now >= suspect.first - waited * ahead
        return now - suspect.asked >= suspect.wait

    if not any(is_due(suspect, 0.0) for suspect in suspects.values()):
        return ()
    return tuple(each for each, suspect in suspects.items() if is_due(suspect, JOIN_SHARE))


def _asked(suspect: Suspect, now: float) -> Suspect:
    shortest, longest = ASK_AGAIN_SECONDS
    wait = shortest if suspect.asked is None else min(suspect.wait * 2, longest)
    return dataclasses.replace(suspect, asked=now, wait=wait)


def consider(
    scene: Scene,
    inventory: Inventory,
    memory: Memory,
    settings: AuditSettings,
    *,
    fresh: bool,
    unconfirmed: bool = False,
) -> tuple[Wish, Memory]:
    """What else to look at now. ``fresh``: this inventory's namespaces were just visited;
    ``unconfirmed``: a trouble has lasted, but only one visit to the namespaces saw it.

    The memory knows the suspects; what is wished for counts only when it was done (``fulfilled``).
    """
    now = scene.now
    interval = settings.busy_interval if memory.changed else settings.interval
    leaked = any(leaked_mount.is_leaked(inventory, device) for device in inventory.devices)
    deep = not fresh and (leaked or unconfirmed or now - memory.deep_at >= interval)
    questionable = _questionable(scene, inventory)
    suspects: dict[Key, Suspect] = {}
    for each, after in questionable.items():
        known = memory.suspects.get(each)
        since = known.since if known is not None else now
        suspects[each] = dataclasses.replace(known or Suspect(since, 0.0), first=since + after)
    # Users are asked for when the namespaces did not explain the device.
    due = () if deep else _due(suspects, now)
    memory = dataclasses.replace(memory, suspects=suspects)
    return Wish(deep, tuple(name for name, _, _ in due)), memory


def fulfilled(memory: Memory, wish: Wish, began: float) -> Memory:
    """The memory after ``wish`` was looked at with success; the look began at ``began``."""
    suspects = {
        each: _asked(suspect, began) if each[0] in wish.users_of else suspect
        for each, suspect in memory.suspects.items()
    }
    deep_at = began if wish.deep else memory.deep_at
    return dataclasses.replace(memory, suspects=suspects, deep_at=deep_at)


def next_look(
    memory: Memory,
    settings: AuditSettings,
    now: float,
    pending: float | None,
    raised: float | None,
    *,
    blind: bool = False,
) -> float:
    """Seconds to wait when nothing happens. ``raised``: age of the youngest of RECHECKED;
    ``blind``: the last look failed, whatever it was for."""
    if blind:
        return max(settings.settle, RETRY_SECONDS)
    interval = settings.busy_interval if memory.changed else settings.interval
    waits = [max(0.0, memory.deep_at + interval - now)]
    if pending is not None:
        waits.append(pending)
    if raised is not None:
        waits.append(RECHECK_SECONDS[raised > RECHECK_SLOWER_AFTER_SECONDS])
    waits += [s.first - now for s in memory.suspects.values() if s.asked is None]
    return max(settings.settle, min(waits))
