"""PersistentVolumes and VolumeAttachments, always by name: a list of them has megabytes."""

import datetime
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kube import client

_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


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
            created=datetime.datetime.fromisoformat(meta["creationTimestamp"]).timestamp(),
            driver=str(csi.get("driver", "")),
            handle=str(csi.get("volumeHandle", "")),
            annotations={str(k): str(v) for k, v in (meta.get("annotations") or {}).items()},
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise client.KubeError(about, f"the answer is not understood ({error!r})") from None
