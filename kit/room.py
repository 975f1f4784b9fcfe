"""How a room joins the process: one ``Room`` value holds everything that the process needs of it.

The process (``nodeagent/``) serves an admin API, a command line, a status page, metrics and one
settings file. It must not know which rooms exist, or each new route and command would be written in
two places. So each room describes itself once, in its own ``room.py``, and ``nodeagent/rooms.py``
lists these descriptions; ``nodeagent/groups.py`` their commands, of which one is loaded at a time.

Handlers know nothing of the HTTP library: they take a ``Request`` and return a frozen dataclass or
plain values, an ``Answer`` with a status of its own, or a ``Stream`` of lines; the server makes
JSON of them. They raise ``kit.errors``, of which the server makes status codes. ``role`` says who
may call a route; the room's openapi.yaml says the rest of it (scripts/openapi.py).

A ``Room`` holds functions where it could hold objects (``build``, ``routes``, ``page``, a command's
``load``): a command must not import what the agent needs; the agent must not import what commands
need. ``named`` and ``calls`` make them of the names of these objects.
"""

import asyncio
import functools
import pkgutil
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import kit.errors
import kit.findings

if TYPE_CHECKING:
    import click
    from prometheus_client.core import Metric

    import kit.settings

SettingsT = TypeVar("SettingsT", contravariant=True)
Json = Mapping[str, Any]

# ``watch``: how often it reads, and after how long it repeats itself so that a client of an
# unchanged stream knows that the agent is there.
WATCH_SECONDS = 0.5
HEARTBEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Health:
    """``alive``: its work loop advances. ``ready``: it does its work. ``reasons``: why not."""

    alive: bool
    ready: bool
    reasons: Sequence[str] = ()


class Component(Protocol[SettingsT]):
    """The running part of a room."""

    name: str  # also the name of its section in the settings

    async def start(self) -> None:
        """Adopt what an earlier agent left behind, then begin. Raises AgentError."""

    async def reconcile(self, settings: SettingsT) -> Sequence[str]:
        """Bring the node to what ``settings`` says; called when they change and every few seconds.

        Returns the names of settings that cannot change while running (they keep their old value).
        """

    async def stop(self) -> None:
        """End our own work. What the kernel or the runtime serves for jobs stays."""

    def health(self) -> Health:
        """Cheap, never blocks; called for every probe."""

    def metrics(self) -> "Iterable[Metric]":
        """Current figures. Series are bounded: no label per file, pod or request."""


class Role(StrEnum):
    """Who may call a route; each role includes the ones before it."""

    READ = "read"
    OPERATE = "operate"
    DANGEROUS = "dangerous"  # what can lose protection or cached data

    def includes(self, other: "Role") -> bool:
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Request:
    """One API request. ``path`` holds the decoded placeholders of the route's path.

    ``caller``: who asks, as the listener knows it; nothing that the caller wrote.
    """

    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    caller: str = ""

    def fields(self, **types: type) -> dict[str, Any]:
        """The body's fields, each of its type. SettingsError for another field or type.

        A field may be absent; the handler decides what that means. ``object``: of any type. Every
        handler of a changing call asks, so that what the record shows of a body is what it meant.
        """
        for name, value in self.body.items():
            if name not in types:
                raise kit.errors.SettingsError(
                    "request", f"unknown field {name!r}", "see /openapi.json"
                )
            # Exactly: for Python, not for JSON, a truth value is a number too.
            if types[name] not in (object, type(value)):
                raise kit.errors.SettingsError(
                    "request", f"field {name!r} must be {types[name].__name__}", "see /openapi.json"
                )
        return dict(self.body)


@dataclass(frozen=True)
class Answer:
    """An answer with a status other than 200."""

    body: Any
    status: int = 200


@dataclass(frozen=True)
class Stream:
    """An answer of JSON lines (NDJSON), one for each item, until the last or the client leaves."""

    items: AsyncGenerator[Any, None]


async def watch(
    read: Callable[[], Any], is_last: Callable[[Any], bool] = lambda _: False
) -> AsyncGenerator[Any, None]:
    """``read()`` now and whenever it has changed, and unchanged every ``HEARTBEAT_SECONDS``.

    Ends when ``read`` returns None, or after an item that is the last. Items are frozen.
    """
    last, sent = None, 0.0
    while (item := read()) is not None:
        if item != last or time.monotonic() - sent >= HEARTBEAT_SECONDS:
            last, sent = item, time.monotonic()
            yield item
        if is_last(item):
            return
        await asyncio.sleep(WATCH_SECONDS)


Handler = Callable[[Any, Request], Awaitable[Any]]  # component, request


