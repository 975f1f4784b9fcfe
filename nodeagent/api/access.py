"""Who calls, what that caller may do, and the record of what was called.

Nothing here knows HTTP. ``Caller`` is what a listener makes of a connection: the peer's uid on the
unix socket, a token's name over TCP. ``Tokens`` reads the tokens file again when it changes; a file
that cannot be used admits nobody, because a token that somebody wanted to revoke must not live on.
``CallLog`` writes one line for each changing call. Lines about callers that nobody knows go to a
file of their own: whoever can only knock must not be able to push the record of real changes out.
"""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cachetools
import pydantic
import structlog
import yaml

import kit.files
import kit.settings
from kit.room import Role
from nodeagent.settings import is_loopback

log = structlog.get_logger("agent")

RECHECK_SECONDS = 1.0  # how often a file is looked at again
CHANGES_PER_SECOND = 50.0  # of one caller
CHANGES_AT_ONCE = 200
MOST_CALLERS = 4096
MOST_WAITING_LINES = 1000
CLOSE_SECONDS = 2.0
SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Caller:
    """``role`` None: nobody we know."""

    name: str
    role: Role | None
    key: str  # what a rate limit counts


# --- files that somebody rotates


class Watched:
    """Whether one of the files has changed since ``changed`` was last asked."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: object = None
        self._looked = -RECHECK_SECONDS

    def changed(self) -> bool:
        if time.monotonic() - self._looked < RECHECK_SECONDS:
            return False
        self._looked = time.monotonic()
        now = [self._stamp(path) for path in self._paths]
        if now == self._seen:
            return False
        self._seen = now
        return True

    @staticmethod
    def _stamp(path: Path) -> object:
        try:
            found = path.stat()
        except OSError as error:
            return error.errno
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class _Entry(kit.settings.Section):
    role: Role
    token: str = pydantic.Field(default="", repr=False)
    sha256: str = pydantic.Field(default="", pattern=r"^([0-9a-f]{64})?$")

    @pydantic.model_validator(mode="after")
    def _one_secret(self) -> "_Entry":
        if bool(self.token) == bool(self.sha256):
            raise ValueError("needs either token or sha256")
        if self.token and len(self.token) < SHORTEST_TOKEN:
            raise ValueError(f"the token is shorter than {SHORTEST_TOKEN} characters")
        return self


_File = pydantic.TypeAdapter(dict[kit.settings.Word, _Entry])


class Tokens:
    """The callers of the tokens file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watched = Watched(path)
        self._known: list[tuple[bytes, Caller]] = []
        self.problem = ""  # why nobody is admitted

    def caller(self, authorization: str, peer: str) -> Caller:
        """Who sends this Authorization header. Compares with every token, in constant time."""
        if self._watched.changed():
            self._read()
        scheme, _, token = authorization.partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = Caller(f"unknown caller at {peer}", None, f"unknown {peer}")
        for digest, caller in self._known:
            if hmac.compare_digest(digest, given) and scheme.lower() == "bearer":
                found = Caller(f"{caller.name} at {peer}", caller.role, caller.key)
        return found

    def _read(self) -> None:
        self._known = []
        try:
            plain = yaml.safe_load(self._path.read_text(encoding="utf-8"))
            entries = _File.validate_python(plain)
        except pydantic.ValidationError as error:
            # Not str(error): it repeats the value, and that may be a token.
            self.problem = "; ".join(
                f"{'.'.join(map(str, each['loc'][:2]))}: {each['msg']}" for each in error.errors()
            )
        except yaml.YAMLError:
            self.problem = "is not valid YAML"  # the error's text may quote a token
        except (OSError, ValueError, RecursionError) as error:
            self.problem = str(getattr(error, "strerror", None) or "is not a text file")
        else:
            self.problem = ""
            self._known = [
                (
                    bytes.fromhex(entry.sha256)
                    or hashlib.sha256(entry.token.encode("utf-8", "surrogateescape")).digest(),
                    Caller(f"token {name}", entry.role, f"token {name}"),
                )
                for name, entry in entries.items()
            ]
        if self.problem:
            log.error("tokens file is unusable; nobody is admitted", why=self.problem)
        else:
            log.info("tokens read", callers=[caller.name for _, caller in self._known])


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
        self._left: cachetools.LRUCache[str, tuple[float, float]] = cachetools.LRUCache(
            MOST_CALLERS
        )

    def admits(self, key: str) -> bool:
        now = time.monotonic()
        left, when = self._left.get(key, (float(self._burst), now))
        left = min(self._burst, left + (now - when) * self._per_second)
        self._left[key] = (left - 1 if left >= 1 else left, now)
        return left >= 1


class CallLog:
    """One line for each changing call: an event of the log, and an entry of api.log.

    The file is written by a task of its own. A state directory on a disk that hangs must not keep
    the guard's kill switch from working.
    """

    def __init__(self, state_dir: Path) -> None:
        self._files: Mapping[bool, Path] = {
            True: state_dir / "api.log",
            False: state_dir / "api-refused.log",
        }
        self._lines: asyncio.Queue[tuple[Path, dict[str, Any]]] = asyncio.Queue(MOST_WAITING_LINES)

    def note(self, *, known: bool, **entry: Any) -> None:
        log.info("api call", **entry)
        with contextlib.suppress(asyncio.QueueFull):  # the event above is there
            self._lines.put_nowait((self._files[known], {"at": time.time(), **entry}))

    async def write(self) -> None:
        """Never returns."""
        while True:
            path, entry = await self._lines.get()
            try:
                await asyncio.to_thread(kit.files.append, path, entry)
            except OSError as error:
                log.error("api call not recorded", file=str(path), error=str(error))
            finally:
                self._lines.task_done()

    async def flush(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._lines.join()
