"""The generated messages: current, numbered as published, and strict about what they read."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from preheat.runtimes import base, containerd_api, cri, cri_pb2
from preheat.runtimes import containerd_pb2 as pb
from tests.testbed import published as published_protos
from tests.testbed import waiting

ROOT = Path(__file__).parents[3]


def test_generated_modules_are_current(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts" / "protobuf.sh", str(tmp_path)], check=True, timeout=waiting.limit(50)
    )
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*"))

    assert len(made) == 8
    for path in made:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), (
            f"run protobuf.sh: {path}"
        )


_SERVICES = "containerd.services."
# Our message -> all published ones whose place it takes; of the same name where it is not here.
_OURS = {
    "containerd": {
        "VersionResponse": ["version.v1.VersionResponse"],
        "Descriptor": ["containerd.types.Descriptor"],
        "Image": ["images.v1.Image"],
        "ListImagesResponse": ["images.v1.ListImagesResponse"],
        "GetImageRequest": ["images.v1.GetImageRequest"],
        "CreateImageRequest": ["images.v1.CreateImageRequest"],
        "UpdateImageRequest": ["images.v1.UpdateImageRequest"],
        "ImageResponse": [f"images.v1.{kind}ImageResponse" for kind in ("Get", "Create", "Update")],
        "ImageDelete": ["containerd.services.images.v1.ImageDelete"],
        "ListRequest": [
            "images.v1.ListImagesRequest",
            "content.v1.ListContentRequest",
            "content.v1.ListStatusesRequest",
            "leases.v1.ListRequest",
            "events.v1.SubscribeRequest",
        ],
        "ContentInfo": ["content.v1.Info"],
        "ListContentResponse": ["content.v1.ListContentResponse"],
        "ContentInfoRequest": ["content.v1.InfoRequest"],
        "ContentInfoResponse": ["content.v1.InfoResponse", "content.v1.UpdateResponse"],
        "UpdateContentRequest": ["content.v1.UpdateRequest"],
        "ReadContentRequest": ["content.v1.ReadContentRequest"],
        "ReadContentResponse": ["content.v1.ReadContentResponse"],
        "IngestStatus": ["content.v1.Status"],
        "ListStatusesResponse": ["content.v1.ListStatusesResponse"],
        "AbortRequest": ["content.v1.AbortRequest"],
        "WriteContentRequest": ["content.v1.WriteContentRequest"],
        "WriteContentResponse": ["content.v1.WriteContentResponse"],
        "Lease": ["leases.v1.Lease"],
        "ListLeasesResponse": ["leases.v1.ListResponse"],
        "CreateLeaseRequest": ["leases.v1.CreateRequest"],
        "DeleteLeaseRequest": ["leases.v1.DeleteRequest"],
        "LeaseResource": ["leases.v1.Resource"],
        "AddResourceRequest": ["leases.v1.AddResourceRequest"],
        "ListResourcesRequest": ["leases.v1.ListResourcesRequest"],
        "ListResourcesResponse": ["leases.v1.ListResourcesResponse"],
        "ListSnapshotsRequest": ["snapshots.v1.ListSnapshotsRequest"],
        "SnapshotInfo": ["snapshots.v1.Info"],
        "ListSnapshotsResponse": ["snapshots.v1.ListSnapshotsResponse"],
        "SnapshotRequest": [
            f"snapshots.v1.{kind}Request" for kind in ("StatSnapshot", "Usage", "RemoveSnapshot")
        ],
        "UsageResponse": ["snapshots.v1.UsageResponse"],
        "UpdateSnapshotRequest": ["snapshots.v1.UpdateSnapshotRequest"],
        "Mount": ["containerd.types.Mount"],
        "PrepareSnapshotRequest": ["snapshots.v1.PrepareSnapshotRequest"],
        "PrepareSnapshotResponse": ["snapshots.v1.PrepareSnapshotResponse"],
        "CommitSnapshotRequest": ["snapshots.v1.CommitSnapshotRequest"],
        "ApplyRequest": ["diff.v1.ApplyRequest"],
        "ApplyResponse": ["diff.v1.ApplyResponse"],
        "Envelope": ["containerd.types.Envelope"],
    },
    "cri": {"ImageRequest": ["runtime.v1.ImageStatusRequest", "runtime.v1.RemoveImageRequest"]},
}
# The values of our enums are unprefixed names of these.
_ENUMS = {"WriteAction": "content.v1.WriteAction", "SnapshotKind": "snapshots.v1.Kind"}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pool.DescriptorPool:
    return published_protos.messages(Path(sys.executable), tmp_path_factory.mktemp("protos"))


def _full(name: str) -> str:
    return name if name.startswith(("containerd.", "runtime.")) else _SERVICES + name


def _field(field: Any) -> tuple[Any, ...]:
    return field.number, field.type, field.is_repeated


def _is_map(message: Any) -> bool:
    return bool(message.GetOptions().map_entry)


def _differences(own: Any, other: Any) -> list[str]:
    """Fields of ``own`` that are not those of ``other``."""
    found = []
    for field in own.fields:
        theirs = other.fields_by_name.get(field.name)
        if theirs is None or _field(field) != _field(theirs):
            found.append(f"{own.full_name}.{field.name} is not as in {other.full_name}")
        elif field.message_type is not None and _is_map(field.message_type):
            found += _differences(field.message_type, theirs.message_type)
    return found


@pytest.mark.real  # the first run fetches them, with go
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "module"), [("containerd", pb), ("cri", cri_pb2)])
def test_messages_have_the_published_numbers(
    published: descriptor_pool.DescriptorPool, kind: str, module: Any
) -> None:
    """Every message and every field, with number, type and whether it is repeated."""
    wrong = []
    for name, own in module.DESCRIPTOR.message_types_by_name.items():
        default = [f"runtime.v1.{name}"] if kind == "cri" else []
        places = _OURS[kind].get(name, default)
        assert places, f"which published message is {name}?"
        for place in places:
            wrong += _differences(own, published.FindMessageTypeByName(_full(place)))
    for name, own in module.DESCRIPTOR.enum_types_by_name.items():
        theirs = published.FindEnumTypeByName(_full(_ENUMS[name]))
        numbers = {each.name: each.number for each in theirs.values}
        wrong += [v.name for v in own.values if numbers.get(v.name) != v.number]
    assert wrong == []


@pytest.mark.real
@pytest.mark.timeout(300)
def test_wrong_number_is_found(published: descriptor_pool.DescriptorPool) -> None:
    """The control: the same comparison, with a wrong number and a wrong type."""
    file = descriptor_pb2.FileDescriptorProto(name="x.proto", package="x", syntax="proto3")
    message = file.message_type.add(name="Status")
    for name, number, kind in (("ref", 3, 9), ("offset", 5, 3), ("total", 5, 4)):
        message.field.add(name=name, number=number, type=kind, label=1)
    message.field[1].number = 6
    pool = descriptor_pool.DescriptorPool()
    own = pool.AddSerializedFile(file.SerializeToString()).message_types_by_name["Status"]
    other = published.FindMessageTypeByName(_full("content.v1.Status"))

    assert [text.split()[0] for text in _differences(own, other)] == [
        "x.Status.offset",
        "x.Status.total",
    ]


def test_messages_skip_unknown_fields() -> None:
    unknown = bytes.fromhex("7a03616263") + b"\x0a\x01x" + bytes.fromhex("f801ff01")

    assert pb.GetImageRequest.FromString(unknown).name == "x"


@pytest.mark.parametrize(
    "data", [b"\x0a\xff", b"\x0a\x01\xff", b"\xff"], ids=["cut", "text", "tag"]
)
def test_decode_raises_for_broken_answers(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.ImageDelete.FromString(data)
    with pytest.raises(base.RuntimeCallError, match="cannot be decoded") as caught:
        containerd_api.VERSION.decode(data)
    assert caught.value.code == "INTERNAL"


def test_checks_bound_the_credentials() -> None:
    request = cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image="r.e/a:b"))
    assert cri.PULL_IMAGE.check is not None
    cri.PULL_IMAGE.check(request)
    request.auth.password = "x" * (cri.LARGEST_SECRET + 1)

    with pytest.raises(base.InvalidCallError):
        cri.PULL_IMAGE.check(request)
