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
    # Which of its entries.
    key: str = Field(default="key", pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)


class ObjectCondition(kit.settings.Shown):
    """As Kubernetes' own: one fact with its reason."""

    type: str  # What it is about.
    status: Literal["True", "False", "Unknown"]  # Whether it is so.
    reason: str  # One word for programs.
    message: str = ""  # One line for people.
    last_transition_time: str  # When the status changed last (RFC 3339).
    observed_generation: int = 0  # The generation of the spec that this is about.


class NodesStatus(kit.settings.Shown):
    """How many nodes."""

    wanted: int = 0  # Nodes that the object selects.
    ready: int = 0  # Of these, nodes that have all of it.
    refused: int = 0  # Of these, nodes that cannot use it; conditions say why.


class RequestStatus(kit.settings.Shown):
    """What an annotation asks of this node."""

    verb: str  # warm, verify, pause or rescan.
    value: str  # The annotation's value, which is carried out once.
    state: str  # pending, done or failed.
    message: str = ""  # Why it is pending or failed.


class IntentStatus(kit.settings.Shown):
    """How far the nodes are, together. One agent writes it for all."""

    observed_generation: int = 0  # The generation of the spec that all figures are about.
    nodes: NodesStatus = NodesStatus()  # How many nodes have it.
    ready: str = ""  # Ready and wanted nodes, like 3/4.
    percent: int = 0  # How much is on the nodes, on average.
    bytes: int = 0  # Bytes on one node.
    size: str = ""  # The same for people.
    # Ready: all wanted nodes have all of it. Accepted: no node refuses the spec. Warmed, Verified,
    # Paused, Rescanned: all wanted nodes carried out what the annotation asks for.
    conditions: tuple[ObjectCondition, ...] = ()
    chosen: tuple[str, ...] = ()  # With spread: the nodes that keep it.
    # By verb (warm, verify, pause, rescan): the value of the annotation that all wanted nodes
    # carried out last, well or not; the condition says which.
    carried_out: Mapping[str, str] = {}


class ObjectStatus(kit.settings.Shown):
    """What this node makes of one object."""

    kind: str  # Kind of the object.
    name: str  # Its name.
    observed_generation: int = 0  # The generation of its spec that is in force here.
    accepted: bool = True  # Whether it is in force; if not, message says why.
    ready: bool = False  # Whether this node has all of it.
    percent: int = 0  # How much of it this node has.
    bytes: int = 0  # Its bytes.
    message: str = ""  # Why it is not in force or not ready; who uses a deleted one.
    candidate: bool = False  # With spread: whether this node may be chosen to keep it.
    requests: tuple[RequestStatus, ...] = ()  # What annotations ask of this node.


class FindingStatus(kit.settings.Shown):
    """One finding of the agent."""

    rule: str  # Which rule found it.
    severity: str  # info, warning or critical.
    subject: str  # Device, dataset, image or pod that it is about.
    message: str  # What is wrong.
    advice: str = ""  # What to do.
    since: str = ""  # When it was seen first (RFC 3339).


class FindingCounts(kit.settings.Shown):
    """How many findings there are."""

    critical: int = 0  # Critical ones.
    warning: int = 0  # Warnings.
    info: int = 0  # Others.


class Versions(kit.settings.Shown):
    """What runs on the node."""

    agent: str = ""  # Version of the agent.
    kernel: str = ""  # Release of the kernel.


class NodeStatus(kit.settings.Shown):
    """What one node holds, as its own agent last said."""

    # A digest of the objects that this node knows. Equal digests: the same objects.
    observed: str = ""
    written: str = ""  # When it was written (RFC 3339). Unchanged nodes write every 10 minutes.
    summary: Mapping[str, str] = {}  # Short figures for 'kubectl get'.
    objects: tuple[ObjectStatus, ...] = ()  # One entry for each object that selects this node.
    findings: tuple[FindingStatus, ...] = ()  # The most severe findings; at most 30.
    finding_counts: FindingCounts = FindingCounts()  # How many there are of each severity.
    versions: Versions = Versions()  # What runs on the node.
