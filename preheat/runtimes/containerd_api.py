"""containerd's methods, each changing one with its check, and the form of a hold as a lease.

A hold is a containerd lease, and the lease's labels are its whole state:

id       nodeagent-pull-<h>, nodeagent-pin-<h>, nodeagent-note-<h> (base.hold_id)
labels   nodeagent/owner = preheat        what our listing filters by
         nodeagent/role, /ref, /by, /state, /keep, /created, /image-id
         nodeagent/target = JSON          media type, digest and size of the top descriptor
         nodeagent/name.<n>               image records to restore
         containerd.io/gc.expire          pulls only: nothing stays for ever when an agent dies
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from typing import Any, cast

from google.protobuf import field_mask_pb2

from preheat.image import manifest
from preheat.runtimes import base
from preheat.runtimes import containerd_pb2 as pb
from preheat.runtimes.cri import LARGEST_REQUEST, Connection, Empty, Method, check_lease, require

# containerd's own limit for one label, key and value together.
LARGEST_LABEL = 4096
LARGEST_BLOB = 1 << 50
_UNPACKING = re.compile(rf"{base.OWN_PREFIX}sha256:[0-9a-f]{{64}}")
_INGEST = re.compile(r"[a-z]+-sha256:[0-9a-f]{64}")


# --- checks ---------------------------------------------------------------------------------------


def _plain(text: str, most: int = 1024) -> bool:
    return 0 < len(text) <= most and text.isprintable() and text.strip() == text


def _check_labels(labels: Mapping[str, str]) -> None:
    require(len(labels) <= 64, "more than 64 labels")
    for key, value in labels.items():
        require(_plain(key), "a label without a valid key")
        size = len(key.encode()) + len(value.encode())
        require(size <= LARGEST_LABEL, "a label over 4 KiB")


def _check_image(request: pb.CreateImageRequest | pb.UpdateImageRequest) -> None:
    target = request.image.target  # the empty message when it is absent: has no digest
    require(_plain(request.image.name), "an image without a valid name")
    require(manifest.is_digest(target.digest), "a target without a digest")
    require(_plain(target.media_type), "a target without a media type")
    require(0 < target.size < LARGEST_BLOB, "a target without a size")
    _check_labels(request.image.labels)


def _check_mask(mask: field_mask_pb2.FieldMask) -> None:
    """Only single fields are ever updated: an empty mask would replace the whole record."""
    require(len(mask.paths) > 0, "an update that names no field")
    for path in mask.paths:
        require(path.startswith("labels.") and _plain(path) and len(path) > 7, "a bad field name")


def _check_update_image(request: pb.UpdateImageRequest) -> None:
    _check_image(request)
    _check_mask(request.update_mask)


def _check_update_content(request: pb.UpdateContentRequest) -> None:
    require(manifest.is_digest(request.info.digest), "a content update without a digest")
    _check_labels(request.info.labels)
    _check_mask(request.update_mask)


def _check_create_lease(request: pb.CreateLeaseRequest) -> None:
    check_lease(request.id)
    _check_labels(request.labels)


def _check_delete_lease(request: pb.DeleteLeaseRequest) -> None:
    check_lease(request.id)


def _check_add_resource(request: pb.AddResourceRequest) -> None:
    check_lease(request.id)
    kind, name = request.resource.type, request.resource.id
    require(
        (kind == "content" and manifest.is_digest(name))
        or (kind == "ingests" and _plain(name))
        or (re.fullmatch(r"snapshots/[a-z0-9.-]+", kind) is not None and _plain(name)),
        "a lease resource of no known kind",
    )


def _check_abort(request: pb.AbortRequest) -> None:
    require(_INGEST.fullmatch(request.ref) is not None, "an abort without a valid ref")


def _check_write(request: pb.WriteContentRequest) -> None:
    require(request.action in (pb.STAT, pb.WRITE, pb.COMMIT), "a write of no known kind")
    require(_INGEST.fullmatch(request.ref) is not None, "a write without a valid ref")
    require(request.ref.startswith(base.OWN_PREFIX), "a write to an ingest that is not ours")
    require(0 <= request.offset <= request.total < LARGEST_BLOB, "a write beyond its end")
    require(len(request.data) <= LARGEST_REQUEST // 2, "a write of too many bytes at once")
    if request.action != pb.WRITE:
        require(manifest.is_digest(request.expected), "a write without its digest")
        require(not request.data, "data in a request that does not write")
    _check_labels(request.labels)


def _check_snapshotter(name: str) -> None:
    require(re.fullmatch(r"[a-z0-9.-]{1,64}", name) is not None, "an odd snapshotter")


def _check_snapshot(snapshotter: str, key: str) -> None:
    _check_snapshotter(snapshotter)
    require(_UNPACKING.fullmatch(key) is not None, "a snapshot that is not ours")


def _check_prepare(request: pb.PrepareSnapshotRequest) -> None:
    _check_snapshot(request.snapshotter, request.key)
    require(not request.parent or manifest.is_digest(request.parent), "a parent that is no layer")


def _check_remove(request: pb.SnapshotRequest) -> None:
    _check_snapshot(request.snapshotter, request.key)


def _check_remove_layer(request: pb.SnapshotRequest) -> None:
    _check_snapshotter(request.snapshotter)
    require(manifest.is_digest(request.key), "a layer without its id")


def _check_update_snapshot(request: pb.UpdateSnapshotRequest) -> None:
    _check_snapshotter(request.snapshotter)
    require(manifest.is_digest(request.info.name), "a layer without its id")
    _check_labels(request.info.labels)
    _check_mask(request.update_mask)


def _check_apply(request: pb.ApplyRequest) -> None:
    require(manifest.is_digest(request.diff.digest), "a layer without its digest")
    require(_plain(request.diff.media_type), "a layer without its media type")
    require(0 < request.diff.size < LARGEST_BLOB, "a layer without its size")
    require(0 < len(request.mounts) <= 8, "a layer without a place to go to")
    for mount in request.mounts:
        require(_plain(mount.type) and _plain(mount.source), "a mount without type or source")


# --- methods --------------------------------------------------------------------------------------

_SERVICES = "/containerd.services."
_IMAGES = _SERVICES + "images.v1.Images/"
_CONTENT = _SERVICES + "content.v1.Content/"
_LEASES = _SERVICES + "leases.v1.Leases/"
_SNAPSHOTS = _SERVICES + "snapshots.v1.Snapshots/"

VERSION = Method(_SERVICES + "version.v1.Version/Version", Empty, pb.VersionResponse)
LIST_IMAGES = Method(_IMAGES + "List", pb.ListRequest, pb.ListImagesResponse)
GET_IMAGE = Method(_IMAGES + "Get", pb.GetImageRequest, pb.ImageResponse)
LIST_CONTENT = Method(_CONTENT + "List", pb.ListRequest, pb.ListContentResponse)
CONTENT_INFO = Method(_CONTENT + "Info", pb.ContentInfoRequest, pb.ContentInfoResponse)
READ_CONTENT = Method(_CONTENT + "Read", pb.ReadContentRequest, pb.ReadContentResponse)
LIST_STATUSES = Method(_CONTENT + "ListStatuses", pb.ListRequest, pb.ListStatusesResponse)
LIST_LEASES = Method(_LEASES + "List", pb.ListRequest, pb.ListLeasesResponse)
LIST_RESOURCES = Method(
    _LEASES + "ListResources", pb.ListResourcesRequest, pb.ListResourcesResponse
)
LIST_SNAPSHOTS = Method(_SNAPSHOTS + "List", pb.ListSnapshotsRequest, pb.ListSnapshotsResponse)
STAT_SNAPSHOT = Method(_SNAPSHOTS + "Stat", pb.SnapshotRequest, Empty)  # asked for existence only
USAGE = Method(_SNAPSHOTS + "Usage", pb.SnapshotRequest, pb.UsageResponse)
SUBSCRIBE = Method(_SERVICES + "events.v1.Events/Subscribe", pb.ListRequest, pb.Envelope)

CREATE_IMAGE = Method(_IMAGES + "Create", pb.CreateImageRequest, pb.ImageResponse, _check_image)
UPDATE_IMAGE = Method(
    _IMAGES + "Update", pb.UpdateImageRequest, pb.ImageResponse, _check_update_image
)
UPDATE_CONTENT = Method(
    _CONTENT + "Update", pb.UpdateContentRequest, pb.ContentInfoResponse, _check_update_content
)
ABORT = Method(_CONTENT + "Abort", pb.AbortRequest, Empty, _check_abort)
WRITE = Method(_CONTENT + "Write", pb.WriteContentRequest, pb.WriteContentResponse, _check_write)
CREATE_LEASE = Method(_LEASES + "Create", pb.CreateLeaseRequest, Empty, _check_create_lease)
DELETE_LEASE = Method(_LEASES + "Delete", pb.DeleteLeaseRequest, Empty, _check_delete_lease)
ADD_RESOURCE = Method(_LEASES + "AddResource", pb.AddResourceRequest, Empty, _check_add_resource)

PREPARE = Method(
    _SNAPSHOTS + "Prepare", pb.PrepareSnapshotRequest, pb.PrepareSnapshotResponse, _check_prepare
)
REMOVE = Method(_SNAPSHOTS + "Remove", pb.SnapshotRequest, Empty, _check_remove)
REMOVE_LAYER = Method(_SNAPSHOTS + "Remove", pb.SnapshotRequest, Empty, _check_remove_layer)
UPDATE_SNAPSHOT = Method(
    _SNAPSHOTS + "Update", pb.UpdateSnapshotRequest, Empty, _check_update_snapshot
)
APPLY = Method(_SERVICES + "diff.v1.Diff/Apply", pb.ApplyRequest, pb.ApplyResponse, _check_apply)

# The fuzz test sends these.
CHANGING: tuple[Method[Any, Any], ...] = (
    *(PREPARE, REMOVE, REMOVE_LAYER, UPDATE_SNAPSHOT, APPLY),
    *(CREATE_IMAGE, UPDATE_IMAGE, UPDATE_CONTENT, ABORT, WRITE),
    *(CREATE_LEASE, DELETE_LEASE, ADD_RESOURCE),
)


async def images(connection: Connection, digest: str = "") -> list[pb.Image]:
    """All image records, or those of one image."""
    filters = [f"target.digest=={digest}"] if digest else []
    answer = await connection.read(LIST_IMAGES, pb.ListRequest(filters=filters))
    return [each for each in answer.images if each.HasField("target")]


# --- holds as leases ------------------------------------------------------------------------------

OWNER_FILTER = 'labels."nodeagent/owner"==preheat'
EXPIRE = "containerd.io/gc.expire"
MOST_NAMES = 16
FORMAT = 1  # of our leases' labels; leases without the label are of format 1
_P = "nodeagent/"


def lease_labels(hold: base.Hold) -> dict[str, str]:
    found = {
        _P + "owner": "preheat",
        _P + "format": str(FORMAT),
        _P + "role": hold.role,
        _P + "ref": hold.ref,
        _P + "by": hold.by,
        _P + "created": f"{hold.created:.0f}",
    }
    texts = {"state": hold.state, "keep": hold.keep, "image-id": hold.image_id}
    for key, value in texts.items():
        if value:
            found[_P + key] = value
    if hold.target is not None:
        found[_P + "target"] = json.dumps(dataclasses.asdict(hold.target), separators=(",", ":"))
    for position, name in enumerate(hold.names[:MOST_NAMES]):
        found[f"{_P}name.{position}"] = name
    if hold.expires is not None:
        when = datetime.datetime.fromtimestamp(hold.expires, datetime.UTC)
        found[EXPIRE] = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return found


def is_newer(lease: pb.Lease) -> bool:
    """Whether a newer agent made the lease."""
    found = lease.labels.get(_P + "format", "1")
    return not found.isdecimal() or int(found) > FORMAT


def hold_of(lease: pb.Lease) -> base.Hold | None:
    """The hold that a lease is; None when it is not ours, of a newer agent or makes no sense."""
    if is_newer(lease):
        return None
    found = dict(lease.labels)
    role, by = found.get(_P + "role", ""), found.get(_P + "by", "")
    ref = found.get(_P + "ref", "")
    if role not in ("pull", "pin", "note") or by not in ("operator", "policy", "retained"):
        return None
    try:
        target = _target(found.get(_P + "target"))
        created = float(found.get(_P + "created", "0"))
        expires = None
        if EXPIRE in found:
            expires = datetime.datetime.fromisoformat(found[EXPIRE]).timestamp()
    except (ValueError, TypeError, KeyError):
        return None
    if not ref or (role == "pin" and target is None):
        return None
    keys = (f"{_P}name.{position}" for position in range(MOST_NAMES))
    return base.Hold(
        id=lease.id,
        role=cast(base.Role, role),
        ref=ref,
        by=cast(base.By, by),
        target=target,
        image_id=found.get(_P + "image-id", ""),
        names=tuple(found[key] for key in keys if key in found),
        state=found.get(_P + "state", ""),
        keep=found.get(_P + "keep", ""),
        created=created,
        expires=expires,
    )


def _target(text: str | None) -> manifest.Target | None:
    if text is None:
        return None
    value = json.loads(text)
    target = manifest.Target(str(value["media_type"]), str(value["digest"]), int(value["size"]))
    if not manifest.is_digest(target.digest) or target.size <= 0 or not target.media_type:
        raise ValueError(text)
    return target
