"""Images as data: references, targets, and the shape of an image (its layers and their ids).

A shape is read from an image's documents: the index (if any), this platform's manifest and the
config. The same code reads them from a registry and from the runtime's own store.
"""

import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Where a blob's bytes come from: (offset) -> chunks up to its end.
Blobs = Callable[[int], AsyncIterator[bytes]]
# Reads a small blob by digest.
Read = Callable[[str], Awaitable[bytes]]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?P<host>{_HOST})/(?P<path>{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# Docker Hub's names are part of the reference grammar and of docker's login files, not a choice of
# ours; no other registry is named in this project.
HUB = "docker.io"  # as runtimes write it
HUB_INDEX = "index.docker.io"  # as docker writes it in older references and in login files
HUB_SERVER = "registry-1.docker.io"  # what answers
HUB_LOGIN_KEY = f"https://{HUB_INDEX}/v1/"  # docker's key of its login
HUB_HOSTS = frozenset({HUB, HUB_INDEX})
MOST_LAYERS = 1024
# In one of them: each takes many times its bytes in memory. Commas in texts count, too.
MOST_VALUES = 500_000
MOST_INDEXES = 3  # in one another
# Of an index, a manifest or a config. A larger one is refused, wherever it comes from.
LARGEST_DOCUMENT = 8 * 1024**2

INDEX_TYPES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
MANIFEST_TYPES = frozenset(
    {
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    }
)


class BadImageError(ValueError):
    """A manifest or config that does not follow the image specification."""


class NoPlatformError(BadImageError):
    """An index without an image for the platform."""


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Reference:
    """``host/path:tag`` or ``host/path@digest``; always with its host (see ``parse``)."""

    host: str
    path: str
    tag: str | None
    digest: str | None

    @property
    def text(self) -> str:
        """As runtimes name their image records."""
        if self.digest is not None:
            return f"{self.host}/{self.path}@{self.digest}"
        return f"{self.host}/{self.path}:{self.tag}"

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.path}"


def parse(text: str) -> Reference:
    """A full reference. Raises ValueError.

    Short names (``ubuntu``) are refused: which registry they mean depends on the runtime's own
    settings. ``host/path:tag@digest`` means the digest. No tag means ``latest``. Names of Docker
    Hub become what runtimes call them: ``ubuntu`` there is ``library/ubuntu``.
    """
    match = _REFERENCE.fullmatch(text)
    if match is None or len(text) > 512:
        capitals = "; HOST and PATH have no capitals" if text != text.lower() else ""
        raise ValueError(
            f"{text[:100]!r} is not an image reference; write HOST/PATH:TAG or HOST/PATH@sha256:…"
            f"{capitals}"
        )
    host, path = match["host"], match["path"]
    if host == HUB_INDEX:
        host = HUB
    if host == HUB and "/" not in path:
        path = f"library/{path}"
    if not (host == "localhost" or "." in host or ":" in host):
        raise ValueError(
            f"{text!r} names no registry; write HOST/ in front, as kubectl describe pod does"
        )
    port = host.rpartition(":")[2] if re.search(r":\d+$", host) else "1"
    if not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: port {port} is out of range")
    tag = None if match["digest"] else match["tag"] or "latest"
    return Reference(host, path, tag, match["digest"])


@dataclass(frozen=True)
class Target:
    """A content descriptor: what an image record points at."""

    media_type: str
    digest: str
    size: int


@dataclass(frozen=True)
class Layer:
    digest: str
    size: int  # compressed, as it is fetched
    media_type: str
    chain_id: str  # name of its unpacked snapshot
    unpacked: int = 0  # bytes, as its last four say; 0: not known


@dataclass(frozen=True)
class Shape:
    """One platform's image: what must be fetched and what it becomes."""

    top: Target
    documents: tuple[tuple[str, int], ...]  # index, manifest, config: digest and bytes
    layers: tuple[Layer, ...]
    image_id: str  # digest of the config; CRI's image id

    @property
    def bytes_total(self) -> int:
        return sum(size for _, size in self.documents) + sum(layer.size for layer in self.layers)


def chain_on(below: str, diff_id: str) -> str:
    """The chain id of a layer on another one."""
    return digest_of(f"{below} {diff_id}".encode())


def chain_ids(diff_ids: list[str]) -> list[str]:
    """Snapshot names by the image specification: each is a hash over the layers below it."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(diff_id if not chain else chain_on(chain[-1], diff_id))
    return chain


def load(data: bytes, what: str) -> Mapping[str, Any]:
    """A JSON object. Raises BadImageError with ``what`` it is."""
    if sum(data.count(each) for each in (b"{", b"[", b",")) > MOST_VALUES:
        raise BadImageError(f"{what} has more than {MOST_VALUES} values")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise BadImageError(f"{what} is not JSON") from error
    except RecursionError as error:
        raise BadImageError(f"{what} is nested too deeply") from error
    if not isinstance(value, dict):
        raise BadImageError(f"{what} is not a JSON object")
    return value


def descriptor(value: Any, what: str) -> tuple[str, int, str]:
    """Its digest, size and media type. Raises BadImageError."""
    if not isinstance(value, dict):
        raise BadImageError(f"{what} is not a descriptor")
    digest, size = value.get("digest"), value.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise BadImageError(f"{what} has no sha256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 50:
        raise BadImageError(f"{what} has no usable size")
    return digest, size, str(value.get("mediaType", ""))


Platform = tuple[str, str, str]  # os, architecture, variant
_ARCHITECTURES = {"i386": "386", "x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64"}
_PLAIN = {("amd64", "v1"): "", ("arm64", "v8"): "", ("arm64", "8"): "", ("arm", ""): "v7"}


def _normal(os: str, architecture: str, variant: str) -> Platform:
    """As containerd compares it: one name for each platform."""
    os, architecture, variant = os.lower() or "linux", architecture.lower(), variant.lower()
    architecture = _ARCHITECTURES.get(architecture, architecture)
    if architecture in ("armhf", "armel"):
        architecture, variant = "arm", "v7" if architecture == "armhf" else "v6"
    if architecture == "386":
        variant = ""
    elif architecture == "arm" and variant in ("5", "6", "7", "8"):
        variant = f"v{variant}"
    return os, architecture, _PLAIN.get((architecture, variant), variant)


def _runs(platform: str) -> list[Platform]:
    """What a node of this platform runs, the best first (containerd's ``platforms.Only``): a plain
    amd64 takes no v2 or v3, and 386 where there is nothing else."""
    os, architecture, variant = _normal(*[*platform.split("/"), "", ""][:3])
    level = int(variant[1:]) if re.fullmatch(r"v[0-9]{1,2}", variant) else 0
    found = [(os, architecture, variant)]
    if architecture == "amd64":
        found += [_normal(os, "amd64", f"v{each}") for each in range(level - 1, 0, -1)]
        found.append((os, "386", ""))
    elif architecture == "arm64":
        found += [(os, "arm", f"v{each}") for each in (8, 7, 6, 5)]
    elif architecture == "arm":
        found += [(os, "arm", f"v{each}") for each in range(level - 1, 4, -1)]
    return found


def for_platform(index: Mapping[str, Any], platform: str) -> Any:
    """The manifest for ``os/architecture[/variant]`` that containerd chooses too: that of the best
    platform, of equal ones the first, and without any the first that names none. Another one would
    be waited for and never come."""
    manifests = index.get("manifests")
    if not isinstance(manifests, list) or len(manifests) > 1000:
        raise BadImageError("the index does not list manifests")
    there: dict[Platform, Any] = {}
    for entry in manifests:
        given = entry.get("platform") if isinstance(entry, dict) else None
        if isinstance(given, dict):
            there.setdefault(_platform(given), entry)
    for wanted in _runs(platform):
        if wanted in there:
            return there[wanted]
    for entry in manifests:
        if isinstance(entry, dict) and entry.get("platform") is None:
            return entry
    raise _other_platform(platform, there)


def _platform(given: Mapping[str, Any]) -> Platform:
    return _normal(*(str(given.get(name) or "") for name in ("os", "architecture", "variant")))


def _other_platform(platform: str, there: Iterable[Platform]) -> NoPlatformError:
    names = ", ".join("/".join(filter(None, each)) for each in list(there)[:8])
    return NoPlatformError(f"it has no image for {platform}, only for {names}")


async def shape(top: Target, read: Read, platform: str) -> Shape:
    """Read what ``top`` consists of. Raises BadImageError."""
    documents, media_type = [(top.digest, top.size)], top.media_type
    named = True  # whose platform is known without its config
    body = load(await read(top.digest), f"manifest {top.digest}")
    while media_type in INDEX_TYPES or "manifests" in body:
        if len(documents) > MOST_INDEXES:
            raise BadImageError(f"it has more than {MOST_INDEXES} indexes in one another")
        entry = for_platform(body, platform)
        named = isinstance(entry.get("platform"), dict)
        digest, size, media_type = descriptor(entry, "the platform's manifest")
        documents.append((digest, size))
        body = load(await read(digest), f"manifest {digest}")
    config_digest, config_size, _ = descriptor(body.get("config"), "config")
    documents.append((config_digest, config_size))
    config = load(await read(config_digest), f"config {config_digest}")
    if not named and (runs := _platform({**config, "variant": ""})) not in _runs(platform):
        # Of several without a platform another one may fit: the runtime tries them.
        raise BadImageError(str(_other_platform(platform, [runs])))
    listed = body.get("layers")
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(listed, list) or not isinstance(diff_ids, list):
        raise BadImageError("it has no layers, so it is not a container image")
    if len(listed) != len(diff_ids) or not 0 < len(listed) <= MOST_LAYERS:
        raise BadImageError(f"it has {len(listed)} layers but {len(diff_ids)} unpacked ids")
    if not all(isinstance(d, str) and is_digest(d) for d in diff_ids):
        raise BadImageError("an unpacked layer has no sha256 digest")
    layers = []
    for entry, chain_id in zip(listed, chain_ids(diff_ids), strict=True):
        digest, size, media_type = descriptor(entry, "a layer")
        layers.append(Layer(digest, size, media_type, chain_id))
    return Shape(top, tuple(documents), tuple(layers), config_digest)
