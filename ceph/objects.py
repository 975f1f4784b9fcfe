"""Objects of a snapshot by librados, several in flight, and those that do not answer.

What is read is a whole small file, which is one object, or a part of an object (``Part``).

An object of an inactive placement group gives no answer for hours. Whoever waits for it must not
keep its neighbours waiting: after a short patience it is handed back as silent, to be read again
when the rest is done; a patient read waits until librados itself gives it up.
"""

import errno
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from ceph.protocol import Access, Entry

# librados gives an operation up after this long, and a patient read takes that for its result.
OBJECT_SECONDS = 10.0
_IN_FLIGHT = 16
_LEAST_IN_FLIGHT = 4
_BYTES_IN_FLIGHT = 32 * 1024 * 1024
_PATIENT_IN_FLIGHT = 256
_PATIENT_BYTES = 64 * 1024 * 1024
# Operations of one reader that nobody waits for any more, and those that are in flight.
_MOST_PENDING = 512
# Patience: this many times what answers usually take, within these bounds.
_USUAL = 10
_LEAST_PATIENCE, _MOST_PATIENCE = 0.25, 2.0
_POLL_SECONDS = 0.2


class Part(NamedTuple):
    """Some bytes of an object of a file."""

    ino: int
    number: int  # of the object in the file
    offset: int
    size: int
    tag: int = 0  # for the caller


FileT = TypeVar("FileT", bound=Entry | Part)


def available() -> bool:
    """Whether this host has librados and its bindings."""
    return importlib.util.find_spec("rados") is not None


# --- where the bytes of a file lie: its layout, and the pieces of objects that hold a range

# A file is cut into stripe units, which go round a set of ``stripe_count`` objects until each of
# them has ``object_size`` bytes; then the next set begins. The commonest layout has one object in a
# set. Source: Striper::file_to_extents of Ceph, and "File layouts" of its documentation.


@dataclass(frozen=True)
class Layout:
    """As the vxattr ``ceph.file.layout`` tells it. Sizes in bytes."""

    pool: str
    stripe_unit: int
    stripe_count: int
    object_size: int
    namespace: str = ""


class Piece(NamedTuple):
    """A part of one object, and where in the file it belongs."""

    number: int  # of the object
    offset: int  # in the object
    size: int
    at: int  # in the file


def parse_layout(text: str) -> Layout:
    """``stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=name [pool_namespace=name]``.

    ValueError for what is not understood: then nobody may compute where bytes lie.
    """
    fields = dict(each.partition("=")[::2] for each in text.split())
    unknown = fields.keys() - {
        "stripe_unit", "stripe_count", "object_size", "pool", "pool_namespace",
    }  # fmt: skip
    try:
        found = Layout(
            fields["pool"], int(fields["stripe_unit"]), int(fields["stripe_count"]),
            int(fields["object_size"]), fields.get("pool_namespace", ""),
        )  # fmt: skip
    except KeyError as error:
        raise ValueError(f"layout without {error}: {text!r}") from error
    sizes = found.stripe_unit > 0 and found.stripe_count > 0 and found.object_size > 0
    if unknown or not sizes or found.object_size % found.stripe_unit:
        raise ValueError(f"unknown layout {text!r}")
    return found


def pieces(layout: Layout, offset: int, size: int) -> Iterator[Piece]:
    """Of ``size`` bytes of the file from ``offset``, in the file's order.

    What follows in the same object is one piece.
    """
    unit, width = layout.stripe_unit, layout.stripe_count
    in_object = layout.object_size // unit  # stripe units of an object
    end = offset + size
    waiting: Piece | None = None
    while offset < end:
        block, skipped = divmod(offset, unit)
        stripe, position = divmod(block, width)
        object_set, row = divmod(stripe, in_object)
        length = min(unit - skipped, end - offset)
        piece = Piece(object_set * width + position, row * unit + skipped, length, offset)
        if waiting is not None and (waiting.number, waiting.offset + waiting.size) == piece[:2]:
            waiting = waiting._replace(size=waiting.size + length)
        else:
            if waiting is not None:
                yield waiting
            waiting = piece
        offset += length
    if waiting is not None:
        yield waiting


# --- reading


class Location(NamedTuple):
    """Where the objects of a snapshot's files lie; travels as a JSON list."""

    pool: str
    snapshot: int


class Unread(NamedTuple, Generic[FileT]):
    """What a read did not settle."""

    left: Sequence[FileT]  # not begun before the deadline
    silent: Sequence[FileT]  # no answer within the patience of the read
    unreachable: Sequence[FileT]  # no answer within OBJECT_SECONDS


