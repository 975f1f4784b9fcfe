"""The types that the audit's parts exchange: what a rule gets (Scene) and what it gives (Trouble).

This module exists so that rules, logs, actions and the service do not import one another. It knows
the inventory's model and the clusters' views, nothing above them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import kit.findings
from ceph import protocol
from linux import blockdev
from linux.syscalls import ClockState
from volumes.audit.inventory.model import Inventory
from volumes.settings import AuditSettings

Severity = kit.findings.Severity
KERNEL = "kernel"  # the name of the kernel's log among the log sources


@dataclass(frozen=True)
class LedgerMismatch:
    """A volume whose content differs from what the guard's ledger remembers."""

    device: str
    image: str
    expected: str  # what the ledger remembers, "ext4 <uuid>"
    seen: str


@dataclass(frozen=True)
class GuardView:
    """The state of the format guard, as the rules need it. ``unreadable`` names devices.

    ``only_reports``: it is in force as wanted, and wanted is dry-run."""

    enforcing: bool
    reasons: tuple[str, ...] = ()
    mismatches: tuple[LedgerMismatch, ...] = ()
    unreadable: tuple[str, ...] = ()
    verdicts: Mapping[str, str] = field(default_factory=dict)  # device name -> the last probe's
    only_reports: bool = False


@dataclass(frozen=True)
class LogHit:
    """A log line that matched a pattern, or many such lines about the same thing."""

    pattern: str
    severity: Severity
    source: str  # kernel, kubelet, ...
    text: str  # the latest line
    first: float  # Unix time
    last: float
    count: int
    meaning: str
    advice: str
    device: str = ""
    image: str = ""
    pod_uid: str = ""
    volume: str = ""
    pid: int = 0
    hint: str = ""  # unmap-failed, busy: input of other rules


@dataclass(frozen=True)
class NetworkPath:
    """The route from this node to a monitor, as the kernel knows it."""

    cluster: str
    monitor: str
    path_mtu: int
    interface: str
    interface_mtu: int


@dataclass(frozen=True)
class Scene:
    """Everything a rule may read. None and empty mean "not known", never "fine"."""

    now: float
    settings: AuditSettings
    inventory: Inventory | None
    blind: str = ""  # why there is no fresh inventory
    # By name: the latest view, or why the cluster could not be asked.
    clusters: Mapping[str, protocol.ClusterView | str] = field(default_factory=dict)
    # (cluster, pool, namespace, image) -> address of its only watcher when it was last seen: a
    # cluster drops a blocklisted client's watch at once, and some drivers hide their address.
    watched_by: Mapping[tuple[str, str, str, str], str] = field(default_factory=dict)
    expected_versions: Mapping[str, str] = field(default_factory=dict)  # cluster -> version
    paths: tuple[NetworkPath, ...] = ()
    guard: GuardView | None = None
    clock: ClockState | None = None
    logs: tuple[LogHit, ...] = ()
    unread_logs: Mapping[str, str] = field(default_factory=dict)  # source -> why
    # Source -> the most different lines that are kept of it; it had more.
    flooding_logs: Mapping[str, int] = field(default_factory=dict)
    # Device name -> where the host had it mounted: tells a copy of a host mount from a
    # container's own mount.
    former: Mapping[str, frozenset[str]] = field(default_factory=dict)

    # Handles of staged volumes whose VolumeAttachment for this node was there and is gone.
    detached: frozenset[str] = frozenset()

    @property
    def answering(self) -> dict[str, protocol.ClusterView]:
        """The clusters that answer, by name."""
        return {name: view for name, view in self.clusters.items() if not isinstance(view, str)}

    @property
    def silent(self) -> list[str]:
        """The clusters that do not answer, and why."""
        views = self.clusters.items()
        return [f"cluster {name}: {why}" for name, why in views if isinstance(why, str)]

    def devices_in(self, view: protocol.ClusterView) -> list[blockdev.BlockDevice]:
        """The devices of this node whose images are in the cluster."""
        devices = self.inventory.devices if self.inventory else ()
        owners = ((device, cluster_of(self.clusters, device)) for device in devices)
        return [device for device, owner in owners if owner and owner.name == view.name]


def cluster_of(
    clusters: Mapping[str, protocol.ClusterView | str], device: blockdev.BlockDevice
) -> protocol.ClusterView | None:
    """The view of the cluster that holds the device's image: by fsid, else the only cluster.

    ``clusters`` must have every configured cluster, also those that do not answer: an image of the
    same name in another cluster is another image.
    """
    if device.image is None:
        return None
    views = [view for view in clusters.values() if isinstance(view, protocol.ClusterView)]
    if device.image.fsid:
        return next((view for view in views if view.fsid == device.image.fsid), None)
    return views[0] if len(clusters) == 1 and views else None


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong. ``key`` tells it from others of the same rule and subject."""

    subject: str
    message: str
    advice: str
    key: str = ""
    device: str = ""
    pid: int = 0
    evidence: Mapping[str, str] = field(default_factory=dict)
    severity: Severity | None = None  # overrides the rule's own
    patience: float | None = None  # seconds it must last; overrides the rule's own
    # Unix time of the scan that saw it, where that can be older than this round. Patience counts
    # between scans that saw the trouble, not while the audit only remembers it.
    seen: float | None = None
