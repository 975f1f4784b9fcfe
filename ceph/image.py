"""Reading one snapshot of an RBD image through librbd, many objects at a time.

The snapshot is opened read-only: that leaves no watcher and takes no lock. librbd blocks in threads
of its own, so only processes that may be killed open one; they load the bindings then.
"""

import contextlib
import importlib
import queue
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import kit.errors
from ceph.protocol import ImageAccess, SnapshotFacts

# A cluster that does not answer: an error after this, and the fill is tried again later.
OPERATION_SECONDS = 30
# Of reads at once. More is not faster on loopback (facts of the testbed: 4 as good as 16).
IN_FLIGHT = 8
# The differences of this much of the image are asked for at once.
_SLICE_BYTES = 4 * 2**30


class ImageSnapshot:
    """An open snapshot. Every method may raise SourceError."""

    def __init__(
        self,
        image: Any,
        facts: SnapshotFacts,
        thing: str,
        error: Any,
        again: Callable[[], SnapshotFacts],
    ) -> None:
        """``error``: what the bindings raise. ``again``: the facts of what has its name now."""
        self.facts = facts
        self.facts_now = again
        self._error = error
        self._image = image
        self.thing = thing

    def extents(self, beat: Callable[[], None]) -> Iterator[tuple[int, int]]:
        """Offset and length of what was ever written, whole objects, of a clone's parent too.

        ``beat`` is called for each slice: without fast-diff the cluster looks at each object.
        """
        for offset, length, exists in self._differences(None, beat):
            if exists:
                yield offset, length

    def changes(self, since: str, beat: Callable[[], None]) -> Iterator[tuple[int, int]]:
        """Offset and length of what differs from the earlier snapshot ``since``, whole objects.

        What was discarded meanwhile is among them. ``beat`` as for ``extents``.
        """
        for offset, length, _ in self._differences(since, beat):
            yield offset, length

    def _differences(
        self, since: str | None, beat: Callable[[], None]
    ) -> Iterator[tuple[int, int, bool]]:
        found: list[tuple[int, int, bool]] = []
        for start in range(0, self.facts.size, _SLICE_BYTES):
            length = min(_SLICE_BYTES, self.facts.size - start)
            try:
                self._image.diff_iterate(
                    start, length, since, lambda *each: found.append(each), True, True
                )
            except self._error as error:
                raise self._failed("its extents cannot be listed", error) from error
            beat()
            yield from found
            found.clear()

    def name_of(self, snap_id: int) -> str | None:
        """What the snapshot is called now; None when the image has it no more."""
        try:
            listed = list(self._image.list_snaps())
        except self._error as error:
            raise self._failed("its snapshots cannot be listed", error) from error
        return next((str(each["name"]) for each in listed if each["id"] == snap_id), None)

    def read(
        self, wanted: Iterable[tuple[int, int]], idle: Callable[[], None]
    ) -> Generator[tuple[int, bytes], None, None]:
        """(offset, data) of each (offset, length), in any order, ``IN_FLIGHT`` at once.

        ``idle`` is called while no data arrives; what it raises ends the reading.
        """
        answers: queue.SimpleQueue[tuple[int, int, bytes | None]] = queue.SimpleQueue()
        ahead = iter(wanted)
        waiting: dict[int, int] = {}  # offset: length

        def begin() -> bool:
            for offset, length in ahead:
                waiting[offset] = length
                self._image.aio_read(
                    offset,
                    length,
                    lambda done, data, at=offset: answers.put((at, done.get_return_value(), data)),
                )
                return True
            return False

        try:
            while len(waiting) < IN_FLIGHT and begin():
                pass
            while waiting:
                try:
                    offset, result, data = answers.get(timeout=0.2)
                except queue.Empty:
                    idle()
                    continue
                length = waiting.pop(offset)
                if result < 0 or data is None or len(data) != length:
                    raise self._failed(f"{length} bytes at {offset} cannot be read", result)
                begin()
                yield offset, data
        finally:
            while waiting:  # librbd must not call back into what is gone
                waiting.pop(answers.get(timeout=OPERATION_SECONDS * 2)[0], None)

    def _failed(self, why: str, error: object) -> kit.errors.SourceError:
        return kit.errors.SourceError(self.thing, f"{why} ({error})", "it is tried again")


@contextlib.contextmanager
def opened(access: ImageAccess) -> Iterator[ImageSnapshot]:
    """The snapshot while the block runs.

    SourceError when the cluster does not answer, refuses the user, or has no such pool, image or
    snapshot; HostError without the bindings.
    """
    thing = f"RBD image {access.spec}"
    try:
        rados, rbd = map(importlib.import_module, ("rados", "rbd"))
    except ImportError as error:
        raise kit.errors.HostError(
            "Ceph's Python bindings", "are missing", "install python3-rados and python3-rbd"
        ) from error
    options = {
        name: str(OPERATION_SECONDS)
        for name in ("client_mount_timeout", "rados_mon_op_timeout", "rados_osd_op_timeout")
    }
    with contextlib.ExitStack() as stack:
        with _named(access, thing, rados, rbd):
            cluster = rados.Rados(name=f"client.{access.user}", conffile=access.conf, conf=options)
            cluster.connect(timeout=OPERATION_SECONDS)
            stack.callback(cluster.shutdown)
            ioctx = stack.enter_context(cluster.open_ioctx(access.pool))
            ioctx.set_namespace(access.namespace)

            def by_name() -> Any:
                return rbd.Image(ioctx, access.image, snapshot=access.snapshot, read_only=True)

            def again() -> SnapshotFacts:
                with _named(access, thing, rados, rbd), by_name() as found:
                    return _facts(cluster, ioctx, found, access.snapshot)

            image = stack.enter_context(by_name())
            facts = _facts(cluster, ioctx, image, access.snapshot)
        yield ImageSnapshot(image, facts, thing, rbd.Error, again)


@contextlib.contextmanager
def _named(access: ImageAccess, thing: str, rados: Any, rbd: Any) -> Iterator[None]:
    """Errors of the bindings as SourceError that says what is wrong."""
    again = "it is tried again"
    try:
        yield
    except (rados.ObjectNotFound, rbd.ImageNotFound) as error:
        why = f"there is no such pool, image or snapshot ({error})"
        raise kit.errors.SourceError(
            thing, why, f"create it, or correct the settings; {again}"
        ) from error
    except (rados.PermissionError, rados.PermissionDeniedError, rbd.PermissionError) as error:
        raise kit.errors.SourceError(
            thing,
            f"client.{access.user} is refused ({error})",
            f"correct user and secret_file, or give it osd 'profile rbd-read-only'; {again}",
        ) from error
    except (rados.Error, rbd.Error) as error:
        raise kit.errors.SourceError(
            thing,
            f"the cluster does not answer ({error})",
            # Newer OSDs (seen with 18.2) do not refuse a user that has no right to them: they are
            # silent.
            f"see 'ceph status', and whether client.{access.user} has osd 'profile "
            f"rbd-read-only'; {again}",
        ) from error


def _facts(cluster: Any, ioctx: Any, image: Any, snapshot: str) -> SnapshotFacts:
    snap_id = next(each["id"] for each in image.list_snaps() if each["name"] == snapshot)
    return SnapshotFacts(
        fsid=str(cluster.get_fsid()),
        pool_id=int(ioctx.get_pool_id()),
        image_id=str(image.id()),
        snap_id=int(snap_id),
        size=int(image.size()),
    )
