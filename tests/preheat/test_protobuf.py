"""The generated messages: current, numbered as published, and strict about what they read."""

import subprocess
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError

from preheat.runtimes import base, containerd_api, cri, cri_pb2
from preheat.runtimes import containerd_pb2 as pb

ROOT = Path(__file__).parents[2]


def test_generated_modules_are_current(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "protobuf.sh", str(tmp_path)], check=True, timeout=50)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2.py*"))

    assert len(made) == 6
    for path in made:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), (
            f"run protobuf.sh: {path}"
        )


def test_messages_have_the_published_numbers() -> None:
    """Bytes built by hand from containerd's and CRI's published field numbers."""
    descriptor = b"\x0a\x01t" + b"\x12\x01d" + b"\x18\x96\x01"  # media_type, digest, size 150
    label = b"\x12\x06" + b"\x0a\x01k" + b"\x12\x01v"
    image = b"\x0a\x01n" + label + b"\x1a" + bytes([len(descriptor)]) + descriptor
    assert pb.Image.FromString(image) == pb.Image(
        name="n", labels={"k": "v"}, target=pb.Descriptor(media_type="t", digest="d", size=150)
    )
    status = b"\x1a\x01r" + b"\x20\x05" + b"\x28\x07"  # ref 3, offset 4, total 5
    assert pb.IngestStatus.FromString(status) == pb.IngestStatus(ref="r", offset=5, total=7)
    write = b"\x08\x02" + b"\x12\x01r" + b"\x18\x09" + b"\x22\x01d" + b"\x28\x03" + b"\x32\x01x"
    assert pb.WriteContentRequest.FromString(write) == pb.WriteContentRequest(
        action=pb.COMMIT, ref="r", total=9, expected="d", offset=3, data=b"x"
    )
    auth = b"\x0a\x01u" + b"\x12\x01p" + b"\x2a\x01i" + b"\x32\x01r"  # 1, 2, 5, 6
    assert cri_pb2.AuthConfig.FromString(auth) == cri_pb2.AuthConfig(
        username="u", password="p", identity_token="i", registry_token="r"
    )
    listed = b"\x0a\x01i" + b"\x12\x01t" + b"\x1a\x01d" + b"\x20\x05" + b"\x40\x01"  # pinned 8
    assert cri_pb2.Image.FromString(listed) == cri_pb2.Image(
        id="i", repo_tags=["t"], repo_digests=["d"], size=5, pinned=True
    )


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
