"""The audit's state as plain JSON values, for the API and the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kit.findings import Finding, Severity
from linux import blockdev
from volumes.audit import actions
from volumes.audit.inventory.model import Inventory
from volumes.audit.service import Audit
from volumes.audit.types import cluster_of

_ORDER = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
_LAST_ACTIONS = 20
DeviceState = Literal["mounted", "leaked", "raw block", "stacked", "unmounted"]


# A finding, with the fields that scripts select by at the top level.
@dataclass(frozen=True)
class AuditFinding:
    id: str  # stays the same while the problem exists
    rule: str
    severity: Severity
    subject: str
    device: str  # kernel name, or empty
    pid: int  # process that causes it; 0: unknown
    message: str
    advice: str
    since: float  # Unix time
    evidence: Mapping[str, str]


def _finding(found: Finding) -> AuditFinding:
    evidence = dict(found.evidence)
    return AuditFinding(
        id=found.id,
        rule=found.rule,
        severity=found.severity,
        subject=found.subject,
        device=evidence.pop("device", ""),
        pid=int(evidence.pop("pid", 0)),
        message=found.message,
        advice=found.advice,
        since=found.since,
        evidence=evidence,
    )


def findings(audit: Audit) -> list[AuditFinding]:
    """The most severe first, of those the oldest first."""
    plain = [_finding(found) for found in audit.findings]
    return sorted(plain, key=lambda f: (_ORDER[f.severity], f.since, f.id))


@dataclass(frozen=True)
class AuditDevice:
    name: str
    driver: str
    number: str  # major:minor
    size: int  # bytes
    read_only: bool
    image: str  # pool/image@snapshot
    backing: str  # file or server behind a loop or nbd device
    state: DeviceState  # stacked: another device (LUKS, LVM) uses it
    file_systems: Sequence[str]
    targets: Sequence[str]
    volume: str
    pods: Sequence[str]
    findings: Sequence[str]


def devices(audit: Audit) -> list[AuditDevice]:
    if audit.inventory is None:
        return []
    return [_device(audit, audit.inventory, each) for each in audit.inventory.devices]


def _device(audit: Audit, inventory: Inventory, device: blockdev.BlockDevice) -> AuditDevice:
    volume = inventory.volume_of(device)
    return AuditDevice(
        name=device.name,
        driver=device.driver,
        number=f"{device.number[0]}:{device.number[1]}",
        size=device.size,
        read_only=device.read_only,
        image=device.image.spec if device.image else "",
        backing=device.backing,
        state=_state(inventory, device),
        file_systems=device.active,
        targets=[place.target for place in inventory.on_host(device)],
        volume=(volume.name or volume.handle) if volume else "",
        pods=[p.pod_uid for p in volume.publishes] if volume else [],
        findings=[f.id for f in audit.findings if f.evidence.get("device") == device.name],
    )


def _state(inventory: Inventory, device: blockdev.BlockDevice) -> DeviceState:
    if inventory.on_host(device):
        return "mounted"
    if inventory.elsewhere(device) or device.active:
        return "leaked"
    if inventory.raw.get(device.name):
        return "raw block"
    return "stacked" if device.stacked else "unmounted"


def detail(audit: Audit, inventory: Inventory, device: blockdev.BlockDevice) -> dict[str, Any]:
    """Everything known about one device."""
    plain = msgspec.to_builtins
    owner = cluster_of(audit.cluster_views(), device)
    image = device.image
    view = owner.image(image.pool, image.namespace, image.name) if owner and image else None
    return {
        **vars(_device(audit, inventory, device)),
        "details": plain(device) | {"raw": list(inventory.raw.get(device.name, ()))},
        "mounts": [plain(place) for place in inventory.on_host(device)],
        "elsewhere": [
            {**plain(place), "owners": plain(space.owners), "kept_by": list(space.kept_by)}
            for space, place in inventory.elsewhere(device)
        ],
        "users": [plain(user) for user in inventory.users_on(device)],
        "users_looked_for": device.number in inventory.users_of,
        "record": plain(inventory.volume_of(device)),
        "cluster": plain(view),
        "found": [_finding(f) for f in audit.findings if f.evidence.get("device") == device.name],
    }


def overview(audit: Audit) -> dict[str, Any]:
    """The audit itself: what it sees, what it cannot see, what it may do."""
    inventory = audit.inventory
    follower = audit.follower
    return {
        "drivers": list(audit.wanted.guard.drivers),
        "names": list(audit.settings.names),
        "looked_at": inventory.taken if inventory else None,
        "devices": len(inventory.devices) if inventory else 0,
        "mount_namespaces": inventory.namespaces if inventory else 0,
        "gaps": list(dict.fromkeys(inventory.gaps + inventory.deep_gaps)) if inventory else [],
        "reasons": list(audit.health().reasons),
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
        "logs": msgspec.to_builtins(follower.counters()) if follower else {},
        "log_trouble": follower.states() if follower else {},
        "actions": {actions.DETACH: audit.settings.actions.detach_leaked},
        "repairs": list(audit.repairer.shown.values()),
        "journal": list(audit.runner.last)[-_LAST_ACTIONS:],
        "findings": findings(audit),
    }
