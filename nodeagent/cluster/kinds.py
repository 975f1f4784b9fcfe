"""The agent's API group: which kinds there are, and what their status holds.

A spec is made of a room's own settings models (``kit.room.Intent``). A status is written by agents
alone: of a ``NodeStorage`` by that node's, of the others by the one that rolls up.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import Field

import kit.room
import kit.settings
from nodeagent import rooms

GROUP = "nodeagent.io"
VERSION = "v1alpha1"
API = f"/apis/{GROUP}/{VERSION}"
NODE_STORAGE = "NodeStorage"
NODE_STORAGES = "nodestorages"


def intents() -> Iterator[tuple[kit.room.Room, kit.room.Intent]]:
    """Every kind that adds to a room's settings."""
    for room in rooms.ROOMS:
        for intent in room.intents:
            yield room, intent


def label_prefix(presence: kit.room.Presence) -> str:
    """Of the keys of labels of the Node that say what is whole there."""
    return f"{presence.word}.{GROUP}/"


def label_prefixes() -> tuple[str, ...]:
    """Of all such keys."""
    found = [room.presence for room in rooms.ROOMS]
    return tuple(label_prefix(each) for each in found if each is not None)


class SecretRef(kit.settings.Shown):
    """A key of a Secret in the agent's namespace."""

    # Name of the Secret.
    name: str = Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)
    # Name of the entry in the Secret.
    key: str = Field(default="key", pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)


class ObjectCondition(kit.settings.Shown):
    """As Kubernetes' own: one fact with its reason."""

    type: str  # Name of the condition.
    status: Literal["True", "False", "Unknown"]  # Whether it is true.
    reason: str  # One word for programs.
    message: str = ""  # One line for people.
    last_transition_time: str  # Time of the last change of status (RFC 3339).
    observed_generation: int = 0  # metadata.generation of the spec that it describes.


class NodesStatus(kit.settings.Shown):
    wanted: int = 0  # Nodes that the object selects.
    ready: int = 0  # Nodes that have the whole dataset, or all images.
    refused: int = 0  # Nodes that refuse the object. Conditions say why.


class RequestStatus(kit.settings.Shown):
    """What an annotation asks of this node."""

    verb: str  # warm, verify, pause or rescan.
    value: str  # Value of the annotation. The node acts when it changes.
    state: str  # pending, done or failed.
    message: str = ""  # Why it is pending or failed.


class IntentStatus(kit.settings.Shown):
    """How far the nodes are, together. One agent writes it for all."""

    observed_generation: int = 0  # metadata.generation of the spec that this status describes.
    nodes: NodesStatus = NodesStatus()  # Numbers of nodes: wanted, ready, refused.
    ready: str = ""  # Number of ready nodes and of wanted nodes, like 3/4.
    percent: int = 0  # Share of the data that a wanted node has, on average, in percent.
    # Size in bytes. CachedDataset: of the dataset, as far as it is listed. ImageSet: of all images,
    # compressed.
    bytes: int = 0
    size: str = ""  # The size in readable form, like 1.0 TiB.
    # Ready: all wanted nodes have the whole dataset, or all images. Accepted: no node refuses the
    # object. Warmed, Verified, Paused, Rescanned: all wanted nodes did what the annotation warm,
    # verify, pause or rescan asks.
    conditions: tuple[ObjectCondition, ...] = ()
    chosen: tuple[str, ...] = ()  # With spread: the nodes that keep the dataset.
    # For each annotation (like warm): its newest value that all wanted nodes are finished with. On
    # some nodes it may have failed.
    carried_out: Mapping[str, str] = {}


class ObjectStatus(kit.settings.Shown):
    """What this node makes of one object."""

    kind: str  # Kind of the object.
    name: str  # Name of the object.
    observed_generation: int = 0  # metadata.generation of the spec that this node uses.
    accepted: bool = True  # Whether this node accepts the object. If not, message says why.
    ready: bool = False  # Whether this node has the whole dataset, or all images.
    percent: int = 0  # Share on this node, in percent.
    bytes: int = 0  # Size in bytes.
    message: str = ""  # Why it is not accepted or not ready. If deleted: who still uses it.
    candidate: bool = False  # With spread: whether this node may keep the dataset.
    requests: tuple[RequestStatus, ...] = ()  # What annotations ask of this node.


class FindingStatus(kit.settings.Shown):
    rule: str  # Rule that detected the problem.
    severity: str  # info, warning or critical.
    subject: str  # Device, dataset, image or pod.
    message: str  # What is wrong.
    advice: str = ""  # What to do.
    since: str = ""  # First seen at (RFC 3339).


class FindingCounts(kit.settings.Shown):
    critical: int = 0  # Critical findings.
    warning: int = 0  # Warnings.
    info: int = 0  # Other findings.


class Versions(kit.settings.Shown):
    agent: str = ""  # Version of the agent.
    kernel: str = ""  # Release of the kernel.


class NodeStatus(kit.settings.Shown):
    """What one node holds, as its own agent last said."""

    # Digest of the objects that this node knows.
    observed: str = ""
    written: str = ""  # Time of this status. An unchanged node writes about every 10 minutes.
    summary: Mapping[str, str] = {}  # Short figures for 'kubectl get'.
    # Objects that select this node, and deleted objects that this node still has.
    objects: tuple[ObjectStatus, ...] = ()
    findings: tuple[FindingStatus, ...] = ()  # The 30 most severe findings.
    finding_counts: FindingCounts = FindingCounts()  # Number of findings: critical, warning, info.
    versions: Versions = Versions()  # Versions of the agent and the kernel.
