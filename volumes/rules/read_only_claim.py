"""read-only-claim: used for reading only, but mapped so that it can be written."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Inventory
from volumes.rules.base import Rule, Scene, Trouble, needs_records


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    for device in inventory.devices:
        if device.read_only:
            continue
        volume = inventory.volume_of(device)
        claim = (scene.claims or {}).get(volume.handle) if volume else None
        places = inventory.on_host(device)
        claimed = claim is not None and claim.read_only
        used = bool(places) and all(p.read_only or p.super_read_only for p in places)
        if not claimed and not used:
            continue
        why = (
            f"claim {claim.name} is read-only" if claimed and claim else "its mounts are read-only"
        )
        yield Trouble(
            subject=device.name,
            device=device.name,
            severity=Severity.WARNING if claimed else Severity.INFO,
            message=f"{device.label} is mapped read-write although {why}",
            advice="a read-only mapping ('rbd map --read-only', PV accessModes [ReadOnlyMany] with "
            "readOnly: true) and a key with 'profile rbd-read-only' make a format impossible, "
            "whatever this node does",
            evidence={
                "targets": ", ".join(place.target for place in places[:4]),
                "claim": claim.name if claim else "",
            },
        )


RULE = Rule(
    name="read-only-claim",
    summary="a volume used read-only is mapped read-write",
    severity=Severity.WARNING,
    patience=30.0,
    judge=needs_records(_judge),
)
