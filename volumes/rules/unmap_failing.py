"""unmap-failing: the log says that a device cannot be unmapped; who is in the way."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Device, Inventory
from volumes.rules import busy_mount, leaked_mount
from volumes.rules.base import LogHit, Rule, Scene, Trouble, needs_inventory

# kubelet tries again after two minutes at the latest: a line without a name that is older is over.
NAMELESS_SECONDS = 150.0


def device_of(inventory: Inventory, hit: LogHit) -> Device | None:
    """By name, by image, or the only one that can be meant."""
    for device in inventory.devices:
        spec = device.image.spec if device.image else ""
        if device.name == hit.device or (hit.image and hit.image == spec):
            return device
    if hit.device or hit.image:
        return None
    leaked = [d for d in inventory.devices if leaked_mount.is_leaked(inventory, d)]
    return leaked[0] if len(leaked) == 1 else None


def failing(scene: Scene, inventory: Inventory) -> list[tuple[Device | None, LogHit]]:
    """What still fails: not where a pod has the device again, nor what has not failed lately."""
    found = [(device_of(inventory, h), h) for h in scene.logs if h.hint == "unmap-failed"]
    return [
        (device, hit)
        for device, hit in found
        if (device is None or not busy_mount.is_published(inventory, device))
        and (hit.device or hit.image or scene.now - hit.last < NAMELESS_SECONDS)
    ]


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    seen = set()
    for device, hit in failing(scene, inventory):
        subject = device.name if device else hit.image or hit.device or "unknown device"
        if subject in seen or (device is None and (hit.device or hit.image)):
            continue  # said already, or unmapped meanwhile
        seen.add(subject)
        holders = []
        if device is not None:
            holders = [leaked_mount.who(space) for space, _ in inventory.elsewhere(device)]
            holders += [user.owner.label for user in inventory.users_on(device)]
            holders += [f"{holder} on top of it" for holder in device.holders]
        yield Trouble(
            subject=subject,
            device=device.name if device else "",
            message=f"unmapping {device.label if device else subject} fails: {hit.text[:200]}",
            advice="in the way: " + "; ".join(holders[:5])
            if holders
            else "no holder is visible: see 'nodeagent volume show', and whether a process hangs "
            "in D state; never force the unmap of a device that somebody writes to",
            evidence={"log": hit.text[:500], "source": hit.source, "times": str(hit.count)},
        )


RULE = Rule(
    name="unmap-failing",
    summary="a device cannot be unmapped",
    severity=Severity.WARNING,
    patience=0.0,
    judge=needs_inventory(_judge),
)
