"""Which actions the current findings call for, and what forbids each. Pure.

An action is planned again immediately before it is carried out, on a new scan (see runner).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kit.findings import Finding
from linux import blockdev
from volumes.audit.inventory.model import Inventory
from volumes.audit.rules import mappings, mounting
from volumes.audit.types import GuardView

DETACH, UNMAP, READ_ONLY = "detach-leaked", "unmap-orphan", "set-readonly"


@dataclass(frozen=True)
class Plan:
    """One action. ``refusal`` says why it must not be carried out; empty when it may."""

    action: str
    finding: str  # id
    device: str
    what: str  # for people
    arguments: tuple[object, ...] = ()  # of the action's function in executors
    refusal: str = ""


def plans(
    found: list[Finding],
    inventory: Inventory,
    guard: GuardView | None,
    former: Mapping[str, frozenset[str]],
    orphan_after: float,
) -> list[Plan]:
    """Every action for the findings. ``former``: where the host had each device mounted."""
    steps = []
    for finding in found:
        device = inventory.device(finding.evidence.get("device", ""))
        if device is None:
            continue
        if finding.rule == mounting.LEAKED_MOUNT and finding.evidence.get("kind") == "mount":
            steps.append(_detach(finding, device, inventory, former.get(device.name, frozenset())))
        elif finding.rule == mappings.MAPPED_UNMOUNTED:
            steps.append(_unmap(finding, device, inventory, orphan_after))
    for name in guard.unreadable if guard else ():
        device = inventory.device(name)
        if device is not None:
            steps.append(_read_only(device, inventory))
    return steps


def _detach(
    finding: Finding, device: blockdev.BlockDevice, inventory: Inventory, former: frozenset[str]
) -> Plan:
    inode = finding.evidence.get("namespace", "")
    space = next((s for s in inventory.spaces if str(s.inode) == inode), None)
    every = [p for p in space.places if p.device in device.numbers] if space else []
    at_home = mounting.on_host(inventory, device)
    places = [place for place in every if place.device not in at_home]
    if space is None or not every:
        refusal = "it is no longer mounted there"
    elif not places:
        refusal = "the host has it mounted again"
    elif inventory.kubelet is None:
        refusal = "kubelet's directory is not visible, so nobody can tell whose volume it is"
    else:
        refusal = mounting.why_not_detach(inventory, device, space, places, former)
    owner = space.owner if space else None
    way = ""
    if owner is not None:
        task = f"/task/{owner.thread}" if owner.thread else ""
        way = f"/proc/{owner.pid}{task}/ns/mnt"
    targets = sorted({place.target for place in places})
    return Plan(
        DETACH,
        finding.id,
        device.name,
        f"unmount {', '.join(targets)} ({device.name}) in mount namespace {inode}",
        (
            way,
            space.id if space else 0,
            space.inode if space else 0,
            # The mounts' own numbers: a file system on a layer does not have the device's.
            [[*place.device, place.target] for place in places],
        ),
        refusal,
    )


def _unmap(
    finding: Finding, device: blockdev.BlockDevice, inventory: Inventory, orphan_after: float
) -> Plan:
    age = inventory.taken - finding.since
    refusal = ""
    if not mappings.is_idle(inventory, device):
        refusal = "it is in use again"
    elif inventory.kubelet is None:
        refusal = "kubelet's directory is not visible, so nobody can tell that it has no record"
    elif volume := inventory.volume_of(device):
        refusal = f"kubelet still has a record of it ({volume.staging})"
    elif not inventory.deep or device.number not in inventory.users_of:
        refusal = "its users were not searched yet"
    elif users := inventory.users_on(device):
        refusal = f"{users[0].owner.label} has it open"
    elif age < orphan_after:
        refusal = f"it has been idle for {age:.0f}s only, less than orphan_after"
    return Plan(
        UNMAP,
        finding.id,
        device.name,
        f"unmap {device.label}",
        (
            device.name,
            device.driver,
            list(device.number),
            device.diskseq,
            device.client.mapping_id if device.client else "",
        ),
        refusal,
    )


def _read_only(device: blockdev.BlockDevice, inventory: Inventory) -> Plan:
    refusal = ""
    if device.read_only:
        refusal = "it is read-only already"
    elif inventory.on_host(device) or inventory.elsewhere(device) or device.active:
        refusal = "it is mounted: the flag would make its writes fail"
    elif inventory.raw.get(device.name) or device.stacked:
        above = (*inventory.raw.get(device.name, ()), *device.stacked)[0]
        refusal = f"{above} uses it: the flag would make its writes fail"
    return Plan(
        READ_ONLY,
        f"{READ_ONLY}/{device.name}",
        device.name,
        f"flag {device.label} read-only",
        (f"/dev/{device.name}", list(device.number), device.diskseq),
        refusal,
    )
