"""References and the shape of an image."""

import json

import pytest

from preheat import hub, manifest

DIGEST = "sha256:" + "a" * 64
OCI = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("reg.example/a/b:v1", "reg.example/a/b:v1"),
        ("reg.example:5000/a", "reg.example:5000/a:latest"),
        ("localhost/a:b", "localhost/a:b"),
        (f"reg.example/a:v1@{DIGEST}", f"reg.example/a@{DIGEST}"),
        (f"{hub.NAME}/ubuntu", f"{hub.NAME}/library/ubuntu:latest"),
        (f"{hub.INDEX}/nvidia/cuda:12", f"{hub.NAME}/nvidia/cuda:12"),
    ],
)
def test_parse_gives_one_form(text: str, canonical: str) -> None:
    assert manifest.parse(text).text == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ubuntu",
        "library/ubuntu:1",
        "reg.example/A:v1",
        "reg.example/a:",
        "reg.example/a@sha256:1",
        "reg.example:99999/a:b",
        "reg.example/a b",
        "-x.example/a",
        "reg.example//a",
        "x" * 600,
    ],
)
def test_parse_refuses_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match=r"reference|registry|port"):
        manifest.parse(text)


class Documents:
    """Documents by digest, as a registry holds them."""

    def __init__(self) -> None:
        self.by_digest: dict[str, bytes] = {}

    def put(self, value: object) -> dict[str, object]:
        data = json.dumps(value).encode()
        self.by_digest[manifest.digest_of(data)] = data
        return {"digest": manifest.digest_of(data), "size": len(data)}

    async def read(self, digest: str) -> bytes:
        return self.by_digest[digest]


def top_of(documents: Documents, value: object, media_type: str) -> manifest.Target:
    digest = str(documents.put(value)["digest"])
    return manifest.Target(media_type, digest, len(documents.by_digest[digest]))


async def test_shape_reads_index_manifest_and_config() -> None:
    documents = Documents()
    diff_ids = [manifest.digest_of(b"one"), manifest.digest_of(b"two")]
    config = documents.put({"rootfs": {"diff_ids": diff_ids}})
    layers = [{"digest": manifest.digest_of(bytes([n])), "size": n + 1} for n in range(2)]
    image = documents.put({"config": config, "layers": layers})
    platforms = [
        {**documents.put({}), "platform": {"os": "linux", "architecture": "s390x"}},
        {**image, "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    top = top_of(documents, {"manifests": platforms}, INDEX)

    shape = await manifest.shape(top, documents.read, "linux/amd64")

    assert [digest for digest, _ in shape.documents] == [
        top.digest,
        image["digest"],
        config["digest"],
    ]
    assert shape.image_id == config["digest"]
    second = manifest.digest_of(f"{diff_ids[0]} {diff_ids[1]}".encode())
    assert [layer.chain_id for layer in shape.layers] == [diff_ids[0], second]
    assert shape.bytes_total == sum(size for _, size in shape.documents) + 1 + 2


@pytest.mark.parametrize(
    "value",
    [
        [],
        {"layers": []},
        {"config": {"digest": "x", "size": 1}},
        {"config": {"digest": DIGEST, "size": True}},
        {"manifests": [{"platform": {"os": "linux", "architecture": "arm64"}}]},
    ],
)
async def test_shape_refuses_malformed_documents(value: object) -> None:
    documents = Documents()
    top = top_of(documents, value, OCI)

    with pytest.raises(manifest.BadImageError):
        await manifest.shape(top, documents.read, "linux/amd64")


async def test_shape_refuses_layers_without_matching_ids() -> None:
    documents = Documents()
    config = documents.put({"rootfs": {"diff_ids": []}})
    top = top_of(documents, {"config": config, "layers": [{"digest": DIGEST, "size": 1}]}, OCI)

    with pytest.raises(manifest.BadImageError, match="1 layers but 0"):
        await manifest.shape(top, documents.read, "linux/amd64")
