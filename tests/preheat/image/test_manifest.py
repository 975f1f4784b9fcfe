"""References and the shape of an image."""

import json

import pytest

from preheat.image import manifest

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
        (f"{manifest.HUB}/ubuntu", f"{manifest.HUB}/library/ubuntu:latest"),
        (f"{manifest.HUB_INDEX}/nvidia/cuda:12", f"{manifest.HUB}/nvidia/cuda:12"),
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


def nested(documents: Documents, indexes: int, **config: str) -> manifest.Target:
    """An image below so many indexes whose entries have no platform."""
    config = config or {"os": "linux", "architecture": "amd64"}
    made = documents.put({"rootfs": {"diff_ids": [DIGEST]}, **config})
    body: object = {"config": made, "layers": [{"digest": DIGEST, "size": 1}]}
    for _ in range(indexes):
        body = {"manifests": [documents.put(body)]}
    return top_of(documents, body, INDEX if indexes else OCI)


@pytest.mark.parametrize("indexes", range(4))
async def test_indexes_in_one_another_are_followed(indexes: int) -> None:
    """buildx makes them for images with attestations."""
    documents = Documents()
    shape = await manifest.shape(nested(documents, indexes), documents.read, "linux/amd64")
    assert len(shape.documents) == indexes + 2
    assert len(shape.layers) == 1


async def test_indexes_in_one_another_end() -> None:
    documents = Documents()
    with pytest.raises(manifest.BadImageError, match="more than 3 indexes in one another"):
        await manifest.shape(nested(documents, 4), documents.read, "linux/amd64")


@pytest.mark.parametrize(
    ("config", "runs"),
    [
        ({"os": "linux", "architecture": "amd64"}, True),
        ({"os": "linux", "architecture": "386"}, True),
        ({"os": "linux"}, False),
        ({"os": "linux", "architecture": "arm64"}, False),
        ({"os": "windows", "architecture": "amd64"}, False),
    ],
)
async def test_the_config_decides_where_an_index_names_no_platform(
    config: dict[str, str], runs: bool
) -> None:
    documents = Documents()
    top = nested(documents, 1, **config)
    if runs:
        await manifest.shape(top, documents.read, "linux/amd64")
        return
    with pytest.raises(manifest.BadImageError, match="no image for linux/amd64, only") as raised:
        await manifest.shape(top, documents.read, "linux/amd64")
    # Another entry without a platform may fit: the runtime tries it.
    assert not isinstance(raised.value, manifest.NoPlatformError)


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


@pytest.mark.parametrize(
    "body",
    [b"[" + b"{}," * 600_000 + b"0]", b'{"a":' + b"[" + b"1," * 600_000 + b"1]}"],
    ids=["objects", "numbers"],
)
def test_a_document_of_very_many_values_is_not_read(body: bytes) -> None:
    """8 MiB of empty objects are 300 MB of memory, for anybody's image on the node."""
    with pytest.raises(manifest.BadImageError, match="more than 500000 values"):
        manifest.load(body, "config")


async def test_shape_refuses_layers_without_matching_ids() -> None:
    documents = Documents()
    config = documents.put({"rootfs": {"diff_ids": []}})
    top = top_of(documents, {"config": config, "layers": [{"digest": DIGEST, "size": 1}]}, OCI)

    with pytest.raises(manifest.BadImageError, match="1 layers but 0"):
        await manifest.shape(top, documents.read, "linux/amd64")


# What containerd's platforms.Only chooses of an index: the position, None for none.
# tests/preheat/test_presence.py asks real ones the same.
CHOICES: dict[str, tuple[str, list[str], int | None]] = {
    "plain": ("linux/amd64", ["linux/arm64", "linux/amd64"], 1),
    "the first of equal ones": ("linux/amd64", ["linux/amd64", "linux/amd64"], 0),
    "v3 is no plain amd64": ("linux/amd64", ["linux/amd64/v3", "linux/amd64"], 1),
    "v2 neither": ("linux/amd64", ["linux/amd64/v2", "linux/amd64/v1"], 1),
    "v2 alone": ("linux/amd64", ["linux/amd64/v2"], None),
    "386 where there is no other": ("linux/amd64", ["linux/amd64/v3", "linux/386"], 1),
    "386 is second": ("linux/amd64", ["linux/386", "linux/amd64"], 1),
    "other spellings": ("linux/amd64", ["linux/386", "Linux/x86_64"], 1),
    "another system": ("linux/amd64", ["windows/amd64", "linux/amd64"], 1),
    "attestations": ("linux/amd64", ["unknown/unknown", "linux/amd64"], 1),
    "a setting of v3": ("linux/amd64/v3", ["linux/amd64", "linux/amd64/v2", "linux/amd64/v4"], 1),
    "arm64 is v8": ("linux/arm64", ["linux/amd64", "linux/arm64/v8"], 1),
    "v8 is arm64": ("linux/arm64/v8", ["linux/arm64"], 0),
    "arm64 runs arm": ("linux/arm64", ["linux/arm/v6", "linux/arm/v7"], 1),
    "arm is v7": ("linux/arm/v7", ["linux/arm/v8", "linux/arm/v6", "linux/arm"], 2),
    "one without a platform": ("linux/amd64", ["linux/arm64", "-"], 1),
    "the first of those without": ("linux/amd64", ["-", "-"], 0),
    "one without comes last": ("linux/amd64", ["-", "linux/386", "linux/amd64"], 2),
    "armhf is arm v7": ("linux/arm/v7", ["linux/armel", "linux/armhf"], 1),
}


def index_of(platforms: list[str]) -> list[dict[str, str] | None]:
    """The platform of each entry of an index; ``-``: none, which the specification allows."""
    names = ("os", "architecture", "variant")
    return [
        None if text == "-" else dict(zip(names, text.split("/"), strict=False))
        for text in platforms
    ]


@pytest.mark.parametrize("case", CHOICES)
def test_manifest_is_chosen_as_containerd_chooses(case: str) -> None:
    platform, there, wanted = CHOICES[case]
    entries: list[dict[str, object]]
    entries = [{"n": n, "platform": each} for n, each in enumerate(index_of(there))]
    entries = [each if each["platform"] else {"n": each["n"]} for each in entries]
    if wanted is None:
        with pytest.raises(manifest.NoPlatformError, match="no image for linux/amd64, only for"):
            manifest.for_platform({"manifests": entries}, platform)
        return
    assert manifest.for_platform({"manifests": entries}, platform)["n"] == wanted


@pytest.mark.parametrize("odd", [None, "linux/amd64", {}, {"os": 1, "architecture": []}])
def test_entries_with_an_odd_platform_are_passed_over(odd: object) -> None:
    good = {"n": 1, "platform": {"os": "linux", "architecture": "amd64"}}
    found = manifest.for_platform({"manifests": [{"platform": odd}, good]}, "linux/amd64")
    assert found == good
