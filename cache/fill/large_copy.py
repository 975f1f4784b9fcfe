"""Copies large files in extents, for a worker.

Each job copies some extents of one file into its part and makes them durable, so a killed worker
loses one job. A file may change between two jobs: its status is compared with the entry of the scan
before and after each of them, and a file that differs is not the one that the part is of.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence

import kit.files
from cache.fill import control, copy, protocol
from cache.store import extents, large, tree
from cache.store.tree import Entry
from ceph import native, objects

JOB_SECONDS = 2.0  # the rest of a job waits for another turn


class LargeCopier:
    """Copies for one worker, through one buffer."""

    def __init__(self, generation: int, throttle: control.Throttle, *, immutable: bool) -> None:
        """``generation``: descriptor of its folder."""
        self._generation = generation
        self._throttle = throttle
        self._immutable = immutable
        self._buffer: memoryview | None = None

    def copy(
        self, job: protocol.Extents, source: int, reader: objects.Reader | None,
        listing: native.Listing | None,
    ) -> protocol.ExtentsCopied:  # fmt: skip
        """``source``: its directory. ``reader``, ``listing``: to read past the mount, if possible.

        What fails is in the answer; OSError only when the whole source has gone.
        """
        answer = protocol.ExtentsCopied(left=list(job.extents))
        try:
            with (
                kit.files.closing(copy.open_origin(source, job.entry.name)) as origin,
                large.part(self._generation, job.key, job.entry) as part,
            ):
                self._check_version(origin, job.entry)
                self._copy(job, origin, part, reader, listing, answer)
                if not self._immutable:
                    self._check_version(origin, job.entry)
                self._throttle.begin(control.FLUSHING)
                part.commit()
                self._throttle.begin(0)
        except OSError as error:
            tree.raise_if_gone(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return protocol.ExtentsCopied(left=list(job.extents), full=True)
            answer.failed = copy.failure(job.entry.name, error)
            answer.changed = isinstance(error, copy.ChangedError)
        return answer

    def _copy(
        self, job: protocol.Extents, origin: int, part: extents.Extents,
        reader: objects.Reader | None, listing: native.Listing | None,
        answer: protocol.ExtentsCopied,
    ) -> None:  # fmt: skip
        deadline = time.monotonic() + JOB_SECONDS

        def put(extent: int, data: bytes | memoryview) -> None:
            answer.written += part.put(extent, data)
            answer.left.remove(extent)
            self._throttle.step(0, len(data))

        try:
            rest: Sequence[int] = job.extents
            if reader is not None and listing is not None and not job.entry.xattrs:
                rest = self._by_objects(job, part, reader, listing, deadline, put, answer)
            for extent in rest:
                if time.monotonic() >= deadline and len(answer.left) < len(job.extents):
                    break
                self._throttle.begin(job.extents.index(extent))
                offset, length = part.span(extent)
                if job.entry.holes and _is_hole(origin, offset, length):
                    part.put_hole(extent)
                    answer.left.remove(extent)
                    self._throttle.skip(length)
                else:
                    put(extent, self._read(origin, offset, length))
        except control.Cancelled:
            pass  # what was put is kept
        except OSError as error:
            tree.raise_if_gone(error)
            # What was put before is kept for another pass.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                answer.full = True
            else:
                answer.failed = copy.failure(job.entry.name, error)
                answer.changed = isinstance(error, copy.ChangedError)

    def _read(self, origin: int, offset: int, length: int) -> memoryview:
        """Through the mount. ChangedError when the file is shorter now."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(extents.EXTENT_BYTES))
        done = 0
        while done < length:
            count = tree.asked(os.preadv, origin, [self._buffer[done:length]], offset + done)
            if not count:
                raise copy.ChangedError(f"the file ends at {offset + done}, not where it did")
            done += count
            self._throttle.beat()
        return self._buffer[:length]

    def _by_objects(
        self, job: protocol.Extents, part: extents.Extents, reader: objects.Reader,
        listing: native.Listing, deadline: float, put: Callable[[int, bytes | memoryview], None],
        answer: protocol.ExtentsCopied,
    ) -> list[int]:  # fmt: skip
        """Copy extents by the objects that hold them; those that the mount must be asked for.

        Only an object that has all the bytes is trusted: a missing or a short one may be a hole, or
        another one's.
        """
        try:
            location, found = listing.layout(job.path, job.entry.name)
        except OSError:
            return job.extents
        reading = _Reading(job, part, found, put)

        try:
            unread = reader.read(
                location, reading.parts, reading.take, deadline, patient=job.patient,
                waiting=self._throttle.idle,
            )  # fmt: skip
        except PermissionError:
            return job.extents
        finally:
            answer.objects = len(job.extents) - len(answer.left)
        silent = {each.tag for each in (*unread.silent, *unread.unreachable)}
        answer.silent = [each for each in job.extents if each in silent and each in answer.left]
        unasked = {each.tag for each in unread.left} | silent
        return [each for each in job.extents if each in reading.elsewhere and each not in unasked]

    def _check_version(self, origin: int, item: Entry) -> None:
        """ChangedError unless the open file is the version that the scan saw."""
        status = copy.settled(origin, self._immutable)
        same = tree.same_content(item, status)
        if not self._immutable and item.ctime_ns:
            same &= item.ctime_ns == status.st_ctime_ns
        if not same:
            raise copy.ChangedError(f"{item.name} changed while it was copied")

    def whole(self, job: protocol.Whole, source: int) -> protocol.Completed:
        """Attributes, xattrs and the checksum; the commit makes them durable."""
        item = job.entry
        try:
            with (
                kit.files.closing(copy.open_origin(source, item.name)) as origin,
                large.part(self._generation, job.key, item) as part,
            ):
                if any(state is extents.State.UNKNOWN for _, state in part.states()):
                    raise OSError(errno.EIO, "the store lost what was copied of it")
                if item.xattrs:
                    tree.copy_xattrs(origin, part.data)
                status = os.fstat(origin)
                self._check_version(origin, item)
                checksum = part.checksum()
                os.setxattr(part.data, tree.CHECKSUM, checksum.encode())
                os.setxattr(part.data, large.KEY, job.key.encode())
                allocated = copy.set_attributes(
                    part.data, status.st_uid, status.st_gid, status.st_mode, status.st_mtime_ns
                )
        except OSError as error:
            tree.raise_if_gone(error)
            changed = isinstance(error, copy.ChangedError)
            return protocol.Completed(failed=copy.failure(item.name, error), changed=changed)
        self._throttle.step(1, 0)
        answer = protocol.Completed(checksum=checksum, allocated=allocated)
        if item.nlink > 1:
            answer.link = protocol.Link(job.key, copy.link_key(item, checksum))
        return answer


