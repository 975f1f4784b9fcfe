"""mapped-unmounted: a mapping that nothing on the node uses."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Device, Inventory
from volumes.rules.base import Rule, Scene, Trouble, needs_records


def is_idle(inventory: Inventory, device: Device) -> bool:
    """No mount anywhere, no live file system, nothing stacked on it, no raw block use."""
    return not (
        inventory.on_host(device)
        or inventory.elsewhere(device)
        or device.active
        or device.holders
        or device.raw
    )


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    if inventory.no_records:
        return  # 'no record of it' would be a reason to unmap what a pod waits for
    for device in inventory.devices:
        if not is_idle(inventory, device):
            continue
        users = inventory.users_on(device)
        if users:
            continue  # a raw user, mkfs, fsck: not idle; unmap-failing names it if it is in the way
        volume = inventory.volume_of(device)
        record = f"kubelet still has {volume.staging}" if volume else "kubelet has no record of it"
        yield Trouble(
            subject=device.name,
            device=device.name,
            key=f"{device.diskseq}",
            message=f"{device.label} is mapped, but mounted and used nowhere ({record})",
            advice=(
                "kubelet unmaps it when the volume's pod is gone; see its log for the volume"
                if volume
                else "no pod will ask for it again: unmap it "
                f"('rbd unmap /dev/{device.name}', or the action unmap-orphan). A mapping left "
                "behind is reused silently by the next attach of the image"
            ),
            evidence={
                "driver": device.driver,
                "size": str(device.size),
                "backing": device.backing,
                "record": record,
                "deep": str(inventory.deep).lower(),
            },
        )


RULE = Rule(
    name="mapped-unmounted",
    summary="a device stays mapped although nothing uses it",
    severity=Severity.WARNING,
    patience=300.0,
    judge=needs_records(_judge),
)
