"""The worker process that talks to one Ceph cluster through librados and librbd.

librados blocks in threads of its own and cannot be interrupted, so it never runs in the agent:
``ceph.client`` asks this process and kills it when it is late. The process keeps one connection
from the first request on.

Errors say what they are about: NotFoundError and RefusedError about the image or the key's rights,
SourceError about the cluster, after which the agent starts a new process.
"""

import contextlib
import errno
import functools
import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kit.errors
import kit.messages
from ceph import protocol, secrets

try:
    import rados
    import rbd
except ImportError:  # no bindings on this host; _Connection says so
    rados = rbd = None

MOST_BLOCKED = 20_000  # blocklist entries that are carried
MOST_OBJECTS = 4096  # of an image without object map that are asked for
_AT_ONCE = 32


def main() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # librados writes its log there
    open_now: list[_Connection] = []

    def handle(request: protocol.Request) -> protocol.Answer:
        if open_now and open_now[0].credentials != request.credentials:
            open_now.pop().close()
        if not open_now:
            open_now.append(_Connection(request.credentials))
        return open_now[0].answer(request)

    kit.messages.serve(protocol.Request, handle)


class _Found(Exception):
    """An allocated extent was found: enough is known."""


class _Connection:
    def __init__(self, credentials: protocol.CephCredentials) -> None:
        """SourceError when the cluster does not answer or refuses the user."""
        if rados is None:
            raise kit.errors.HostError(
                "Ceph's Python bindings", "are missing", "install python3-rados and python3-rbd"
            )
        self.credentials = credentials
        self._thing = f"cluster {credentials.cluster}"
        self._limit = max(1, math.ceil(credentials.patience))
        options = {
            name: str(self._limit)
            for name in ("client_mount_timeout", "rados_mon_op_timeout", "rados_osd_op_timeout")
        }
        if credentials.monitors:
            options["mon_host"] = ",".join(credentials.monitors)
        if credentials.secret_file:
            path = Path(credentials.secret_file)
            options["key"] = secrets.read(path, credentials.user, self._thing)
        try:
            self._cluster = rados.Rados(
                name=f"client.{credentials.user}", conffile=credentials.conf or None, conf=options
            )
            self._cluster.connect(timeout=self._limit)
        except rados.Error as error:
            raise kit.errors.SourceError(
                self._thing, f"does not let us in ({error})", "check its monitors and the key"
            ) from error
        self._fsid = str(self._cluster.get_fsid())

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._cluster.shutdown()

    def answer(self, request: protocol.Request) -> protocol.Answer:
        if request.fsid not in ("", self._fsid):
            raise kit.errors.SourceError(
                self._thing,
                f"its settings now lead to another cluster, {self._fsid} instead of {request.fsid}",
                "correct them, or restart the agent if that is meant",
            )
        asked = request.view
        content = None if request.content is None else self._content(request.content)
        view = None if asked is None else self._view(asked.images, asked.wide)
        if request.change is not None:
            self._set_metadata(request.change)
        return protocol.Answer(self._fsid, content, view)

    # --- one image, by its ids

    @contextlib.contextmanager
    def _image(self, image: protocol.ImageId) -> Iterator[Any]:
        """The image's pool and namespace; errors of the bindings as errors of ours."""
        thing = f"image {image.image_id} in pool {image.pool_id} of {self._thing}"
        try:
            with self._cluster.open_ioctx2(image.pool_id) as ioctx:
                ioctx.set_namespace(image.namespace)
                yield ioctx
        except (rados.ObjectNotFound, rbd.ImageNotFound) as error:
            raise kit.errors.NotFoundError(thing, f"is not there ({error})", "") from error
        except (rados.PermissionError, rados.PermissionDeniedError, rbd.PermissionError) as error:
            raise kit.errors.RefusedError(
                thing,
                f"client.{self.credentials.user} may not do that ({error})",
                "give it mon 'profile rbd' and osd 'profile rbd'",
            ) from error
        except (rados.Error, rbd.Error) as error:
            raise kit.errors.SourceError(
                thing, f"{type(error).__name__}: {error}", "it is tried again"
            ) from error

    def _content(self, question: protocol.ContentQuestion) -> protocol.ImageContent:
        with self._image(question.image) as ioctx:
            metadata = self._metadata(ioctx, question.image.image_id, question.metadata_key)
            if question.extents is None:
                return protocol.ImageContent(metadata)
            with rbd.Image(ioctx, image_id=question.image.image_id, read_only=True) as image:
                extent = self._first_extent(image, question.image, question.extents)
                return protocol.ImageContent(metadata, int(image.size()), extent)

    def _first_extent(
        self, image: Any, id: protocol.ImageId, where: protocol.Extents
    ) -> tuple[int, int] | None:
        """Offset and length of an allocated extent, of a clone's parent too; None when all is
        empty. An image without object map is looked at in some places only."""
        size, begin, step = int(image.size()), where.start, 1 << int(image.stat()["order"])
        # A clone shares its parent's objects; with striping, offsets do not name objects.
        if _has_parent(image) or image.features() & rbd.RBD_FEATURE_STRIPINGV2:
            return _diffed(image, begin, size)
        with self._cluster.open_ioctx2(image.data_pool_id()) as ioctx:
            ioctx.set_namespace(id.namespace)
            name = f"{image.block_name_prefix()}.{{:016x}}".format
            if within := begin % step:
                # What lies before ``begin`` (a LUKS header) is in the same object, which is as long
                # as it was written.
                found = _first_object(ioctx, name, [begin // step], longer_than=within)
                if found is not None:
                    return begin, step - within
                begin += step - within
            if image.features() & rbd.RBD_FEATURE_FAST_DIFF:
                return _diffed(image, begin, size)
            spans = ((max(at, begin), min(at + length, size)) for at, length in where.places)
            pieces = {number for at, end in spans for number in range(at // step, -(-end // step))}
            found = _first_object(ioctx, name, sorted(pieces)[:MOST_OBJECTS])
        return None if found is None else (found * step, step)

    def _metadata(self, ioctx: Any, image_id: str, key: str) -> str | None:
        # The object class's own method: a librbd image open for writing would register a watch,
        # which ceph-csi takes for a second user, and would ask krbd for the exclusive lock.
        header = f"rbd_header.{image_id}"
        try:
            result = ioctx.execute(header, "rbd", "metadata_get", _encoded(key), 65536)
        except rados.ObjectNotFound:
            ioctx.stat(header)  # no metadata and no image must not look the same
            return None
        raw = result[1] if isinstance(result, tuple) else result
        (size,) = struct.unpack_from("<I", raw, 0)
        return bytes(raw[4 : 4 + size]).decode()

    def _set_metadata(self, change: protocol.MetadataChange) -> None:
        header = f"rbd_header.{change.image.image_id}"
        pairs = struct.pack("<I", 1) + _encoded(change.metadata_key) + _encoded(change.value)
        with self._image(change.image) as ioctx:
            ioctx.stat(header)  # the object class would create it
            ioctx.execute(header, "rbd", "metadata_set", pairs)

    # --- the whole cluster

    def _view(self, images: tuple[protocol.ImageName, ...], wide: bool) -> protocol.ClusterView:
        denied: list[str] = []

        def said(command: str, *, older: str = "") -> bytes:
            """The answer; empty when this key may not ask, or the question is not wide. ``older``:
            the former command."""
            if command in protocol.WIDE and not wide:
                return b""
            request = json.dumps({"prefix": command, "format": "json"})
            try:
                code, out, text = self._cluster.mon_command(request, b"", timeout=self._limit)
            except rados.Error as error:
                raise kit.errors.SourceError(
                    self._thing, f"'ceph {command}' failed: {error}", "check its monitors"
                ) from error
            if code == -errno.EINVAL and older:
                return said(older)
            if code in (-errno.EPERM, -errno.EACCES):
                denied.append(command)
                return b""
            if code:
                raise kit.errors.SourceError(
                    self._thing, f"'ceph {command}' failed: {text or code}", "check its monitors"
                )
            return bytes(out)

        def ask(command: str) -> Any:
            return json.loads(said(command) or b"{}")

        monitors = ask("mon dump").get("mons", [])
        return protocol.ClusterView(
            name=self.credentials.cluster,
            taken=time.time(),
            fsid=self._fsid,
            versions=_versions(ask("versions")),
            features=_features(ask("features")),
            # One word, whatever format is asked for.
            min_client=said("osd get-require-min-compat-client").decode().strip().strip('"'),
            # Not 'osd dump', which has both: it is megabytes on a large cluster, from every node.
            # Before Ceph 16 the command had another name.
            blocklist=parse_blocklist(said("osd blocklist ls", older="osd blacklist ls").decode())[
                :MOST_BLOCKED
            ],
            monitors_v1=_addresses(monitors, "v1"),
            monitors_v2=_addresses(monitors, "v2"),
            images=tuple(self._image_view(image) for image in images),
            node_client=secrets.node_client(),
            denied=tuple(denied),
        )

    def _image_view(self, wanted: protocol.ImageName) -> protocol.ImageView:
        names = wanted.pool, wanted.namespace, wanted.name
        try:
            with self._cluster.open_ioctx(wanted.pool) as ioctx:
                ioctx.set_namespace(wanted.namespace)
                with rbd.Image(ioctx, wanted.name, read_only=True) as image:
                    lockers = image.list_lockers() or {}
                    return protocol.ImageView(
                        *names,
                        features=image.features(),
                        mirrored=_is_mirrored(image),
                        watchers=tuple(
                            protocol.Watcher(f"client{watcher['id']}", watcher["addr"])
                            for watcher in image.watchers_list()
                        ),
                        locks=tuple(
                            protocol.Watcher(owner.replace("client.", "client"), address)
                            for owner, _, address in lockers.get("lockers", [])
                        ),
                    )
        except (rados.Error, rbd.Error) as error:
            return protocol.ImageView(*names, error=str(error) or type(error).__name__)


def _encoded(text: str) -> bytes:
    """A string as Ceph encodes it (denc): length, bytes."""
    raw = text.encode()
    return struct.pack("<I", len(raw)) + raw


def _is_mirrored(image: Any) -> bool:
    """False when the key may not ask."""
    try:
        return bool(image.mirror_image_get_info()["state"] == rbd.RBD_MIRROR_IMAGE_ENABLED)
    except rbd.Error:
        return False


def _has_parent(image: Any) -> bool:
    try:
        image.parent_info()
    except rbd.ImageNotFound:
        return False
    return True


def _first_object(
    ioctx: Any, name: Callable[[int], str], numbers: Sequence[int], longer_than: int = -1
) -> int | None:
    """The first of these objects that exists and is longer; asked in this order, some at a time.
    rados.Error."""
    for first in range(0, len(numbers), _AT_ONCE):
        some = numbers[first : first + _AT_ONCE]
        sizes: dict[int, int] = {}

        def note(_: Any, size: int | None, __: Any, *, number: int, sizes: Any = sizes) -> None:
            if size is not None:
                sizes[number] = size

        asked = [
            ioctx.aio_stat(name(number), functools.partial(note, number=number)) for number in some
        ]
        for each in asked:
            each.wait_for_complete_and_cb()
        for number, each in zip(some, asked, strict=True):
            code = each.get_return_value()
            if code == -errno.ENOENT:
                continue
            if code < 0:
                raise rados.OSError(os.strerror(-code), errno=-code)
            if sizes.get(number, longer_than + 1) > longer_than:
                return number
    return None


def _diffed(image: Any, start: int, size: int) -> tuple[int, int] | None:
    found: list[tuple[int, int]] = []

    def note(offset: int, length: int, exists: bool) -> None:
        if exists:
            found.append((offset, length))
            raise _Found

    with contextlib.suppress(_Found):
        image.diff_iterate(start, size - start, None, note, True, True)
    return found[0] if found else None


def _versions(kinds: dict[str, dict[str, int]]) -> tuple[protocol.VersionCount, ...]:
    return tuple(
        protocol.VersionCount(kind, version, int(count))
        for kind, counts in kinds.items()
        if kind != "overall"
        for version, count in counts.items()
    )


def _features(kinds: dict[str, Any]) -> tuple[protocol.FeatureGroup, ...]:
    return tuple(
        protocol.FeatureGroup(
            kind, group["release"], int(str(group["features"]), 16), int(group["num"])
        )
        for kind, groups in kinds.items()
        if isinstance(groups, list)
        for group in groups
    )


def parse_blocklist(text: str) -> tuple[str, ...]:
    """Entries of 'osd blocklist ls': addresses, and ranges as ``cidr:10.1.0.0:0/24``.

    Since Ceph 16.2 the answer is two JSON arrays, one behind the other. Ranges come first here:
    one of them counts for many addresses.
    """
    addresses, ranges = [], []
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        entries, end = decoder.raw_decode(text)
        addresses += [str(entry["addr"]) for entry in entries if "addr" in entry]
        ranges += [
            f"cidr:{str(entry['range']).removeprefix('cidr:')}"
            for entry in entries
            if "range" in entry
        ]
        text = text[end:].lstrip()
    return (*ranges, *addresses)


def _addresses(monitors: list[dict[str, Any]], kind: str) -> tuple[str, ...]:
    return tuple(
        address["addr"]
        for monitor in monitors
        for address in monitor.get("public_addrs", {}).get("addrvec", [])
        if address.get("type") == kind
    )
