"""Small inventories and views for the pure tests of the rules."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit.errors
import kit.findings
from ceph.protocol import ClusterView, ImageView, Watcher
from kube.settings import KubeletSettings, ThisNode
from linux.blockdev import BlockDevice
from linux.rbd_sysfs import RbdClient, RbdImage
from nodeagent import state as reporting
from volumes.audit import service
from volumes.audit.inventory.model import Inventory, Owner, Place, Space, Volume
from volumes.audit.rules.base import AuditRule, Outcome
from volumes.audit.types import GuardView, LogHit, Scene, Severity, Trouble
from volumes.node.watch import NodeWatch
from volumes.settings import AuditSettings, GuardSettings, RepairSettings, VolumesSettings

IMAGE = RbdImage(pool="rbd", name="csi-vol-1", fsid="f1")
DEVICE = BlockDevice(
    name="rbd0",
    number=(252, 0),
    driver="rbd",
    size=1 << 30,
    read_only=False,
    diskseq=7,
    image=IMAGE,
    client=RbdClient("0", "client10", "10.0.0.5:0/111"),
)
OWNER = Owner(pid=42, started=1, comm="node_exporter", cgroup="/kubepods/x")
INVENTORY = Inventory(taken=1000.0, cpu=0.1, deep=True, devices=(DEVICE,))


def device(**changes: Any) -> BlockDevice:
    return dataclasses.replace(DEVICE, **changes)


def place(target: str = "/mnt", **changes: Any) -> Place:
    fields: dict[str, Any] = {
        "namespace": 1,
        "target": target,
        "root": "/",
        "device": DEVICE.number,
        "fstype": "ext4",
        "read_only": False,
        "super_read_only": False,
        "options": ("rw",),
        "super_options": ("rw",),
        "propagation": "shared",
    }
    return Place(**(fields | changes))


def space(*places: Place, **changes: Any) -> Space:
    fields: dict[str, Any] = {
        "inode": 99,
        "id": 5,
        "owners": (OWNER,),
        "processes": 1,
        "places": places or (place(namespace=99, propagation="private"),),
    }
    return Space(**(fields | changes))


def volume(**changes: Any) -> Volume:
    fields: dict[str, Any] = {
        "driver": "rbd.csi.ceph.com",
        "handle": "h1",
        "staging": "/kubelet/s",
        "mounts": (),
        "device": "rbd0",
        "image": IMAGE,
        "publishes": (),
    }
    return Volume(**(fields | changes))


def scene(*, settings: dict[str, Any] | None = None, **changes: Any) -> Scene:
    inventory = changes.pop("inventory", INVENTORY)
    fields = {name: changes.pop(name) for name in list(changes) if hasattr(INVENTORY, name)}
    if inventory is not None and fields:
        inventory = dataclasses.replace(inventory, **fields)
    return Scene(
        now=1000.0,
        settings=AuditSettings.model_validate(settings or {}),
        inventory=inventory,
        **changes,
    )


def view(**changes: Any) -> ClusterView:
    fields: dict[str, Any] = {"name": "c1", "taken": 1000.0, "fsid": "f1"}
    return ClusterView(**(fields | changes))


def judge(rule: AuditRule, at: Scene) -> Outcome:
    return rule.judge(at)


def only(rule: AuditRule, at: Scene) -> Trouble:
    outcome = rule.judge(at)
    assert len(outcome.troubles) == 1, outcome
    return outcome.troubles[0]


COPY = "/host/var/lib/kubelet/plugins/kubernetes.io/csi/rbd.csi.ceph.com/1/globalmount"
OURS = Watcher("client10", "10.0.0.5:0/111")
THEIRS = Watcher("client77", "10.0.0.9:0/9")


def image_view(*watchers: Watcher, locks: tuple[Watcher, ...] = (), features: int = 0) -> ImageView:
    return ImageView("rbd", "", "csi-vol-1", features, watchers, locks)


def log_hit(**changes: Any) -> LogHit:
    fields: dict[str, Any] = {
        "pattern": "unmap-failed",
        "severity": Severity.WARNING,
        "source": "kubelet",
        "text": "rbd: unmap failed: (16) Device or resource busy",
        "first": 900.0,
        "last": 990.0,
        "count": 3,
        "meaning": "m",
        "advice": "a",
        "hint": "unmap-failed",
    }
    return LogHit(**(fields | changes))


class Cluster:
    """Who claims volumes, and the node's taint."""

    def __init__(self) -> None:
        self.claim = ""
        self.silent = False
        self.asked = 0
        self.taints: list[bool] = []

    async def attached_here(self, device: BlockDevice) -> str:
        if self.silent:
            raise kit.errors.HostError("VolumeAttachment", "no answer within 3s", "")
        return self.claim

    async def is_attached(self, driver: str, handle: str) -> bool:
        self.asked += 1
        if self.silent:
            raise kit.errors.HostError("VolumeAttachment", "no answer within 3s", "")
        return bool(self.claim)

    async def taint(self, wanted: bool) -> None:
        self.taints.append(wanted)


def wanted(
    settings: AuditSettings,
    *,
    clusters: Any = (),
    drivers: tuple[str, ...] = ("rbd",),
    repair: RepairSettings | None = None,
    kubelet: KubeletSettings | None = None,
) -> VolumesSettings:
    """Settings of the room around those of the audit."""
    room = VolumesSettings(
        audit=settings,
        clusters=tuple(clusters),
        guard=GuardSettings(drivers=drivers),
        repair=repair or RepairSettings(),
    )
    return room.at(ThisNode(kubelet=kubelet or KubeletSettings()))


def audit(
    settings: AuditSettings,
    folder: Path,
    *,
    reporter: kit.findings.Reporter | None = None,
    guard: Callable[[], GuardView | None] = lambda: None,
    cluster: Cluster | None = None,
    **more: Any,
) -> service.Audit:
    return service.Audit(
        wanted(settings, **more),
        cluster or Cluster(),  # type: ignore[arg-type]
        NodeWatch(),
        state_dir=folder,
        reporter=reporter or reporting.Findings(),
        guard=guard,
    )
