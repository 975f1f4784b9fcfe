"""private-propagation: a container that sees kubelet's directories, but not its unmounts."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.model import Inventory
from volumes.rules import leaked_mount
from volumes.rules.base import Rule, Scene, Trouble, needs_namespaces, needs_records


def _judge(scene: Scene, inventory: Inventory) -> Iterator[Trouble]:
    kubelet = inventory.kubelet
    if kubelet is None:
        return
    for space in inventory.spaces:
        shown = [
            place for place in space.places if place.device == kubelet.device and place.is_private
        ]
        if not shown:
            continue
        copies = [p for p in space.places if p.device in inventory.by_number and p.is_private]
        names = sorted({inventory.by_number[copy.device].name for copy in copies})
        owner = space.owners[0] if space.owners else None
        holds = f" and holds copies of {', '.join(names)}" if names else ""
        yield Trouble(
            subject=owner.pod or owner.pod_uid or owner.comm if owner else f"mnt:[{space.inode}]",
            # An inode is given again at once: a second short-lived namespace is not the first.
            key=f"mnt-{space.inode}" + (f"-{space.id}" if space.id else ""),
            seen=inventory.spaces_at,
            pid=owner.pid if owner else 0,
            device=names[0] if names else "",
            # Without a copy of a volume nothing is pinned yet: the next restart of it pins some.
            severity=Severity.WARNING if names else Severity.INFO,
            message=f"{leaked_mount.who(space)} has kubelet's directory at {shown[0].target} with "
            f"private propagation{holds}",
            advice="unmounts on the host never reach it, so every volume mounted when it starts "
            "stays in use. Give its hostPath mount 'mountPropagation: HostToContainer' (docker: "
            "rslave) and restart it",
            evidence={
                "namespace": str(space.inode),
                "targets": ", ".join(place.target for place in shown[:4]),
                "devices": ", ".join(names[:16]),
                **(leaked_mount.owner_evidence(owner) if owner else {}),
            },
        )


RULE = Rule(
    name="private-propagation",
    summary="a container has the host's volume directories without receiving unmounts",
    severity=Severity.WARNING,
    patience=15.0,  # runtimes pass through private mounts while a container starts
    judge=needs_namespaces(needs_records(_judge)),
)
