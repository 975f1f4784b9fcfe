"""A large dataset: files of 4-128 KiB on CephFS, with what each of them must be.

Written once a session through libcephfs by several threads. What every file must be (bytes, mode,
owner, time, xattrs) follows from its number, so that nothing has to be read back to compare.
"""

import json
import math
import os
import random
import threading
from pathlib import Path
from typing import Any

import xxhash

from tests.testbed import trees
from tests.testbed.ceph import CephCluster

FILES = int(os.environ.get("PROMISE_FILES", "3000"))
DIRECTORIES = 200
THREADS = 8
PATH = "/big"
SNAPSHOT = "v1"
_POOL_BYTES = 4 * 1024 * 1024
_LEAST, _MOST = 4 * 1024, 128 * 1024


def name_of(number: int) -> bytes:
    """Two levels of directories; some names are not UTF-8."""
    odd = b"\xff" if number % 97 == 0 else b""
    return b"c%02d/d%03d/f%05d%s" % (number % 20, number % DIRECTORIES, number, odd)


def _shape(number: int) -> tuple[int, int]:
    """Offset in the pool of random bytes, and size."""
    generator = random.Random(number)
    size = int(_LEAST * math.exp(generator.random() * math.log(_MOST / _LEAST)))
    return generator.randrange(_POOL_BYTES - size), size


class BigSet:
    """``records``: what every path must be; ``manifest``: the same for the readers, as JSON."""

    def __init__(self, folder: Path, files: int = FILES) -> None:
        self.files = files
        self._pool = random.Random(7).randbytes(_POOL_BYTES)
        self.records: dict[bytes, trees.Record] = {}
        self.manifest = folder / "manifest.json"

    def data(self, number: int) -> bytes:
        start, size = _shape(number)
        return number.to_bytes(8, "big") + self._pool[start : start + size - 8]

    def make(self, cluster: CephCluster) -> None:
        """Write everything and take the snapshot."""
        errors: list[BaseException] = []
        import cephfs  # unit tests are collected without Debian's bindings

        mount = cephfs.LibCephFS(conffile=str(cluster.conf), auth_id="admin")
        mount.conf_set("client_permissions", "false")
        mount.mount()
        try:
            self._directories(mount)
            parts = [range(start, self.files, THREADS) for start in range(THREADS)]

            def work(part: range) -> None:
                try:
                    for number in part:
                        self._file(mount, number)
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(part,)) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
            self._dress_directories(mount)
            mount.sync_fs()
            mount.mksnap(PATH, SNAPSHOT, 0o755)
        finally:
            mount.shutdown()
        listed = {os.fsdecode(p): [r.size, r.digest] for p, r in self.records.items() if r.digest}
        self.manifest.write_text(json.dumps(listed))

    def _directories(self, mount: Any) -> None:
        mount.mkdir(PATH, 0o755)
        paths = {os.path.dirname(name_of(n)) for n in range(self.files)}
        for path in sorted(paths | {os.path.dirname(p) for p in paths}):
            mount.mkdir(PATH.encode() + b"/" + path, 0o755)
            mode = 0o755 if len(path) % 2 else 0o2750
            moment = _moment(len(self.records))
            self.records[path] = trees.Record("directory", mode, 5, len(self.records) + 1, moment)
        self.records[b""] = trees.Record("directory", 0o751, 11, 12, _moment(77))

    def _file(self, mount: Any, number: int) -> None:
        name, data = name_of(number), self.data(number)
        mode = (0o644, 0o600, 0o444, 0o4755)[number % 4]
        uid, gid = 1000 + number % 7, 2000 + number % 5
        moment = _moment(number)
        xattrs: tuple[tuple[str, bytes], ...] = ()
        path = PATH.encode() + b"/" + name
        descriptor = mount.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            mount.write(descriptor, data, 0)
            if number % 50 == 0:
                xattrs = (("user.label", b"%d" % number),)
                mount.fsetxattr(descriptor, "user.label", xattrs[0][1], 0)
            mount.fchown(descriptor, uid, gid)
            mount.fchmod(descriptor, mode)
            mount.futimens(descriptor, _seconds(moment))
        finally:
            mount.close(descriptor)
        digest = xxhash.xxh3_128_hexdigest(data)
        self.records[name] = trees.Record(
            "file", mode, uid, gid, moment, len(data), digest, xattrs=xattrs
        )

    def _dress_directories(self, mount: Any) -> None:
        """The deepest first, as filling a directory changes its time."""
        directories = [(p, r) for p, r in self.records.items() if r.kind == "directory"]
        for path, record in sorted(directories, key=lambda item: -len(item[0])):
            full = PATH.encode() + (b"/" + path if path else b"")
            mount.chown(full, record.uid, record.gid)
            mount.chmod(full, record.mode)
            mount.utimes(full, _seconds(record.mtime_ns))


def _moment(number: int) -> int:
    """A time in nanoseconds that survives the bindings, which take times as floats of seconds."""
    return (1_400_000_000 + number) * 10**9 + number % 64 * 15_625_000


def _seconds(moment: int) -> tuple[float, float]:
    """Access and modification time for the bindings, exactly."""
    whole, part = divmod(moment, 10**9)
    return (whole + part / 10**9,) * 2


def source(cluster: CephCluster, secret: Path, **more: Any) -> dict[str, Any]:
    """Settings of a source for it."""
    secret.write_text(cluster.secret())
    secret.chmod(0o600)
    return {
        "kind": "cephfs",
        "monitors": [cluster.monitor],
        "filesystem": "cephfs",
        "path": PATH,
        "snapshot": SNAPSHOT,
        "user": "admin",
        "secret_file": str(secret),
        **more,
    }
