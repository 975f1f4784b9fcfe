"""A real stargz snapshotter beside a containerd, and layers that it mounts without fetching them.

scripts/snapshotters.sh builds it. Its FUSE server reads files from the registry when they are read.
"""

import gzip
import hashlib
import json
import os
import struct
import subprocess
import tarfile
from pathlib import Path

from tests.testbed import leftovers, registry, waiting

VERSION = "0.6.4"  # scripts/snapshotters.sh
_CACHE = Path(os.environ.get("NODEAGENT_CACHE") or Path.home() / ".cache" / "nodeagent")
BINARY = _CACHE / "snapshotters" / f"stargz-{VERSION}" / "bin" / "containerd-stargz-grpc"
# Nothing is fetched but what is read.
_CONFIG = """\
noprefetch = true
no_background_fetch = true
disable_verification = true
no_prometheus = true
"""


class Stargz:
    """The snapshotter of one containerd, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "s.sock"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.toml"
        config.write_text(_CONFIG)
        root = self.folder / "root"
        command = [BINARY, "--address", self.socket, "--config", config, "--root", root]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*map(str, command), "--log-level", "debug"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        said = (self.folder / "log").read_text
        waiting.until(self.socket.exists, 20, "the stargz snapshotter", detail=said)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=waiting.limit(10))
            self._process = None
        leftovers.unmount(self.folder)


def _member(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime = size, 1_700_000_000
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % tarfile.BLOCKSIZE)


def layer(files: dict[str, bytes]) -> registry.Layer:
    """An eStargz layer: each file in a gzip member of its own, then their table and its place."""
    raw, packed = bytearray(), bytearray()

    def add(data: bytes) -> None:
        raw.extend(data)
        packed.extend(_member(data))

    entries = []
    for name, data in files.items():
        add(_header(name, len(data)))
        found = registry.digest(data)
        entries.append(
            {
                "name": name,
                "type": "reg",
                "size": len(data),
                "modtime": "2023-11-14T22:13:20Z",
                "mode": 0o644,
                "offset": len(packed),
                "digest": found,
                "chunkDigest": found,
            }
        )
        add(_padded(data))
    table = json.dumps({"version": 1, "entries": entries}).encode()
    place = len(packed)
    end = b"\0" * tarfile.BLOCKSIZE * 2
    add(_header("stargz.index.json", len(table)) + _padded(table) + end)
    packed.extend(_footer(place))
    return registry.Layer("sha256:" + hashlib.sha256(raw).hexdigest(), bytes(packed))


def _footer(place: int) -> bytes:
    """An empty gzip member of 51 bytes whose extra field names the table's place."""
    text = f"{place:016x}STARGZ".encode()
    extra = b"SG" + struct.pack("<H", len(text)) + text
    head = b"\x1f\x8b\x08\x04" + b"\0" * 4 + b"\0\xff" + struct.pack("<H", len(extra)) + extra
    return head + b"\x01\x00\x00\xff\xff" + b"\0" * 8
