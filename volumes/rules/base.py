"""What a rule is: a scene in, troubles out, nothing else touched."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kit.findings import Severity
from linux.syscalls import ClockState
from volumes.audit.settings import AuditSettings
from volumes.inventory.cluster import ClusterView, NetworkPath
from volumes.inventory.model import Device, Inventory


@dataclass(frozen=True)
class LedgerMismatch:
    device: str
    image: str
    expected: str  # what the ledger remembers, "ext4 <uuid>"
    seen: str


@dataclass(frozen=True)
class GuardView:
    """What the format guard says of itself (volumes.guard). ``unreadable``: devices by name."""

    enforcing: bool
    reasons: tuple[str, ...] = ()
    mismatches: tuple[LedgerMismatch, ...] = ()
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """What the cluster's API says of one volume; by its CSI handle."""

    handle: str
    name: str  # namespace/name of the claim
    read_only: bool
    attached: bool | None = None  # VolumeAttachment for this node; None: not known


@dataclass(frozen=True)
class LogHit:
    """A log line, or many alike, that matched a pattern."""

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
    hint: str = ""  # unmap-failed, busy: other rules use it


@dataclass(frozen=True)
class Scene:
    """Everything the rules may look at. None and empty mean: not known, never: fine."""

    now: float
    settings: AuditSettings
    inventory: Inventory | None
    blind: str = ""  # why there is no fresh inventory
    clusters: Mapping[str, ClusterView | str] = field(default_factory=dict)  # str: why not
    # (cluster, pool, namespace, image) -> address of its only watcher when it was last seen: a
    # blocklisted client's watch is dropped at once, and some drivers do not tell their address
    watched_by: Mapping[tuple[str, str, str, str], str] = field(default_factory=dict)
    paths: tuple[NetworkPath, ...] = ()
    guard: GuardView | None = None
    claims: Mapping[str, Claim] | None = None
    clock: ClockState | None = None
    logs: tuple[LogHit, ...] = ()
    unread_logs: Mapping[str, str] = field(default_factory=dict)  # source -> why
    lost_lines: int = 0
    # device -> where the host had it mounted; what tells a copy of that from a mount of its own
    former: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def cluster_of(self, device: Device) -> ClusterView | None:
        """The cluster a mapping belongs to: by fsid, or the only one there is."""
        return cluster_of(self.clusters, device)


def cluster_of(clusters: Mapping[str, ClusterView | str], device: Device) -> ClusterView | None:
    """See ``Scene.cluster_of``. ``clusters``: every one that is set, also those that do not answer.

    An image of the same name in another cluster is another image.
    """
    if device.image is None:
        return None
    views = [view for view in clusters.values() if isinstance(view, ClusterView)]
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
    severity: Severity | None = None  # other than the rule's own
    patience: float | None = None  # seconds it must last, other than the rule's own
    # Unix time of the look that saw it, where that may be older than this round: patience counts
    # from one look to another, not over what is only remembered.
    seen: float | None = None


@dataclass(frozen=True)
class Outcome:
    """``unknown``: the rule could not look everywhere, and why; then nothing of it clears."""

    troubles: tuple[Trouble, ...] = ()
    unknown: str = ""
    off: str = ""  # it has nothing to look at here, and why


Judge = Callable[[Scene], Outcome]


@dataclass(frozen=True)
class Rule:
    name: str
    summary: str  # one line, for docs and the command line
    severity: Severity
    patience: float  # seconds a trouble must last before it is a finding
    judge: Judge


def needs_inventory(judge: Callable[[Scene, Inventory], Iterable[Trouble]]) -> Judge:
    """A rule that only looks at the node: unknown while the node cannot be looked at."""

    def wrapped(scene: Scene) -> Outcome:
        if scene.inventory is None or scene.blind:  # what an old look saw is not seen now
            return Outcome(unknown=scene.blind or "the node has not been looked at yet")
        return Outcome(tuple(judge(scene, scene.inventory)))

    return wrapped


def needs_records(judge: Callable[[Scene, Inventory], Iterable[Trouble]]) -> Judge:
    """As needs_inventory; unknown also while kubelet's directory is not there."""
    plain = needs_inventory(judge)

    def wrapped(scene: Scene) -> Outcome:
        outcome = plain(scene)
        if outcome.unknown or scene.inventory is None or not scene.inventory.no_records:
            return outcome
        return dataclasses.replace(outcome, unknown=scene.inventory.no_records)

    return wrapped


def needs_namespaces(judge: Judge) -> Judge:
    """For what may hide in any mount namespace: where nothing is found, it is fine only when all
    of them could be looked at."""

    def wrapped(scene: Scene) -> Outcome:
        outcome = judge(scene)
        gaps = scene.inventory.space_gaps if scene.inventory is not None else ()
        if outcome.troubles or outcome.unknown or not gaps:
            return outcome
        more = f" and {len(gaps) - 3} more" if len(gaps) > 3 else ""
        return Outcome(unknown="not looked at: " + "; ".join(gaps[:3]) + more)

    return wrapped


def needs_clusters(
    judge: Callable[[Scene, ClusterView], Iterable[Trouble]], *commands: str
) -> Judge:
    """A rule asked of each cluster: unknown while any of them does not answer, or does not let
    the key run one of the ``commands`` that the rule lives on."""

    def wrapped(scene: Scene) -> Outcome:
        if not scene.clusters:
            return Outcome(off="no cluster is set (volumes.audit.clusters)")
        troubles: list[Trouble] = []
        unknown = []
        for name, view in scene.clusters.items():
            if isinstance(view, str):
                unknown.append(f"cluster {name}: {view}")
            else:
                troubles += judge(scene, view)
                unknown += view.refused(commands)
        return Outcome(tuple(troubles), unknown="; ".join(unknown))

    return wrapped
