"""What could be done about what stands, and what must not be. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kit.findings import Finding
from volumes.inventory.model import Device, Inventory
from volumes.rules import leaked_mount, mapped_unmounted
from volumes.rules.base import GuardView

DETACH, UNMAP, READ_ONLY, TAINT = "detach-leaked", "unmap-orphan", "set-readonly", "taint"


@dataclass(frozen=True)
class Plan:
    """One step. ``refusal``: why it must not be done; then nothing else holds."""

    action: str
    finding: str  # id
    device: str
    what: str  # for people
    arguments: Mapping[str, object] = field(default_factory=dict)
    refusal: str = ""


def plans(
    found: list[Finding],
    inventory: Inventory,
    guard: GuardView | None,
    former: Mapping[str, frozenset[str]],
    orphan_after: float,
) -> list[Plan]:
    """Every step that the standing findings call for. ``former``: where the host had a device."""
    steps = []
    for finding in found:
        device = inventory.device(finding.evidence.get("device", ""))
        if device is None:
            continue
        if finding.rule == leaked_mount.RULE.name and finding.evidence.get("kind") == "mount":
            steps.append(_detach(finding, device, inventory, former.get(device.name, frozenset())))
        elif finding.rule == mapped_unmounted.RULE.name:
            steps.append(_unmap(finding, device, inventory, orphan_after))
    for name in guard.unreadable if guard else ():
        device = inventory.device(name)
        if device is not None:
            steps.append(_read_only(device, inventory))
    return steps


def _detach(finding: Finding, device: Device, inventory: Inventory, former: frozenset[str]) -> Plan:
    inode = finding.evidence.get("namespace", "")
    space = next((s for s in inventory.spaces if str(s.inode) == inode), None)
    every = [p for p in space.places if p.device in device.numbers] if space else []
    at_home = leaked_mount.on_host(inventory, device)
    places = [place for place in every if place.device not in at_home]
    targets = sorted({place.target for place in places})
    what = f"unmount {', '.join(targets)} ({device.name}) in mount namespace {inode}"
    refusal = ""
    if space is None or not every:
        refusal = "it is no longer mounted there"
    elif not places:
        refusal = "the host has it mounted again"
    elif inventory.kubelet is None:
        refusal = "kubelet's directory is not seen, so nobody can say whose volume it is"
    else:
        refusal = leaked_mount.why_not_detach(inventory, device, space, places, former)
    owner = space.owners[0] if space and space.owners else None
    way = ""
    if owner is not None:
        task = f"/task/{owner.thread}" if owner.thread else ""
        way = f"/proc/{owner.pid}{task}/ns/mnt"
    arguments: dict[str, object] = {
        "way": way,
        "namespace_id": space.id if space else 0,
        "inode": space.inode if space else 0,
        # By the numbers of the mounts: a file system on a layer does not have the device's.
        "copies": [[*place.device, place.target] for place in places],
    }
    return Plan(DETACH, finding.id, device.name, what, arguments, refusal)


def _unmap(finding: Finding, device: Device, inventory: Inventory, orphan_after: float) -> Plan:
    refusal = ""
    age = inventory.taken - finding.since
    if not mapped_unmounted.is_idle(inventory, device):
        refusal = "it is in use again"
    elif inventory.kubelet is None:
        refusal = "kubelet's directory is not seen, so nobody can say that it has no record of it"
    elif volume := inventory.volume_of(device):
        refusal = f"kubelet still has a record of it ({volume.staging})"
    elif not inventory.deep or device.number not in inventory.users_of:
        refusal = "its users have not been looked for yet"
    elif users := inventory.users_on(device):
        refusal = f"{users[0].owner.label} has it open"
    elif age < orphan_after:
        refusal = f"it is idle for {age:.0f}s only, less than orphan_after"
    return Plan(
        UNMAP,
        finding.id,
        device.name,
        f"unmap {device.label}",
        {
            "name": device.name,
            "driver": device.driver,
            "device": list(device.number),
            "diskseq": device.diskseq,
            "mapping": device.client.mapping_id if device.client else "",
        },
        refusal,
    )


def _read_only(device: Device, inventory: Inventory) -> Plan:
    refusal = ""
    if device.read_only:
        refusal = "it is read-only already"
    elif inventory.on_host(device) or inventory.elsewhere(device) or device.active:
        refusal = "it is mounted: a flag would turn its writes into errors"
    elif device.raw or device.holders:
        above = (*device.raw, *device.holders)[0]
        refusal = f"it is in use by {above}: a flag would turn its writes into errors"
    return Plan(
        READ_ONLY,
        f"set-readonly/{device.name}",
        device.name,
        f"flag {device.label} read-only",
        {
            "path": f"/dev/{device.name}",
            "device": list(device.number),
            "diskseq": device.diskseq,
        },
        refusal,
    )
