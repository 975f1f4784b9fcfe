"""The objects of one kind, kept current by one list and one watch after another.

Where the server can, the list is the beginning of the watch (WatchList): it sends each object as an
event and then a mark, so it never makes one answer of them all. Elsewhere it is a request.

What protects the API server from thousands of these: a list comes from its cache and at most every
``LIST_SECONDS``, at a moment of each node's own; a watch that ended early goes on where it was;
pauses grow, and Retry-After is kept. A silent connection is given up: the server sends bookmarks
each minute.

All of it stays below half a minute, so that a node is current 30 s after a fault ended.
"""

import asyncio
import contextlib
import random
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

import kit.units
from kit.pause import Backoff, jittered
from kube import client

log = structlog.get_logger("kube")

ANSWER_SECONDS = 30.0
SILENCE_SECONDS = 120.0
LIST_SECONDS = 30.0
SPREAD_SECONDS = 20.0  # within which all nodes list anew that lost their place at the same moment
WATCH_SECONDS = (300.0, 600.0)  # after which the server ends a watch
PAUSES = (1.0, 20.0)
# Of a list that is streamed: until the answer begins, and until the mark at its end. A server that
# begins and sends no mark knows nothing of streams; one that is silent is only slow.
BEGIN_SECONDS = 20.0
MARK_SECONDS = 30.0
MARK = "k8s.io/initial-events-end"  # an annotation
# Answers to a stream by servers that have none: an old one does not know the parameters, another
# has the feature switched off, or an etcd that lacks what it needs (500, 504).
NO_STREAMS = (400, 422, 500, 504)
NO_STREAMS_SECONDS = 1800.0  # it may be another server, or a newer one, after that
BUSY = (429, 503)
NO_KIND_SECONDS = 30.0
LARGEST_LIST = 32 * 1024 * 1024  # or page of one
MOST_OBJECTS = 20_000
MOST_PAGES = 200
KeptT = TypeVar("KeptT")


class _GoneError(Exception):
    """The version to watch from is no longer known: list again."""


@dataclass
class _First(Generic[KeptT]):
    """What came of a streamed list so far; whoever looks meanwhile sees what was before."""

    objects: dict[str, KeptT] = field(default_factory=dict)
    count: int = 0