@dataclass(frozen=True)
class Route:
    """``path`` is like ``/v1/datasets/{name}``."""

    method: str
    path: str
    handler: Handler
    role: Role = Role.READ


@dataclass(frozen=True)
class Cell:
    """A table cell of the status page, or a smaller line below one."""

    text: str = ""
    tone: str = ""  # good, mid, bad or none
    style: str = ""  # strong, code or none
    progress: tuple[float, float] | None = None  # done and total, drawn as a bar
    # How it went, the oldest first, drawn as a small line with gaps where it is not known.
    spark: Sequence[float | None] = ()
    spark_top: float = 0.0  # what the upper edge of the line means; 0: the highest of its values
    below: "Sequence[Cell]" = ()
    number: bool = False  # aligned to the right, as its column's head
    wide: bool = False  # long: the page shows it below the others of its row, over their width


@dataclass(frozen=True)
class Slice:
    """A part of a disk, drawn as a part of a bar."""

    name: str
    bytes: int
    tone: str  # used, other, left, free or reserve


@dataclass(frozen=True)
class PageSection:
    """What a room shows on the status page and in ``nodeagent status``: a sentence and a table."""

    title: str
    summary: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    empty: str = ""  # instead of a table without rows: how there come to be some
    disk: Sequence[Slice] = ()  # what its disk holds, from the first to the last part


class Api(Protocol):
    """The admin API as commands use it."""

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The decoded answer. UnreachableError, or the agent's own error with its exit code."""

    async def text(self, path: str) -> str:
        """An answer that is not JSON, such as that of /metrics. Errors as of ``call``."""

    def lines(self, path: str) -> AsyncIterator[Any]:
        """Each line of a stream, decoded, until the agent ends it."""


@dataclass(frozen=True)
class RoomSection:
    """A room's section of the settings file, for commands that must know whether it counts.

    ``settings``: None without the section, and without a file that can be used; then ``error`` says
    why. ``off``: the file says ``ROOM: null``, which is more than leaving the section out.
    """

    settings: Any
    state_dir: Path
    error: kit.errors.SettingsError | None = None
    off: bool = False


class CommandContext(Protocol):
    """``ctx.obj`` of every command."""

    @property
    def api(self) -> str | None:
        """The agent's address when the command line names one: another node's, perhaps."""

    def client(self) -> Api:
        """A client of the agent. SettingsError when nothing says where it listens."""

    def offline(self, room: str) -> tuple[Any, Path]:
        """The room's settings and the state directory, for commands that work without the agent.

        Defaults, with a warning, where the settings file cannot be used: a kill switch must not
        depend on it.
        """

    def section(self, room: str, last_good: Path | None = None) -> RoomSection:
        """The room's section as the settings file has it. ``last_good``: keeps a copy of a file
        that can be used, and is read instead, with a warning, of one that cannot."""


@dataclass(frozen=True)
class Command:
    """A command group of the command line: ``nodeagent NAME ...``."""

    room: str
    name: str
    summary: str  # its line in ``nodeagent --help``
    load: Callable[[], "click.Group"]  # imports it


def named(name: str) -> Callable[[], Any]:
    """Gives what is called ``name`` ("module:attribute"), imported when it is asked for."""
    return functools.partial(pkgutil.resolve_name, name)


def calls(name: str) -> Callable[..., Any]:
    """Calls what is called ``name``, imported when it is called."""
    return lambda *given: pkgutil.resolve_name(name)(*given)


@dataclass(frozen=True)
class Rule:
    """A CEL expression over an object's spec that must hold, and what to say when it does not."""

    expression: str
    message: str


@dataclass(frozen=True)
class End:
    """How a request ended. ``well``: as it was wished."""

    well: bool
    message: str = ""


@dataclass(frozen=True)
class Asking:
    """What an annotation of an object may ask for, once for each value it has.

    ``begin`` raises AgentError while it is not possible, and is tried again; ``end`` gives None
    while it lasts. Both get the component and the element's key. ``verb``: the last part of the
    annotation's key.
    """

    verb: str
    begin: Callable[[Any, str], Awaitable[None]]
    end: Callable[[Any, str], End | None]


