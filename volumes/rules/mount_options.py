"""host-mount-options: a host mount lacks options that it needs."""

import fnmatch
from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Inventory
from volumes.rules.base import Rule, Scene, Trouble, needs_records


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    kubelet = inventory.kubelet
    if kubelet is not None and kubelet.propagation != "shared":
        yield Trouble(
            subject=kubelet.target,
            message=f"{kubelet.target}, where kubelet's directory lies, is not a shared mount",
            advice="no container receives unmounts from it, HostToContainer or not: "
            f"'mount --make-rshared {kubelet.target}', and make the boot do it",
            evidence={"propagation": kubelet.propagation, "needs": "shared"},
        )
    for place in inventory.host:
        device = inventory.by_number.get(place.device)
        for need in scene.settings.mount_options:
            if not fnmatch.fnmatchcase(place.target, need.target):
                continue
            if need.fstype is not None and need.fstype != place.fstype:
                continue
            has = set(place.options) | set(place.super_options)
            missing = [option for option in need.options if option not in has]
            if missing:
                yield Trouble(
                    subject=place.target,
                    key=",".join(missing),
                    device=device.name if device else "",
                    message=f"{place.target} is mounted without {','.join(missing)}",
                    advice="add them to the StorageClass' or PV's mountOptions; a running mount "
                    f"takes most of them by 'mount -o remount,{','.join(missing)}'",
                    evidence={"options": ",".join(sorted(has)), "needs": ",".join(need.options)},
                )


RULE = Rule(
    name="host-mount-options",
    summary="a host mount lacks options that it needs",
    severity=Severity.WARNING,
    patience=10.0,
    judge=needs_records(_judge),
)