class Watch(Generic[KeptT]):
    """``objects`` by name, as ``keep`` made them; valid once ``synced``.

    ``keep`` gives None for an object that is of no interest; ValueError or LookupError for one that
    is not understood, which is left out. ``changed`` is called after each change. ``deleted``:
    names whose deletion was seen; whoever reads it takes them out. ``trouble``: why it is not
    current. ``page``: objects in one answer of a list; such a list is as new as etcd and not just
    from the server's cache, so it is for few clients. 0: all in one.

    ``lists``: how many were made, streamed or not.
    """

    def __init__(
        self,
        server: client.ApiServer,
        path: str,
        *,
        about: str,
        keep: Callable[[dict[str, Any]], KeptT | None],
        changed: Callable[[], None],
        query: Mapping[str, str] | None = None,
        page: int = 0,
    ) -> None:
        self.objects: dict[str, KeptT] = {}
        self.deleted: set[str] = set()
        self.synced = False
        self.trouble = ""
        self.lists = 0
        self._versions = server.versions.setdefault(client.part_of(path), client.ResourceVersions())
        self._epoch = 0  # that ``_version`` is of
        self._server = server
        self._path = path
        self._about = about
        self._keep = keep
        self._changed = changed
        self._query = dict(query or {})
        self._page = page
        self._version = ""
        self._doubtful = False  # the connection broke: this may be another server, or another etcd
        self._listed = 0.0
        self._backoff = Backoff(*PAUSES)

    async def follow(self) -> None:
        """Never ends."""
        while True:
            try:
                if self._version and self._doubtful:
                    await self._compare()
                if await (self._watch() if self._version else self._begin()):
                    # Somebody stops, or another server takes over: not at once, and not blindly.
                    self._doubtful = True
                    await asyncio.sleep(self._backoff.next())
            except _GoneError:
                self._version = ""
            except client.KubeError as error:
                self._doubtful = True
                if error.status == 410:
                    self._version = ""
                pause = max(self._backoff.next(), error.retry_after * random.uniform(1.0, 1.25))
                if error.status == 404:
                    pause = jittered(NO_KIND_SECONDS)
                if self.trouble != str(error):
                    self.trouble = str(error)
                    log.warning("not current", what=self._about, why=str(error))
                    self._changed()
                await asyncio.sleep(pause)

    def forget(self) -> None:
        """Nobody follows it for a while: hold nothing; the next list keeps its distance."""
        self.objects, self.deleted = {}, set()
        self.synced = False
        self._version = ""

    def _url(self, **more: str) -> str:
        return f"{self._path}?{urllib.parse.urlencode({**self._query, **more})}"

    async def _compare(self) -> None:
        """_GoneError when the server's versions are before ours: it has another etcd."""
        found = await self._server.request(
            "GET", self._url(limit="1"), about=self._about, deadline=ANSWER_SECONDS
        )
        self._versions.compare(_number(_version(found)))
        if self._epoch != self._versions.epoch:
            raise _GoneError

    async def _begin(self) -> bool:
        """List, and watch from there. Whether the server ended the watch before its time."""
        before = self._listed
        if before:
            since = time.monotonic() - before
            await asyncio.sleep(max(LIST_SECONDS - since, random.uniform(0.0, SPREAD_SECONDS)))
        self._listed = time.monotonic()
        self.lists += 1
        try:
            if self._listed >= self._server.no_streams_until:
                try:
                    return await self._watch(_First())
                except client.KubeError as error:
                    if self._version or error.status not in NO_STREAMS:
                        raise
                    self._no_streams(error)  # it sent nothing, so this is no second list
            await self.look()
        except client.KubeError as error:
            if not self._version and error.status in BUSY:
                self._listed, self.lists = before, self.lists - 1  # it cost the server nothing
            raise
        return await self._watch()

    def _no_streams(self, why: client.KubeError) -> None:
        pause = jittered(NO_STREAMS_SECONDS)
        self._server.no_streams_until = time.monotonic() + pause
        log.info("lists are not streamed", what=self._about, why=str(why))

    async def look(self) -> None:
        """List once. KubeError."""
        objects: dict[str, KeptT] = {}  # whoever looks meanwhile sees no half of it
        count = 0
        query = {"limit": str(self._page)} if self._page else {"resourceVersion": "0"}
        for _ in range(MOST_PAGES):
            found = await self._server.request(
                "GET", self._url(**query), about=self._about,
                deadline=ANSWER_SECONDS, largest=LARGEST_LIST,
            )  # fmt: skip
            items = found.get("items")
            count += len(items) if isinstance(items, list) else MOST_OBJECTS + 1
            if not isinstance(items, list) or count > MOST_OBJECTS:
                raise client.KubeError(self._about, f"no list of at most {MOST_OBJECTS} objects")
            for each in items:
                self._take(each, objects)
            version = _version(found)
            query["continue"] = str(found["metadata"].get("continue") or "")
            if not query["continue"]:
                break
        else:
            raise client.KubeError(self._about, f"its list has more than {MOST_PAGES} pages")
        self._replace(objects, version)

    def _replace(self, objects: dict[str, KeptT], version: str) -> None:
        """By all that there are: what went while nobody watched is gone."""
        self.objects = objects
        self._epoch = self._versions.epoch
        self._current(version)
        self.synced = True
        self._changed()

    async def _watch(self, first: _First[KeptT] | None = None) -> bool:
        """Whether the server ended it before its time. ``first``: it begins with a list."""
        began = time.monotonic()
        seconds = random.uniform(*WATCH_SECONDS)
        query = {
            "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": f"{seconds:.0f}",
            "resourceVersion": self._version,
        }  # fmt: skip
        if first is not None:
            query |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
            query["resourceVersion"] = "" if self._page else "0"
        events = self._server.lines(
            self._url(**query), about=self._about, silence=SILENCE_SECONDS,
            deadline=ANSWER_SECONDS if first is None else BEGIN_SECONDS,
        )  # fmt: skip
        try:
            async with (
                asyncio.timeout(None if first is None else MARK_SECONDS) as limit,
                contextlib.aclosing(events),
            ):
                async for event in events:
                    kind, thing = self._understood(event)
                    if first is None:
                        self._event(kind, thing)
                    elif self._is_mark(kind, thing, first):
                        limit.reschedule(None)
                        self._replace(first.objects, _version(thing))
                        first = None
        except TimeoutError:  # of the mark: what the connection lacks is a KubeError
            error = client.KubeError(
                self._about, f"its list was streamed without an end within {MARK_SECONDS:g}s"
            )
            self._no_streams(error)
            raise error from None
        if first is not None:
            raise client.KubeError(self._about, "the stream of its list ended before its time")
        return time.monotonic() < began + seconds * 0.9

    def _understood(self, event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Its type and object. KubeError or _GoneError when it is an error."""
        kind, thing = str(event.get("type")), event.get("object")
        if not isinstance(thing, dict):
            raise client.KubeError(self._about, "an event without an object")
        if kind == "ERROR":
            if thing.get("code") == 410:
                raise _GoneError
            raise client.KubeError(
                self._about, str(thing.get("message"))[:300], int(thing.get("code") or 0)
            )
        return kind, thing

    def _is_mark(self, kind: str, thing: dict[str, Any], first: _First[KeptT]) -> bool:
        """Take an event of a streamed list; whether it was the mark at its end."""
        if kind == "BOOKMARK":
            notes = (thing.get("metadata") or {}).get("annotations") or {}
            return notes.get(MARK) == "true"
        first.count += 1
        if first.count > MOST_OBJECTS:
            raise client.KubeError(self._about, f"no list of at most {MOST_OBJECTS} objects")
        if kind in ("ADDED", "MODIFIED"):
            self._take(thing, first.objects)
        elif kind == "DELETED":
            self._drop(thing, first.objects, self.objects)
        return False

    def _event(self, kind: str, thing: dict[str, Any]) -> None:
        if kind in ("ADDED", "MODIFIED"):
            self._take(thing, self.objects)
        elif kind == "DELETED":
            self._drop(thing, self.objects)
        self._current(_version(thing))
        if kind != "BOOKMARK":
            self._changed()

    def _take(self, thing: dict[str, Any], objects: dict[str, KeptT]) -> None:
        try:
            name = str(thing["metadata"]["name"])
            kept = self._keep(thing)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("object is not understood", what=self._about, why=str(error)[:300])
            return
        self.deleted.discard(name)
        if kept is None:
            objects.pop(name, None)
        elif name in objects or len(objects) < MOST_OBJECTS:
            objects[name] = kept

    def _drop(self, thing: dict[str, Any], *places: dict[str, KeptT]) -> None:
        name = str(thing["metadata"]["name"])
        for each in places:
            each.pop(name, None)
        self.deleted.add(name)

    def _current(self, version: str) -> None:
        self._version = version
        self._versions.saw(_number(version))
        self._doubtful = False
        self.trouble = ""
        self._backoff.reset()


def _version(found: Mapping[str, Any]) -> str:
    try:
        return str(found["metadata"]["resourceVersion"])
    except (LookupError, TypeError):
        raise client.KubeError("the API server's answer", "it has no resourceVersion") from None


def _number(version: str) -> int:
    return kit.units.parse_count(version, 2**64 - 1) or 0
