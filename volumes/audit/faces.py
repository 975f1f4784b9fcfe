"""The audit's state as plain data, for the API and the command line."""

from typing import TYPE_CHECKING, Any

from kit.findings import Finding
from volumes.inventory.model import Device, Inventory, to_json
from volumes.rules.base import cluster_of

if TYPE_CHECKING:
    from volumes.audit.service import Audit


def finding(found: Finding) -> dict[str, Any]:
    """One finding with what scripts ask for at the top level."""
    evidence = dict(found.evidence)
    return {
        "id": found.id,
        "rule": found.rule,
        "severity": str(found.severity),
        "subject": found.subject,
        "device": evidence.pop("device", ""),
        "pid": int(evidence.pop("pid", 0)),
        "message": found.message,
        "advice": found.advice,
        "since": found.since,
        "evidence": evidence,
    }


def findings(audit: "Audit") -> list[dict[str, Any]]:
    """The gravest first, the oldest of them first."""
    order = {"critical": 0, "warning": 1, "info": 2}
    plain = [finding(found) for found in audit.findings]
    return sorted(plain, key=lambda f: (order[f["severity"]], f["since"], f["id"]))


def _state(inventory: Inventory, device: Device) -> str:
    if inventory.on_host(device):
        return "mounted"
    if inventory.elsewhere(device) or device.active:
        return "leaked"
    if device.raw:
        return "raw block"
    return "stacked" if device.holders else "unmounted"


def device(audit: "Audit", inventory: Inventory, found: Device) -> dict[str, Any]:
    """One line of the list."""
    volume = inventory.volume_of(found)
    return {
        "name": found.name,
        "driver": found.driver,
        "number": f"{found.number[0]}:{found.number[1]}",
        "size": found.size,
        "read_only": found.read_only,
        "image": found.image.spec if found.image else "",
        "backing": found.backing,
        "state": _state(inventory, found),
        "file_systems": list(found.active),
        "targets": [place.target for place in inventory.on_host(found)],
        "volume": (volume.name or volume.handle) if volume else "",
        "pods": [p.pod_uid for p in volume.publishes] if volume else [],
        "findings": [f.id for f in audit.findings if f.evidence.get("device") == found.name],
    }


def devices(audit: "Audit") -> list[dict[str, Any]]:
    if audit.inventory is None:
        return []
    return [device(audit, audit.inventory, each) for each in audit.inventory.devices]


def detail(audit: "Audit", inventory: Inventory, found: Device) -> dict[str, Any]:
    """Everything known of one device."""
    volume = inventory.volume_of(found)
    owner = cluster_of(audit.cluster_views(), found)
    image = found.image
    view = owner.image(image.pool, image.namespace, image.name) if owner and image else None
    return {
        **device(audit, inventory, found),
        "details": to_json(found),
        "mounts": [to_json(place) for place in inventory.on_host(found)],
        "elsewhere": [
            {**to_json(place), "owners": to_json(space.owners), "kept_by": list(space.kept_by)}
            for space, place in inventory.elsewhere(found)
        ],
        "users": [to_json(user) for user in inventory.users_on(found)],
        "users_looked_for": found.number in inventory.users_of,
        "record": to_json(volume) if volume else None,
        "cluster": to_json(view) if view else None,
        "found": [finding(f) for f in audit.findings if f.evidence.get("device") == found.name],
    }


def overview(audit: "Audit") -> dict[str, Any]:
    """How the audit itself is: what it sees, what it cannot see, what it may do."""
    inventory = audit.inventory
    health = audit.health()
    follower = audit.follower
    return {
        "drivers": list(audit.drivers),
        "looked_at": inventory.taken if inventory else None,
        "devices": len(inventory.devices) if inventory else 0,
        "mount_namespaces": inventory.namespaces if inventory else 0,
        "gaps": list(dict.fromkeys(inventory.gaps + inventory.deep_gaps)) if inventory else [],
        "reasons": list(health.reasons),
        "look_cpu_seconds": round(inventory.cpu, 4) if inventory else None,
        "rules": [{"rule": s.name, "state": s.state, "why": s.why} for s in audit.states],
        "clusters": [
            {
                "name": name,
                "answers": not isinstance(view, str),
                "why": view if isinstance(view, str) else "",
                "gaps": [] if isinstance(view, str) else list(view.gaps),
            }
            for name, view in sorted(audit.clusters.views.items())
        ],
        "logs": follower.counters() if follower else {},
        "log_trouble": follower.states() if follower else {},
        "actions": {
            "detach-leaked": audit.settings.actions.detach_leaked,
            "unmap-orphan": audit.settings.actions.unmap_orphan,
            "set-readonly": audit.settings.actions.set_readonly,
            "taint": audit.settings.actions.taint,
        },
        "journal": list(audit.runner.journal.last)[-20:],
        "findings": findings(audit),
    }