@dataclass(frozen=True)
class Intent:
    """A kind of objects of the cluster that add elements to a list of the room's settings.

    Without ``many`` the object's spec is one element, named as the object (``key``). With ``many``
    the spec has a list of that name. The schema of the kind is made from ``model``
    (``scripts/crds.py``), so that the settings file and the API cannot drift.
    """

    kind: str
    plural: str
    short: Sequence[str]
    summary: str
    field: str  # of the settings section: a tuple of ``model``
    model: "type[kit.settings.Section]"
    key: str  # the field of ``model`` that no two elements share
    many: str = ""
    without: Sequence[str] = ()  # fields of ``model`` that objects do not have
    rules: Sequence[Rule] = ()
    # Two names: the field of the field of ``model`` that names a file with a key, which objects may
    # give as a Secret instead.
    secret: tuple[str, str] | tuple[()] = ()
    # element, section, the directory of Secrets: the element as an object may give it.
    # SettingsError for what only the settings file may say. None: all of it.
    given: Callable[[Any, Any, Path], Any] | None = None
    # component, key: give up what a deleted object asked for. InUseError: who uses it. None: the
    # settings without the element are enough.
    release: Callable[[Any, str], Awaitable[None]] | None = None
    spread: bool = False  # objects may say on how many of the selected nodes it is kept
    # In the order in which they are begun.
    requests: Sequence[Asking] = ()


@dataclass(frozen=True)
class Report:
    """What the node's object in the cluster (NodeStorage) shows of a room.

    ``read`` gives a ``model``, or a list of them with ``many``. Bounded by whoever writes it there.
    """

    field: str
    model: "type[kit.settings.Shown]"
    many: bool
    read: Callable[[Any], Any]  # component
    brief: Callable[[Any], str]  # what ``read`` gave -> a few characters for 'kubectl get'
    key: str = ""  # with ``many``: the field of ``model`` that names one
    told: Sequence[str] = ()  # fields of ``model`` whose change is an event (``nodeagent events``)


def whole(shown: Sequence[Any]) -> str:
    """The brief of elements with ``percent``: how many are there in full, of how many."""
    return f"{sum(each.percent == 100 for each in shown)}/{len(shown)}"


@dataclass(frozen=True)
class Presence:
    """What is whole on this node, which labels of the Node tell schedulers.

    ``word`` becomes a part of the labels' keys. ``read`` gives a version by name. ``listen`` says
    what the room awaits before something stops being whole, once ``read`` leaves it out.
    """

    word: str
    read: Callable[[Any], Mapping[str, str]]  # component
    listen: Callable[[Any, Callable[[], Awaitable[None]]], None]  # component, what to await


@dataclass(frozen=True)
class Check:
    """What a node must have; ``nodeagent doctor`` looks.

    ``look(*arguments)``: a public function of a module; plain JSON goes in, a line on what works
    comes out. AgentError or OSError says what is missing. ``cost``: what does not work without it.
    ``wanted``: the settings ask for it.
    """

    name: str
    look: Callable[..., str]
    arguments: tuple[Any, ...]
    cost: str
    wanted: bool = True
    deadline: float = 20.0  # the child of a look starts in seconds on a busy node


# settings, state_dir -> what the node must have for them
Checks = Callable[[Any, Path], Sequence[Check]]
Build = Callable[[Any, Path, kit.findings.Reporter], Component[Any]]


@dataclass(frozen=True)
class Room:
    name: str  # its section in the settings, its component's name, the origin of its findings
    summary: str  # describes the settings section; says what its absence means
    settings: "type[kit.settings.Section]"  # it is a kube.settings.RoomSettings, too
    build: Build  # settings, state_dir, reporter -> component; no I/O
    routes: Callable[[], Sequence[Route]] = tuple
    # How their paths begin: /v1/HEAD. Of a room that is off only this is read: its routes would
    # load it.
    heads: Sequence[str] = ()
    page: Callable[[Any], Sequence[PageSection]] | None = None  # component -> sections
    checks: Checks | None = None
    # The module of ``nodeagent uninstall``. ``find(settings, state_dir)``: traces as JSON, in the
    # order in which they are removed; ``remove(settings, state_dir, kind, name)``. Settings: what
    # the section's ``as_json`` gave.
    traces: Callable[[], Any] | None = None
    intents: Sequence[Intent] = ()
    report: Report | None = None
    presence: Presence | None = None
    # A condition of the Node that critical findings of the room make True, and its reason while
    # there are none.
    condition: tuple[str, str] | None = None
    # Its files below the state directory, by pattern: what is assumed while one is damaged.
    state_files: Mapping[str, str] = field(default_factory=dict)
    # The lines of logs that it knows, each with ``id``, ``meaning`` and ``advice``: what the
    # runbook says of the findings log-ID.
    log_lines: Callable[[], Sequence[Any]] = tuple
    # Folders that hold data of users, of its section of the settings; they may lie below the state
    # directory, and a support bundle leaves them out.
    data: Callable[[Any], Sequence[Path]] = lambda _: ()
