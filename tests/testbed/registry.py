"""A real docker-registry on loopback, and images made of random layers."""

import dataclasses
import gzip
import hashlib
import http.client
import io
import json
import random
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.testbed import containerd, ports, waiting

BINARY = containerd.RUNTIMES / "bookworm" / "usr" / "bin" / "docker-registry"
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"

_CONFIG = """\
version: 0.1
log: {{level: error}}
storage:
  filesystem: {{rootdirectory: {folder}/data}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclasses.dataclass(frozen=True)
class Layer:
    raw_digest: str
    packed: bytes

    @property
    def digest(self) -> str:
        return digest(self.packed)


def layer(name: str, size: int, seed: int, files: int = 4, level: int = 0) -> Layer:
    """A tar.gz of random files; ``level`` 0 stores, which is quick and no smaller for noise."""
    source = random.Random(seed)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(files):
            info = tarfile.TarInfo(f"opt/{name}/f{number}.bin")
            info.size, info.mtime = max(1, size // files), 1_700_000_000
            archive.addfile(info, io.BytesIO(source.randbytes(info.size)))
    raw = stream.getvalue()
    return Layer(digest(raw), gzip.compress(raw, compresslevel=level, mtime=0))


def layer_of(files: dict[str, bytes]) -> Layer:
    """A layer with these programs."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), 1_700_000_000, 0o755
            archive.addfile(info, io.BytesIO(data))
    raw = stream.getvalue()
    return Layer(digest(raw), gzip.compress(raw, compresslevel=1, mtime=0))


@dataclasses.dataclass(frozen=True)
class Pushed:
    """An image in the registry. ``fetched``: bytes that a node without anything has to fetch."""

    repository: str
    top: str
    config: str
    layers: tuple[Layer, ...]
    documents: int

    @property
    def fetched(self) -> int:
        return self.documents + sum(len(each.packed) for each in self.layers)


class Registry:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        (self.port,) = ports.free(1)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.yml"
        config.write_text(_CONFIG.format(folder=self.folder, port=self.port))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(BINARY), "serve", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OTEL_TRACES_EXPORTER": "none"},
                start_new_session=True,
            )

        def answers() -> bool:
            try:
                return self._request("GET", "/v2/")[0] == 200
            except OSError:
                return False

        said = (self.folder / "log").read_text
        waiting.until(answers, 20, "the registry", detail=lambda: said()[-2000:])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=waiting.limit(10))
            self._process = None

    def _request(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/octet-stream"
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=waiting.limit(60))
        try:
            connection.request(method, path, body=body, headers={"Content-Type": kind})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def put_blob(self, repository: str, data: bytes) -> str:
        name = digest(data)
        if self._request("HEAD", f"/v2/{repository}/blobs/{name}")[0] == 200:
            return name
        status, headers, _ = self._request("POST", f"/v2/{repository}/blobs/uploads/")
        assert status == 202, status
        place = "/" + headers["Location"].split("/", 3)[3]
        mark = "&" if "?" in place else "?"
        status, _, text = self._request("PUT", f"{place}{mark}digest={name}", data)
        assert status == 201, (status, text)
        return name

    def put_manifest(
        self, repository: str, reference: str, body: dict[str, Any]
    ) -> tuple[str, int]:
        data = json.dumps(body).encode()
        path = f"/v2/{repository}/manifests/{reference}"
        status, _, text = self._request("PUT", path, data, body["mediaType"])
        assert status == 201, (status, text)
        return digest(data), len(data)

    def delete_manifest(self, repository: str, name: str) -> None:
        status, _, text = self._request("DELETE", f"/v2/{repository}/manifests/{name}")
        assert status == 202, (status, text)

    def push(
        self,
        repository: str,
        tag: str,
        layers: list[Layer],
        *,
        index: bool = True,
        mark: str = "",
        command: Sequence[str] = ("/bin/true",),
        deep: int = 0,
    ) -> Pushed:
        """An image for linux/amd64; ``mark`` makes another config, so another digest. ``deep``: so
        many lists in one another in the config."""
        descriptors = [
            {
                "mediaType": f"{LAYER}+gzip",
                "digest": self.put_blob(repository, each.packed),
                "size": len(each.packed),
            }
            for each in layers
        ]
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Env": [f"MARK={mark}", "PATH=/bin"], "Cmd": list(command)},
                "rootfs": {"type": "layers", "diff_ids": [each.raw_digest for each in layers]},
                "history": [],
            }
        ).encode()
        if deep:
            config = config[:-1] + b', "x": ' + b"[" * deep + b"]" * deep + b"}"
        config_digest = self.put_blob(repository, config)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": config_digest,
                "size": len(config),
            },
            "layers": descriptors,
        }
        text = json.dumps(manifest).encode()
        name, size = self.put_manifest(repository, digest(text) if index else tag, manifest)
        documents = size + len(config)
        if index:
            platform = {"architecture": "amd64", "os": "linux"}
            entry = {"mediaType": MANIFEST, "digest": name, "size": size, "platform": platform}
            body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
            name, size = self.put_manifest(repository, tag, body)
            documents += size
        return Pushed(repository, name, config_digest, tuple(layers), documents)
