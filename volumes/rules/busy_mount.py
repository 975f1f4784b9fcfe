"""busy-mount: a staged volume that no pod has any more, and somebody keeps it from going."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Device, Inventory, Volume
from volumes.rules import leaked_mount
from volumes.rules.base import Rule, Scene, Trouble, needs_records


def left_over(inventory: Inventory, device: Device) -> Volume | None:
    """The staged volume on the device when no pod's directory has it mounted."""
    volume = inventory.volume_of(device)
    if volume is None or not volume.mounts or not inventory.on_host(device):
        return None
    if is_published(inventory, device):
        return None
    at = {place.target for place in inventory.on_host(device)}
    return volume if at <= set(volume.mounts) else None


def is_published(inventory: Inventory, device: Device) -> bool:
    """Whether a pod has it, so that an earlier failure to unmount it is over."""
    volume = inventory.volume_of(device)
    return volume is not None and any(publish.mounted for publish in volume.publishes)


def suspects(scene: Scene, inventory: Inventory) -> list[Device]:
    """Devices whose users would explain an unmount that does not happen."""
    named = {hit.device for hit in scene.logs if hit.hint == "busy"}
    return [
        device
        for device in inventory.devices
        if inventory.on_host(device)
        and not is_published(inventory, device)
        and (left_over(inventory, device) or device.name in named)
    ]


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    for device in suspects(scene, inventory):
        volume = inventory.volume_of(device)
        where = inventory.on_host(device)[0].target
        state = "published to no pod" if left_over(inventory, device) else "to be unmounted"
        for user in inventory.users_on(device)[: leaked_mount.MOST_PER_DEVICE]:
            yield leaked_mount.user_trouble(
                device,
                user,
                f"{device.label} at {where} is {state}, but {user.owner.label} keeps it busy "
                f"({', '.join(user.ways)})",
                f"let {user.owner.label} leave it (change its working directory, close the files) "
                "or restart it; the unmount then goes through by itself. An agent that looks "
                "into kubelet's directory should not stay there"
                + (f". Volume {volume.name or volume.handle}" if volume else ""),
            )


RULE = Rule(
    name="busy-mount",
    summary="a volume that is to go cannot be unmounted: a process has files open on it",
    severity=Severity.WARNING,
    patience=2.0,
    judge=needs_records(_judge),
)
