"""The cluster's objects, as far as this command reads them. All else of an answer is passed over
unread, so a page of 500 nodes costs the memory of what is shown of it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class Told(msgspec.Struct, rename="camel", frozen=True):
    """Objects have camelCase; what they lack has a default."""


class StoredDataset(Told, frozen=True):
    """One entry of ``status.datasets`` of a NodeStorage."""

    name: str
    state: str = ""
    bytes: int = 0
    percent: int = 0
    message: str = ""
    scrubbed: str = ""


class StoredImage(Told, frozen=True):
    """One entry of ``status.images``."""

    ref: str
    state: str = ""
    pinned: bool = False
    bytes: int = 0
    percent: int = 0
    message: str = ""


class ToldFinding(Told, frozen=True):
    """One entry of ``status.findings``."""

    rule: str
    severity: str
    subject: str = ""
    message: str = ""


class SeverityCounts(Told, frozen=True):
    critical: int = 0
    warning: int = 0
    info: int = 0


class ToldGuard(Told, frozen=True):
    mode: str = "off"
    in_force: bool = False


class ToldVersions(Told, frozen=True):
    agent: str = ""
    kernel: str = ""


class StorageStatus(Told, frozen=True):
    written: str = ""
    datasets: tuple[StoredDataset, ...] = ()
    images: tuple[StoredImage, ...] = ()
    findings: tuple[ToldFinding, ...] = ()
    finding_counts: SeverityCounts = SeverityCounts()
    guard: ToldGuard | None = None
    versions: ToldVersions = ToldVersions()


class Meta(Told, frozen=True):
    name: str = ""
    namespace: str = ""
    owner_references: tuple[Mapping[str, Any], ...] = ()
    creation_timestamp: str = ""


class NodeStorage(Told, frozen=True):
    metadata: Meta
    status: StorageStatus = StorageStatus()


class ToldCondition(Told, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class ToldNodes(Told, frozen=True):
    wanted: int = 0
    ready: int = 0
    refused: int = 0


class WishStatus(Told, frozen=True):
    nodes: ToldNodes = ToldNodes()
    percent: int = 0
    conditions: tuple[ToldCondition, ...] = ()
    carried_out: Mapping[str, str] = {}

    def condition(self, kind: str) -> ToldCondition | None:
        return next((each for each in self.conditions if each.type == kind), None)


class WishObject(Told, frozen=True):
    """A CachedDataset or an ImageSet."""

    metadata: Meta
    status: WishStatus = WishStatus()


class Named(Told, frozen=True):
    metadata: Meta


class AgentContainer(Told, frozen=True):
    name: str


class PodSpec(Told, frozen=True):
    node_name: str = ""
    containers: tuple[AgentContainer, ...] = ()


class PodStatus(Told, frozen=True):
    phase: str = ""
    conditions: tuple[ToldCondition, ...] = ()


class PodObject(Told, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def title(self) -> str:
        return f"pod {self.metadata.namespace}/{self.metadata.name}"


class Involved(Told, frozen=True):
    kind: str = ""
    name: str = ""


class EventObject(Told, frozen=True):
    metadata: Meta
    involved_object: Involved = Involved()
    type: str = ""
    reason: str = ""
    message: str = ""
    count: int | None = 1
    last_timestamp: str | None = None


class ListMeta(Told, frozen=True):
    token: str = msgspec.field(default="", name="continue")


class Cause(Told, frozen=True):
    reason: str = ""
    message: str = ""


class CauseList(Told, frozen=True):
    causes: tuple[Cause, ...] | None = ()  # others than Go's API server write null


class ToldStatus(Told, frozen=True):
    """The API server's own words for an error, and for how a command in a pod ended. ``metadata``
    of an expired list has a new token."""

    status: str = ""
    message: str = ""
    reason: str = ""
    metadata: ListMeta = ListMeta()
    details: CauseList | None = CauseList()
