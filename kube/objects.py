"""Objects of Kubernetes' own kinds, always by name: this Node and Events about it, a Lease, and
the PersistentVolumes on this node (a list of them has megabytes). All of it raises KubeError.
"""

import datetime
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import kit.pause
import kit.units
from kube import client

ANSWER_SECONDS = 10.0
LARGEST_NODE = client.LARGEST_ANSWER * 4  # bytes; it names its images
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
NODES = "/api/v1/nodes"
TAINT = {"key": "nodeagent.io/volume-repair", "effect": "NoSchedule"}
NAMESPACE = "default"  # where Events of what is in no namespace are
MOST_KNOWN = 200  # Events
LONGEST_MESSAGE = 1000  # bytes that the API server takes: 1024
AGAIN_SECONDS = 600.0  # the same Event is counted up at most so often
BURST = 10
EACH_SECONDS = 30.0  # after the burst
LEASES = "/apis/coordination.k8s.io/v1/namespaces"
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


# --- this node: a taint while a volume is repaired, labels, conditions


async def taint(server: client.ApiServer, node: str, *, wanted: bool, deadline: float) -> None:
    """Put it on the node, or take it away; others stay. KubeError, also (409) when somebody wrote
    to the node since it was read."""
    about, path = f"Node {node}", client.path_to(NODES, node)
    found = await server.request("GET", path, about=about, deadline=deadline)
    try:
        version = found["metadata"]["resourceVersion"]
        taints: list[dict[str, Any]] = found["spec"].get("taints") or []
        others = [each for each in taints if each["key"] != TAINT["key"]]
    except (LookupError, TypeError, AttributeError):
        raise client.KubeError(about, "the answer is not understood") from None
    if (len(others) < len(taints)) is wanted:
        return
    body = {
        "metadata": {"resourceVersion": version},
        "spec": {"taints": [*others, TAINT] if wanted else others},
    }
    await server.request(
        "PATCH", path, body, about=about, deadline=deadline, kind=client.MERGE_PATCH
    )


async def label(server: client.ApiServer, node: str, labels: Mapping[str, str | None]) -> None:
    """Write these labels, None: take it away; all others stay."""
    await server.request(
        "PATCH", client.path_to(NODES, node), {"metadata": {"labels": dict(labels)}},
        about=f"Node {node}", deadline=ANSWER_SECONDS, kind=client.MERGE_PATCH,
        largest=LARGEST_NODE,
    )  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """Of a node. ``reason``: one word."""

    type: str
    status: bool
    reason: str
    message: str


async def set_condition(server: client.ApiServer, node: str, wanted: Condition) -> None:
    """Write one condition; the others stay."""
    about, path = f"Node {node}", client.path_to(NODES, node)
    found = await server.request(
        "GET", path, about=about, deadline=ANSWER_SECONDS, largest=LARGEST_NODE
    )
    there = (found.get("status") or {}).get("conditions") or []
    before: Mapping[str, Any] = next((e for e in there if e.get("type") == wanted.type), {})
    now, word = kit.units.rfc3339(time.time()), str(wanted.status)
    body = {
        "type": wanted.type, "status": word, "reason": wanted.reason, "message": wanted.message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": before["lastTransitionTime"] if before.get("status") == word else now,
    }  # fmt: skip
    await server.request(
        "PATCH", client.path_to(path, "status"), {"status": {"conditions": [body]}},
        about=about, deadline=ANSWER_SECONDS, kind=STRATEGIC_MERGE_PATCH, largest=LARGEST_NODE,
    )  # fmt: skip


# --- Events about this node


@dataclass
class _Sent:
    name: str
    count: int
    at: float


class Events:
    """Each trouble once, counted up when it comes again, and never a flood: what there is no room
    for is in the log and in NodeStorage."""

    def __init__(self, server: client.ApiServer, node: str) -> None:
        self._server = server
        self._node = node
        self._known: OrderedDict[tuple[str, str, str], _Sent] = OrderedDict()
        self._room = kit.pause.Bucket(1 / EACH_SECONDS, BURST)

    async def emit(self, reason: str, message: str, *, warning: bool, uid: str) -> bool:
        """Whether it was written."""
        message = message.encode()[:LONGEST_MESSAGE].decode(errors="ignore")
        key = ("Warning" if warning else "Normal", reason, message)
        now = time.monotonic()
        known = self._known.get(key)
        if known is not None and now - known.at < AGAIN_SECONDS:
            return False
        if not self._room.take():
            return False
        stamp = kit.units.rfc3339(time.time())
        path = client.path_to("/api/v1/namespaces", NAMESPACE, "events")
        if known is not None:
            body: dict[str, Any] = {"count": known.count + 1, "lastTimestamp": stamp}
            try:
                await self._ask("PATCH", client.path_to(path, known.name), body)
                known.count, known.at = known.count + 1, now
                self._known.move_to_end(key)
                return True
            except client.KubeError as error:
                if error.status != 404:  # else it is over an hour old: another one
                    raise
        digest = hashlib.sha256(f"{key}{stamp}".encode()).hexdigest()[:16]
        name = f"{self._node}.{digest}"
        about = {"kind": "Node", "apiVersion": "v1", "name": self._node, "uid": uid}
        body = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "involvedObject": about, "reason": reason, "message": message, "type": key[0],
            "source": {"component": "nodeagent", "host": self._node},
            "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
        }  # fmt: skip
        await self._ask("POST", path, body)
        self._known[key] = _Sent(name, 1, now)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return True

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> None:
        kind = client.MERGE_PATCH if method == "PATCH" else "application/json"
        await self._server.request(
            method, path, body, about=f"Event of Node {self._node}", deadline=ANSWER_SECONDS,
            kind=kind,
        )  # fmt: skip


