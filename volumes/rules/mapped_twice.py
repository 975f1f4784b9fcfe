"""mapped-twice: two devices of this node are one image, and one of them can write."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Device, Inventory
from volumes.rules.base import Rule, Scene, Trouble, needs_inventory


def _things(device: Device) -> list[str]:
    """What must not be written through two devices; a snapshot never changes."""
    if device.image is not None and device.image.snapshot:
        return []
    image = [f"image {device.image.head}"] if device.image is not None else []
    return image + ([f"file {device.backing_id}"] if device.backing_id else [])


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    groups: dict[str, list[Device]] = {}
    for device in inventory.devices:
        for thing in _things(device):
            groups.setdefault(thing, []).append(device)
    distinct = {tuple(d.name for d in devices): thing for thing, devices in groups.items()}
    for thing in distinct.values():
        devices = groups[thing]
        writers = [device for device in devices if not device.read_only]
        if len(devices) < 2 or not writers:
            continue
        names = ", ".join(device.name for device in devices)
        what = devices[0].image.spec if devices[0].image else devices[0].backing
        yield Trouble(
            subject=devices[0].name,
            key="+".join(device.name for device in devices[:8]),
            device=writers[0].name,
            severity=Severity.CRITICAL if len(writers) > 1 else Severity.WARNING,
            message=f"{what} is mapped {len(devices)} times on this node ({names}), "
            f"{len(writers)} of them can write",
            advice="the kernel's protection of a mounted device holds for each mapping alone: "
            "mkfs or a second mount through the other one destroys the file system. Unmap all but "
            "the one in use (see 'nodeagent volume list')",
            evidence={"thing": thing, "devices": names, "writers": str(len(writers))},
        )


RULE = Rule(
    name="mapped-twice",
    summary="one image is mapped more than once on this node",
    severity=Severity.CRITICAL,
    patience=2.0,
    judge=needs_inventory(_judge),
)
