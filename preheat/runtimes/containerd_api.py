"""containerd's methods, each changing one with its check."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

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


def _plain(text: str) -> bool:
    return 0 < len(text) <= 1024 and text.isprintable() and text.strip() == text


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


def _check_ours(request: pb.SnapshotRequest | pb.PrepareSnapshotRequest) -> None:
    _check_snapshotter(request.snapshotter)
    require(_UNPACKING.fullmatch(request.key) is not None, "a snapshot that is not ours")


def _check_prepare(request: pb.PrepareSnapshotRequest) -> None:
    _check_ours(request)
    require(not request.parent or manifest.is_digest(request.parent), "a parent that is no layer")


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
CLEAR_MARK = dataclasses.replace(UPDATE_IMAGE, frees=True)
UPDATE_CONTENT = Method(
    _CONTENT + "Update", pb.UpdateContentRequest, pb.ContentInfoResponse, _check_update_content
)
ABORT = Method(_CONTENT + "Abort", pb.AbortRequest, Empty, _check_abort)
WRITE = Method(_CONTENT + "Write", pb.WriteContentRequest, pb.WriteContentResponse, _check_write)
CREATE_LEASE = Method(_LEASES + "Create", pb.CreateLeaseRequest, Empty, _check_create_lease)
# A note holds nothing. It comes before a release, so that nobody pins the image again.
CREATE_NOTE = dataclasses.replace(CREATE_LEASE, frees=True)
DELETE_LEASE = Method(
    _LEASES + "Delete", pb.DeleteLeaseRequest, Empty, lambda r: check_lease(r.id), frees=True
)
ADD_RESOURCE = Method(_LEASES + "AddResource", pb.AddResourceRequest, Empty, _check_add_resource)

PREPARE = Method(
    _SNAPSHOTS + "Prepare", pb.PrepareSnapshotRequest, pb.PrepareSnapshotResponse, _check_prepare
)
REMOVE = Method(_SNAPSHOTS + "Remove", pb.SnapshotRequest, Empty, _check_ours)
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


def label_mask(*labels: str) -> field_mask_pb2.FieldMask:
    return field_mask_pb2.FieldMask(paths=[f"labels.{label}" for label in labels])


async def images(connection: Connection, digest: str = "") -> list[pb.Image]:
    """All image records, or those of one image."""
    filters = [f"target.digest=={digest}"] if digest else []
    answer = await connection.read(LIST_IMAGES, pb.ListRequest(filters=filters))
    return [each for each in answer.images if each.HasField("target")]