def _is_hole(origin: int, offset: int, length: int) -> bool:
    """Whether the source says so; whoever cannot tell is read. OSError of one that has gone."""
    try:
        return extents.is_hole(origin, offset, length)
    except OSError as error:
        tree.raise_if_gone(error)
        return False


class _Reading:
    """The objects' parts of one job, and what came of them."""

    def __init__(
        self, job: protocol.Extents, part: extents.Extents, found: objects.Layout,
        put: Callable[[int, bytes | memoryview], None],
    ) -> None:  # fmt: skip
        self._part = part
        self._put = put
        self._at: dict[objects.Part, int] = {}  # where in its extent
        self._missing: dict[int, int] = {}
        self._data: dict[int, bytearray] = {}
        self.elsewhere = set(job.extents)  # those that the mount must be asked for
        self.parts: list[objects.Part] = []
        for extent in job.extents:
            offset, length = part.span(extent)
            self._missing[extent] = length
            for piece in objects.pieces(found, offset, length):
                each = objects.Part(job.entry.ino, piece.number, piece.offset, piece.size, extent)
                self._at[each] = piece.at - offset
                self.parts.append(each)

    def take(self, each: objects.Part, data: bytes | None) -> None:
        """None: the object has fewer bytes."""
        if data is None:
            self._data.pop(each.tag, None)
            self._missing[each.tag] = 0
            return
        length = self._part.span(each.tag)[1]
        if each.size == length:
            self._whole(each.tag, data)
            return
        if not self._missing[each.tag]:
            return  # a part of it is elsewhere
        held = self._data.setdefault(each.tag, bytearray(length))
        at = self._at[each]
        held[at : at + len(data)] = data
        self._missing[each.tag] -= len(data)
        if not self._missing[each.tag]:
            self._whole(each.tag, self._data.pop(each.tag))

    def _whole(self, extent: int, data: bytes | bytearray) -> None:
        self.elsewhere.discard(extent)
        self._put(extent, memoryview(data))
