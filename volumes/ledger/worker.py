"""Talks to one Ceph cluster through librados and librbd, in a child that can be killed.

Run as a script: CONF USER KEYRING-or-dash SECONDS. One JSON request a line on standard input, one
JSON answer a line on standard output; the first answer is {"fsid": ...} or an error. librados
blocks in threads of its own and cannot be interrupted: whoever asks kills us.
"""

import json
import struct
import sys
from typing import Any

METADATA_KEY = "nodeagent.volume"


class _Found(Exception):
    """An allocated extent: enough is known."""


def _text(value: str) -> bytes:
    """A string as Ceph encodes it (denc): length, bytes."""
    raw = value.encode()
    return struct.pack("<I", len(raw)) + raw


class Cluster:
    def __init__(self, conf: str, user: str, keyring: str, seconds: float) -> None:
        import rados  # Debian's bindings; absent where the node has no Ceph

        self._rados = rados
        limit = str(max(1, int(seconds)))
        settings = {
            "client_mount_timeout": limit,
            "rados_osd_op_timeout": limit,
            "rados_mon_op_timeout": limit,
        }
        if keyring != "-":
            settings["keyring"] = keyring
        self._cluster = rados.Rados(conffile=conf, name=f"client.{user}", conf=settings)
        self._cluster.connect(timeout=seconds)

    def fsid(self) -> str:
        return str(self._cluster.get_fsid())

    def _pool(self, pool: int, namespace: str) -> Any:
        ioctx = self._cluster.open_ioctx2(pool)
        ioctx.set_namespace(namespace)
        return ioctx

    def read(self, pool: int, namespace: str, image_id: str) -> dict[str, Any]:
        """What the image's metadata says."""
        with self._pool(pool, namespace) as ioctx:
            return {"entry": self._get(ioctx, image_id)}

    def look(self, pool: int, namespace: str, image_id: str) -> dict[str, Any]:
        """What the image's metadata says, and whether any extent of it is allocated."""
        import rbd

        with self._pool(pool, namespace) as ioctx:
            answer: dict[str, Any] = {"entry": self._get(ioctx, image_id)}
            with rbd.Image(ioctx, image_id=image_id, read_only=True) as image:
                answer["size"] = image.size()
                answer["extent"] = self._first_extent(image)
        return answer

    @staticmethod
    def _first_extent(image: Any) -> list[int] | None:
        """[offset, length] of an allocated extent, of a clone's parent too; None: there is none."""
        found: list[int] = []

        def note(offset: int, length: int, exists: bool) -> None:
            if exists:
                found[:] = [offset, length]
                raise _Found

        try:
            image.diff_iterate(0, image.size(), None, note, True, True)
        except _Found:
            pass
        return found or None

    def _get(self, ioctx: Any, image_id: str) -> str | None:
        # The object class's own method: a librbd image open for writing would register a watch,
        # which ceph-csi takes for a second user, and would ask krbd for the exclusive lock.
        try:
            result = ioctx.execute(
                f"rbd_header.{image_id}", "rbd", "metadata_get", _text(METADATA_KEY), 65536
            )
        except self._rados.ObjectNotFound:
            self._exists(ioctx, image_id)
            return None
        raw = result[1] if isinstance(result, tuple) else result
        (size,) = struct.unpack_from("<I", raw, 0)
        return bytes(raw[4 : 4 + size]).decode()

    def _exists(self, ioctx: Any, image_id: str) -> None:
        """No metadata and no image must not look the same."""
        ioctx.stat(f"rbd_header.{image_id}")

    def write(self, pool: int, namespace: str, image_id: str, value: str) -> dict[str, Any]:
        """Set our metadata of the image."""
        pairs = struct.pack("<I", 1) + _text(METADATA_KEY) + _text(value)
        with self._pool(pool, namespace) as ioctx:
            self._exists(ioctx, image_id)  # the class would create the object
            ioctx.execute(f"rbd_header.{image_id}", "rbd", "metadata_set", pairs)
        return {}


def main() -> None:
    conf, user, keyring, seconds = sys.argv[1:5]

    def answer(value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    try:
        cluster = Cluster(conf, user, keyring, float(seconds))
        answer({"fsid": cluster.fsid()})
    except Exception as error:  # whatever the bindings raise, the parent is told
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(getattr(cluster, request.pop("do"))(**request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