class Reader:
    def __init__(self, access: Access) -> None:
        """Connects. OSError when the cluster does not answer or refuses the user."""
        import rados  # here: librados takes 16 MiB, which processes without a reader save

        self._error: type[Exception] = rados.Error
        try:
            self._cluster = rados.Rados(
                conffile=access.conf,
                name=f"client.{access.user}",
                conf={
                    "rados_mon_op_timeout": "15",
                    "rados_osd_op_timeout": f"{OBJECT_SECONDS:g}",
                },
            )
            self._cluster.connect(timeout=15)
        except self._error as error:
            raise OSError(getattr(error, "errno", None) or errno.EIO, str(error)) from error
        self._pools: dict[Location, Any] = {}
        self._all = threading.Semaphore(_MOST_PENDING)
        self._usual = 0.0  # seconds that an answer takes, a running mean

    def _objects(self, location: Location) -> Any:
        if location not in self._pools:
            try:
                objects = self._cluster.open_ioctx(location.pool)
                objects.set_read(location.snapshot)
            except self._error as error:
                raise OSError(getattr(error, "errno", None) or errno.EIO, str(error)) from error
            self._pools[location] = objects
        return self._pools[location]

    def read(
        self,
        location: Location,
        items: Sequence[FileT],
        each: Callable[[FileT, bytes | None], None],
        deadline: float,
        *,
        patient: bool = False,
        waiting: Callable[[], None] = lambda: None,
    ) -> Unread[FileT]:
        """Call ``each(item, bytes)`` for every item, None where its object is not the whole file.

        ``each`` runs in librados' own thread, one at a time, and never after the read ended. What
        it raises ends the read, and is raised here; ``waiting`` is called several times a second
        while answers are awaited, and may raise too. No read starts after ``deadline`` (monotonic).
        ``patient``: wait until librados gives an object up. OSError when the pool cannot be opened.
        """
        return _Read(self, self._objects(location), each, waiting, patient=patient).run(
            items, deadline
        )

    def answered(self, seconds: float | None) -> None:
        """An operation ended; how long its answer took, if there was one."""
        if seconds is not None:
            self._usual += (seconds - self._usual) / 16
        self._all.release()

    @property
    def patience(self) -> float:
        return min(_MOST_PATIENCE, max(_LEAST_PATIENCE, _USUAL * self._usual))

    def begin(self, seconds: float) -> bool:
        """Whether another operation may be in flight, after at most ``seconds``."""
        return self._all.acquire(timeout=seconds)


class _Read(Generic[FileT]):
    """One call of ``Reader.read``."""

    def __init__(
        self, reader: Reader, objects: Any, each: Callable[[FileT, bytes | None], None],
        waiting: Callable[[], None], *, patient: bool,
    ) -> None:  # fmt: skip
        self._reader = reader
        self._objects = objects
        self._each = each
        self._waiting = waiting
        self._patient = patient
        # Items, and when they were asked for; a callback whose number is gone does nothing.
        self._pending: dict[int, tuple[FileT, float]] = {}
        self._ending = threading.Lock()  # held while a callback works
        self._free = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._silent: list[FileT] = []
        self._unreachable: list[FileT] = []

    def run(self, items: Sequence[FileT], deadline: float) -> Unread[FileT]:
        largest = max((item.size for item in items), default=1) or 1
        slots = max(_LEAST_IN_FLIGHT, min(_IN_FLIGHT, _BYTES_IN_FLIGHT // largest))
        if self._patient:
            slots = max(slots, min(_PATIENT_IN_FLIGHT, _PATIENT_BYTES // largest))
        self._free.release(slots)
        asked = 0
        try:
            for number, item in enumerate(items):
                if not self._slot(deadline) or self._errors or time.monotonic() >= deadline:
                    break
                asked += 1
                self._pending[number] = item, time.monotonic()
                number_of, offset = (item.number, item.offset) if isinstance(item, Part) else (0, 0)
                self._objects.aio_read(
                    f"{item.ino:x}.{number_of:08x}", item.size, offset, self._finished(number)
                )
            while self._pending and not self._errors:
                self._free.acquire(timeout=_POLL_SECONDS)
                self._look()
        finally:
            self._give_up(0.0)
        if self._errors:
            raise self._errors[0]
        return Unread(items[asked:], self._silent, self._unreachable)

    def _slot(self, deadline: float) -> bool:
        """Wait for a slot; False when there is none before the deadline."""
        while not self._free.acquire(timeout=_POLL_SECONDS):
            self._look()
            if self._errors or time.monotonic() >= deadline:
                return False
        while not self._reader.begin(_POLL_SECONDS):
            self._look()
            if self._errors or time.monotonic() >= deadline:
                return False
        return True

    def _look(self) -> None:
        self._waiting()
        patience = OBJECT_SECONDS + _MOST_PATIENCE if self._patient else self._reader.patience
        self._give_up(patience)

    def _give_up(self, patience: float) -> None:
        """Those that were asked for longer ago than ``patience`` seconds are silent."""
        before = time.monotonic() - patience
        with self._ending:
            for number, (item, since) in list(self._pending.items()):
                if since <= before:
                    del self._pending[number]
                    self._silent.append(item)
                    self._free.release()

    def _finished(self, number: int) -> Callable[[Any, bytes | None], None]:
        began = time.monotonic()

        def callback(completion: Any, data: bytes | None) -> None:
            with self._ending:
                found = self._pending.pop(number, None)
                gave_up = completion.get_return_value() == -errno.ETIMEDOUT
                self._reader.answered(None if gave_up else time.monotonic() - began)
                if found is None:
                    return
                item, _ = found
                try:
                    if self._errors:
                        return
                    if gave_up:
                        self._unreachable.append(item)
                    else:
                        whole = data is not None and len(data) == item.size
                        self._each(item, data if whole else None)
                except BaseException as error:
                    self._errors.append(error)
                finally:
                    self._free.release()

        return callback
