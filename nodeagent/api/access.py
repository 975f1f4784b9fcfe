"""Who calls, what that caller may do, and the record of what was called.

Nothing here knows HTTP. ``Caller`` is what a listener makes of a connection: the peer's uid on the
unix socket, a token's name over TCP. ``CallLog`` writes one line for each changing call. Lines
about calls that changed nothing go to a file of their own: whoever can only knock, or holds a token
that may only read, must not be able to push the record of real changes out.
"""

import asyncio
import collections
import contextlib
import ipaddress
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cachetools
import structlog

import kit.files
import kit.redact
from kit.pause import Bucket
from kit.room import Role
from nodeagent.settings import is_loopback

log = structlog.get_logger("agent")

CHANGES_PER_SECOND = 50.0  # of one caller
CHANGES_AT_ONCE = 200
# Lines about calls that changed nothing, of one caller (all strangers are one). The next line
# counts the rest. More would push out what the kubelet keeps of the log within a day.
REFUSED_PER_SECOND = 0.2
REFUSED_AT_ONCE = 50
LARGEST_RECORD = 8 * 2**20  # bytes of changes, twice
MOST_CALLERS = 4096
MOST_WAITING_LINES = 1000
CLOSE_SECONDS = 2.0
AGAIN_SECONDS = 10.0  # until a record that could not be written is tried again
MOST_STREAMS = 64
STREAMS_OF_CALLER = 16


@dataclass(frozen=True)
class Caller:
    """``role`` None: may do nothing. ``problem``: why the role could not be found out.

    ``authenticated``: who it is has been proven, also when that caller has no role.
    """

    name: str
    role: Role | None
    key: str  # what a limit counts
    problem: str = ""
    authenticated: bool = False


# --- names under which a listener is asked


class Hosts:
    """Which Host headers a TCP listener answers.

    A web page whose name an attacker points at this node (DNS rebinding) is asked for under that
    name; the listener's own address and the configured names are not the attacker's to choose.
    """

    def __init__(self, host: str, names: Iterable[str]) -> None:
        self._names = {host.lower(), *(name.lower() for name in names)}
        self._loopback = is_loopback(host)
        if self._loopback:
            self._names.add("localhost")
        self._any = host in ("0.0.0.0", "::")

    def admits(self, header: str) -> bool:
        name = re.sub(r":\d*$", "", header).lower()
        if name.startswith("["):
            name = name.strip("[]")
        if name in self._names:
            return True
        try:
            literal = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._any or (self._loopback and literal.is_loopback)


# --- limits and the record


class Rate:
    """A token bucket for each caller."""

    def __init__(self, per_second: float = CHANGES_PER_SECOND, burst: int = CHANGES_AT_ONCE):
        self._per_second, self._burst = per_second, burst
        self._buckets: cachetools.LRUCache[str, Bucket] = cachetools.LRUCache(MOST_CALLERS)

    def of(self, key: str) -> Bucket:
        return self._buckets.setdefault(key, Bucket(self._per_second, self._burst))


class Streams:
    """How many streams are open, of each caller and in all."""

    def __init__(self) -> None:
        self._open: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def one(self, key: str) -> Iterator[str]:
        """Holds a place while the block runs. Yields why there is none; "" when there is."""
        refused = ""
        if self._open[key] >= STREAMS_OF_CALLER:
            refused = f"{STREAMS_OF_CALLER} streams of this caller are open already"
        elif self._open.total() >= MOST_STREAMS:
            refused = f"{MOST_STREAMS} streams are open already"
        if refused:
            yield refused
            return
        self._open[key] += 1
        try:
            yield ""
        finally:
            self._open[key] -= 1
            self._open += collections.Counter()  # forgets who has none


class CallLog:
    """One line for each changing call: an event of the log, and an entry of api.log.

    The file is written by a task of its own. A state directory on a disk that hangs must not keep
    the guard's kill switch from working.
    """

    def __init__(self, state_dir: Path, failed: Callable[[str], None] = lambda why: None) -> None:
        """``failed`` gets the reason while calls are not recorded, and '' when they are again."""
        self._file, self._refused = state_dir / "api.log", state_dir / "api-refused.log"
        self._failed = failed
        self._rate, self._skipped = Rate(REFUSED_PER_SECOND, REFUSED_AT_ONCE), 0
        self._lost = 0
        self._lines: asyncio.Queue[tuple[Path, dict[str, Any]]] = asyncio.Queue(MOST_WAITING_LINES)

    def note(self, caller: Caller, *, changed: bool, **entry: Any) -> None:
        """``changed``: the call was made, or may have been; else it was refused."""
        if not changed:
            if not self._rate.of("" if caller.role is None else caller.key).take():
                self._skipped += 1
                return
            if self._skipped:
                entry["skipped"], self._skipped = self._skipped, 0
        entry = kit.redact.value({"who": caller.name, **entry})
        log.info("api call", **entry)
        if self._lost:
            entry["lost"] = self._lost
        try:
            file = self._file if changed else self._refused
            self._lines.put_nowait((file, {"at": time.time(), **entry}))
            self._lost = 0
        except asyncio.QueueFull:  # the event above is there
            self._lost += 1

    async def write(self) -> None:
        """Never returns."""
        missed: collections.Counter[Path] = collections.Counter()
        while True:
            try:
                async with asyncio.timeout(AGAIN_SECONDS if missed else None):
                    path, entry = await self._lines.get()
            except TimeoutError:
                await self._catch_up(missed)
                continue
            try:
                if not await self._append(path, entry):
                    missed[path] += 1
                elif missed:
                    await self._catch_up(missed)
            finally:
                self._lines.task_done()

    async def _catch_up(self, missed: collections.Counter[Path]) -> None:
        """Note in each file how many lines it lacks."""
        for path, count in list(missed.items()):
            line = {"at": time.time(), "who": "nodeagent", "not_recorded": count}
            if await self._append(path, line):
                del missed[path]
        if not missed:
            self._failed("")

    async def _append(self, path: Path, entry: dict[str, Any]) -> bool:
        largest = LARGEST_RECORD if path == self._file else None
        try:
            await asyncio.to_thread(kit.files.append, path, entry, largest)
        except OSError as error:
            log.error("api call not recorded", file=str(path), error=str(error))
            self._failed(f"{path}: {error.strerror or error}")
            return False
        return True

    async def flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._lines.join()
