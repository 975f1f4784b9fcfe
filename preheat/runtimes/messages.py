"""The messages of containerd's services and of CRI that the agent uses, and only their used fields.

Field numbers are those of containerd's api/services/*/v1 and api/types, and of the CRI's
runtime.v1 protocol; both are stable interfaces in which a number never changes its meaning.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from preheat.runtimes.wire import Message, mapping, number


@dataclass(frozen=True)
class Empty(Message):
    pass


@dataclass(frozen=True)
class Timestamp(Message):
    seconds: int = number(1, 0)
    nanos: int = number(2, 0)


@dataclass(frozen=True)
class AnyMessage(Message):
    type_url: str = number(1, "")
    value: bytes = number(2, b"")


@dataclass(frozen=True)
class FieldMask(Message):
    paths: tuple[str, ...] = number(1, ())


@dataclass(frozen=True)
class Descriptor(Message):
    media_type: str = number(1, "")
    digest: str = number(2, "")
    size: int = number(3, 0)


# --- images ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image(Message):
    name: str = number(1, "")
    labels: Mapping[str, str] = mapping(2)
    target: Descriptor | None = number(3)


@dataclass(frozen=True)
class ImageRequest(Message):
    """Images.Create, and Images.Get/Update by its first field."""

    image: Image | None = number(1)


@dataclass(frozen=True)
class UpdateImageRequest(Message):
    image: Image | None = number(1)
    update_mask: FieldMask | None = number(2)


@dataclass(frozen=True)
class ImageResponse(Message):
    image: Image | None = number(1)


@dataclass(frozen=True)
class ListRequest(Message):
    """The filters of Images.List, Content.ListStatuses, Leases.List, Content.List, Subscribe."""

    filters: tuple[str, ...] = number(1, ())


@dataclass(frozen=True)
class ImageList(Message):
    images: tuple[Image, ...] = number(1, ())


@dataclass(frozen=True)
class Name(Message):
    name: str = number(1, "")


@dataclass(frozen=True)
class DeleteImageRequest(Message):
    name: str = number(1, "")
    sync: bool = number(2, False)


# --- content --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContentInfo(Message):
    digest: str = number(1, "")
    size: int = number(2, 0)
    labels: Mapping[str, str] = mapping(5)


@dataclass(frozen=True)
class ContentInfos(Message):
    info: tuple[ContentInfo, ...] = number(1, ())


@dataclass(frozen=True)
class ContentInfoResponse(Message):
    info: ContentInfo | None = number(1)


@dataclass(frozen=True)
class Digest(Message):
    digest: str = number(1, "")


@dataclass(frozen=True)
class UpdateContentRequest(Message):
    info: ContentInfo | None = number(1)
    update_mask: FieldMask | None = number(2)


@dataclass(frozen=True)
class ReadRequest(Message):
    digest: str = number(1, "")
    offset: int = number(2, 0)
    size: int = number(3, 0)


@dataclass(frozen=True)
class ReadResponse(Message):
    offset: int = number(1, 0)
    data: bytes = number(2, b"")


@dataclass(frozen=True)
class Status(Message):
    ref: str = number(3, "")
    offset: int = number(4, 0)
    total: int = number(5, 0)


@dataclass(frozen=True)
class Statuses(Message):
    statuses: tuple[Status, ...] = number(1, ())


@dataclass(frozen=True)
class AbortRequest(Message):
    ref: str = number(1, "")


STAT, WRITE, COMMIT = 0, 1, 2


@dataclass(frozen=True)
class WriteRequest(Message):
    action: int = number(1, 0)
    ref: str = number(2, "")
    total: int = number(3, 0)
    expected: str = number(4, "")
    offset: int = number(5, 0)
    data: bytes = number(6, b"")
    labels: Mapping[str, str] = mapping(7)


@dataclass(frozen=True)
class WriteResponse(Message):
    action: int = number(1, 0)
    offset: int = number(4, 0)
    total: int = number(5, 0)
    digest: str = number(6, "")


# --- leases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lease(Message):
    id: str = number(1, "")
    created_at: Timestamp | None = number(2)
    labels: Mapping[str, str] = mapping(3)


@dataclass(frozen=True)
class CreateLeaseRequest(Message):
    id: str = number(1, "")
    labels: Mapping[str, str] = mapping(3)


@dataclass(frozen=True)
class LeaseResponse(Message):
    lease: Lease | None = number(1)


@dataclass(frozen=True)
class DeleteLeaseRequest(Message):
    id: str = number(1, "")
    sync: bool = number(2, False)


@dataclass(frozen=True)
class Leases(Message):
    leases: tuple[Lease, ...] = number(1, ())


@dataclass(frozen=True)
class Resource(Message):
    id: str = number(1, "")
    type: str = number(2, "")


@dataclass(frozen=True)
class LeaseResourceRequest(Message):
    """Leases.AddResource and Leases.DeleteResource."""

    id: str = number(1, "")
    resource: Resource | None = number(2)


@dataclass(frozen=True)
class LeaseId(Message):
    id: str = number(1, "")


@dataclass(frozen=True)
class Resources(Message):
    resources: tuple[Resource, ...] = number(1, ())


# --- snapshots, events, version -------------------------------------------------------------------


@dataclass(frozen=True)
class ListSnapshotsRequest(Message):
    snapshotter: str = number(1, "")
    filters: tuple[str, ...] = number(2, ())


@dataclass(frozen=True)
class SnapshotInfo(Message):
    name: str = number(1, "")
    parent: str = number(2, "")
    kind: int = number(3, 0)  # 1 view, 2 active, 3 committed


@dataclass(frozen=True)
class SnapshotInfos(Message):
    info: tuple[SnapshotInfo, ...] = number(1, ())


@dataclass(frozen=True)
class StatSnapshotResponse(Message):
    info: SnapshotInfo | None = number(1)


@dataclass(frozen=True)
class UsageRequest(Message):
    """Snapshots.Usage and Snapshots.Stat."""

    snapshotter: str = number(1, "")
    key: str = number(2, "")


@dataclass(frozen=True)
class Usage(Message):
    size: int = number(1, 0)
    inodes: int = number(2, 0)


@dataclass(frozen=True)
class Envelope(Message):
    namespace: str = number(2, "")
    topic: str = number(3, "")
    event: AnyMessage | None = number(4)


@dataclass(frozen=True)
class VersionResponse(Message):
    version: str = number(1, "")
    revision: str = number(2, "")


# --- CRI base.v1 -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageSpec(Message):
    image: str = number(1, "")


@dataclass(frozen=True, repr=False)
class AuthConfig(Message):
    """Secret: it has no repr on purpose.

    Without server_address, as the kubelet sends it: containerd compares that with the host it asks,
    which for some registries and all mirrors is another one.
    """

    username: str = number(1, "")
    password: str = number(2, "")
    identity_token: str = number(5, "")
    registry_token: str = number(6, "")


@dataclass(frozen=True)
class PullImageRequest(Message):
    image: ImageSpec | None = number(1)
    auth: AuthConfig | None = number(2)


@dataclass(frozen=True)
class PullImageResponse(Message):
    image_ref: str = number(1, "")


@dataclass(frozen=True)
class ImageSpecRequest(Message):
    """ImageStatus and RemoveImage."""

    image: ImageSpec | None = number(1)


@dataclass(frozen=True)
class CriImage(Message):
    id: str = number(1, "")
    repo_tags: tuple[str, ...] = number(2, ())
    repo_digests: tuple[str, ...] = number(3, ())
    size: int = number(4, 0)
    pinned: bool = number(8, False)


@dataclass(frozen=True)
class CriImages(Message):
    images: tuple[CriImage, ...] = number(1, ())


@dataclass(frozen=True)
class ImageStatusResponse(Message):
    image: CriImage | None = number(1)


@dataclass(frozen=True)
class FilesystemId(Message):
    mountpoint: str = number(1, "")


@dataclass(frozen=True)
class UInt64(Message):
    value: int = number(1, 0)


@dataclass(frozen=True)
class FilesystemUsage(Message):
    timestamp: int = number(1, 0)
    fs_id: FilesystemId | None = number(2)
    used_bytes: UInt64 | None = number(3)


@dataclass(frozen=True)
class ImageFsInfoResponse(Message):
    image_filesystems: tuple[FilesystemUsage, ...] = number(1, ())


@dataclass(frozen=True)
class Container(Message):
    id: str = number(1, "")
    image: ImageSpec | None = number(4)
    image_ref: str = number(5, "")
    state: int = number(6, 0)  # 0 created, 1 running, 2 exited, 3 unknown


@dataclass(frozen=True)
class Containers(Message):
    containers: tuple[Container, ...] = number(1, ())


@dataclass(frozen=True)
class CriVersion(Message):
    version: str = number(1, "")
    runtime_name: str = number(2, "")
    runtime_version: str = number(3, "")