# --- one of many: who holds a Lease, as client-go does it, without trust in clocks of others


class Lease:
    """``held``: whether it is ours. ``note``: what its holder wrote there."""

    def __init__(
        self, server: client.ApiServer, namespace: str, name: str, identity: str, seconds: float
    ) -> None:
        self.note: dict[str, str] = {}
        self._server = server
        self._about = f"Lease {namespace}/{name}"
        self._namespace, self._name = namespace, name
        self._identity = identity
        self._seconds = seconds
        self._seen = ""  # the holder and its last renewal
        self._seen_at = 0.0
        self._renewed = float("-inf")

    @property
    def held(self) -> bool:
        """Ours, and nobody else can have it yet."""
        return time.monotonic() < self._renewed + self._seconds * 2 / 3

    async def hold(self, note: dict[str, str]) -> bool:
        """Take or renew it, with ``note``; False while another has it. KubeError."""
        began = time.monotonic()
        leases = client.path_to(LEASES, self._namespace, "leases")
        lease = client.path_to(leases, self._name)
        try:
            found = await self._ask("GET", lease)
        except client.KubeError as error:
            if error.status != 404:
                raise
            found = None
        if found is not None and not self._may_take(found):
            return False
        body = self._body(note, found)
        try:
            if found is None:
                await self._ask("POST", leases, body)
            else:
                await self._ask("PUT", lease, body)
        except client.KubeError as error:
            if error.status != 409:
                raise
            return False  # another one was quicker
        self._renewed = began
        self.note = note
        return True

    def _may_take(self, found: dict[str, Any]) -> bool:
        spec = found.get("spec") or {}
        self.note = dict(found.get("metadata", {}).get("annotations") or {})
        holder = str(spec.get("holderIdentity") or "")
        if holder in ("", self._identity):
            return True
        seen = f"{holder} {spec.get('renewTime')}"
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        lasts = float(spec.get("leaseDurationSeconds") or self._seconds)
        return time.monotonic() > self._seen_at + lasts

    def _body(self, note: dict[str, str], found: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC)
        meta: dict[str, Any] = {
            "name": self._name, "namespace": self._namespace, "annotations": note,
        }  # fmt: skip
        if found is not None:
            meta["resourceVersion"] = found["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": round(self._seconds),
                "renewTime": f"{now:%Y-%m-%dT%H:%M:%S.%fZ}",
            },
        }

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return await self._server.request(
            method, path, body, about=self._about, deadline=ANSWER_SECONDS
        )


# --- PersistentVolumes and VolumeAttachments


@dataclass(frozen=True)
class PersistentVolume:
    """``created``: Unix seconds by the API server's clock. ``version``: changes with each write."""

    name: str
    uid: str
    version: str
    created: float
    driver: str
    handle: str
    annotations: Mapping[str, str]


def attachment_name(driver: str, handle: str, node: str) -> str:
    """The VolumeAttachment of a volume on a node, as the attach controller and kubelet call it
    (getAttachmentName in pkg/volume/csi/csi_attacher.go)."""
    digest = hashlib.sha256(f"{handle}{driver}{node}".encode()).hexdigest()
    return f"csi-{digest}"


class PersistentVolumes:
    """``deadline``: seconds for one request. All functions raise KubeError."""

    def __init__(self, server: client.ApiServer, deadline: float) -> None:
        self.server = server
        self.deadline = deadline

    async def persistent_volume(self, name: str) -> PersistentVolume:
        if not _NAME.fullmatch(name):
            raise client.KubeError(f"PersistentVolume {name!r}", "not the name of an object")
        about = f"PersistentVolume {name}"
        path = client.path_to("/api/v1/persistentvolumes", name)
        return _parse(
            await self.server.request("GET", path, about=about, deadline=self.deadline), about
        )

    async def attached(self, driver: str, handle: str, node: str) -> str:
        """The name of the PersistentVolume that is attached to the node with this handle."""
        name = attachment_name(driver, handle, node)
        about = f"VolumeAttachment {name}"
        found = await self.server.request(
            "GET", client.path_to("/apis/storage.k8s.io/v1/volumeattachments", name),
            about=about, deadline=self.deadline,
        )  # fmt: skip
        try:
            return str(found["spec"]["source"]["persistentVolumeName"])
        except (LookupError, TypeError):
            raise client.KubeError(about, "it names no PersistentVolume") from None

    async def annotate(self, volume: PersistentVolume, key: str, value: str) -> PersistentVolume:
        """With one annotation more. Refused (409) when somebody wrote to it since it was read."""
        about = f"PersistentVolume {volume.name}"
        body: dict[str, Any] = {
            "metadata": {"resourceVersion": volume.version, "annotations": {key: value}}
        }
        found = await self.server.request(
            "PATCH", client.path_to("/api/v1/persistentvolumes", volume.name), body,
            about=about, deadline=self.deadline, kind=client.MERGE_PATCH,
        )  # fmt: skip
        return _parse(found, about)


def _parse(found: Mapping[str, Any], about: str) -> PersistentVolume:
    try:
        meta, csi = found["metadata"], found["spec"].get("csi") or {}
        return PersistentVolume(
            name=str(meta["name"]),
            uid=str(meta["uid"]),
            version=str(meta["resourceVersion"]),
            created=kit.units.from_rfc3339(meta["creationTimestamp"]),
            driver=str(csi.get("driver", "")),
            handle=str(csi.get("volumeHandle", "")),
            annotations={str(k): str(v) for k, v in (meta.get("annotations") or {}).items()},
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise client.KubeError(about, f"the answer is not understood ({error!r})") from None
