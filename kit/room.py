"""How a room joins the process: one ``Room`` value holds everything that the process needs of it.

The process (``nodeagent/``) serves an admin API, a command line, a status page, metrics and one
settings file. It must not know which rooms exist, or each new route and command would be written in
two places. So each room describes itself once, in its own ``room.py``, and ``nodeagent/rooms.py``
lists these descriptions.

Handlers know nothing of the HTTP library: they take a ``Request`` and return plain JSON, an
``Answer`` with a status of its own, or a ``Stream`` of JSON lines. They raise ``kit.errors``; the
server makes status codes of those. ``role`` says who may call a route.

A ``Room`` holds functions where it could hold objects (``build``, ``routes``, ``page``, a command's
``load``): the command line reads every room's settings model but runs one command, and must not
import what the agent needs; the agent must not import what commands need. ``named`` and ``calls``
make them of the names of these objects.
"""

import asyncio
import functools
import json
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

import kit.checks
import kit.errors
import kit.findings
import kit.settings
import kit.traces

if TYPE_CHECKING:
    import click
    from prometheus_client.core import Metric

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
    """One API request. ``path`` holds the decoded placeholders of the route's path."""

    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, **types: type) -> dict[str, Any]:
        """The body's fields, each of its type. SettingsError for another field or type.

        A field may be absent; the caller decides what that means.
        """
        for name, value in self.body.items():
            if name not in types:
                raise kit.errors.SettingsError(
                    "request", f"unknown field {name!r}", "see /openapi.json"
                )
            # Exactly: for Python, not for JSON, a truth value is a number too.
            if type(value) is not types[name]:
                raise kit.errors.SettingsError(
                    "request", f"field {name!r} must be {types[name].__name__}", "see /openapi.json"
                )
        return dict(self.body)


@dataclass(frozen=True)
class Answer:
    """An answer with a status other than 200."""

    body: Json
    status: int = 200


@dataclass(frozen=True)
class Stream:
    """An answer of JSON lines (NDJSON), one for each item, until the last or the client leaves."""

    items: AsyncGenerator[Json, None]


async def watch(
    read: Callable[[], Json | None], is_last: Callable[[Json], bool] = lambda _: False
) -> AsyncGenerator[Json, None]:
    """``read()`` now and whenever it has changed, and unchanged every ``HEARTBEAT_SECONDS``.

    Ends when ``read`` returns None, or after an item that is the last.
    """
    last, sent = "", 0.0
    while (item := read()) is not None:
        text = json.dumps(item)  # compared as text: the room may change the object in place
        if text != last or time.monotonic() - sent >= HEARTBEAT_SECONDS:
            last, sent = text, time.monotonic()
            yield item
        if is_last(item):
            return
        await asyncio.sleep(WATCH_SECONDS)


Handler = Callable[[Any, Request], Awaitable[Json | Answer | Stream]]  # component, request


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
    below: "Sequence[Cell]" = ()


@dataclass(frozen=True)
class PageSection:
    """What a room shows on the status page: a sentence and a table."""

    title: str
    summary: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Api(Protocol):
    """The admin API as commands use it."""

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """The decoded answer. UnreachableError, or the agent's own error with its exit code."""

    def lines(self, path: str) -> AsyncIterator[Any]:
        """Each line of a stream, decoded, until the agent ends it."""


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


@dataclass(frozen=True)
class Command:
    """A command group of the command line: ``nodeagent NAME ...``."""

    name: str
    summary: str  # its line in ``nodeagent --help``
    load: Callable[[], "click.Group"]  # imports it


def named(name: str) -> Callable[[], Any]:
    """Gives what is called ``name`` ("module:attribute"), imported when it is asked for."""
    return functools.partial(pkgutil.resolve_name, name)


def calls(name: str) -> Callable[..., Any]:
    """Calls what is called ``name``, imported when it is called."""
    return lambda *given: pkgutil.resolve_name(name)(*given)


# settings, state_dir -> what the node must have for them (``nodeagent doctor``)
Checks = Callable[[Any, Path], Sequence[kit.checks.Check]]
Build = Callable[[Any, Path, kit.findings.Reporter], Component[Any]]


@dataclass(frozen=True)
class Room:
    """Everything the process needs of one room."""

    name: str  # its section in the settings, its component's name, the origin of its findings
    summary: str  # describes the settings section; says what its absence means
    settings: type[kit.settings.Section]
    build: Build  # settings, state_dir, reporter -> component; no I/O
    routes: Callable[[], Sequence[Route]] = tuple
    openapi: str = ""  # the YAML resource "package:file" that describes the routes
    commands: Sequence[Command] = ()
    page: Callable[[Any], Sequence[PageSection]] | None = None  # component -> sections
    checks: Checks | None = None
    traces: Callable[[], kit.traces.Traces] | None = None  # ``nodeagent uninstall``
