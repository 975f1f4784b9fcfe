"""What annotations of an object ask this node to do: each value once, and what came of it.

A value that is carried out is remembered on disk; an agent that ends in between begins anew.
To begin may take a while (a dataset may be busy), so it has a task of its own for each object, and
no task is ended in the middle of what it changes.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

import kit.errors
import kit.files
import kit.formats
import kit.room
from nodeagent.cluster import intent, kinds
from nodeagent.state import State

log = structlog.get_logger("cluster")

FILE = "requests.json"  # in the state directory
SLOW_SECONDS = 60.0  # after which a request that still begins says so
MOST_AT_ONCE = 8  # objects whose requests begin at the same time; the others wait in order
LONGEST_TEXT = 300
LOST = "whether it was carried out is not known: requests.json was damaged; give it another value"


@dataclass(frozen=True)
class ObjectRequest:
    """``state``: pending, done or failed. ``begun``: the room took it on, in this process."""

    value: str
    state: str = "pending"
    message: str = ""
    begun: bool = False


Key = tuple[str, str, str]  # kind, name, verb


@dataclass(frozen=True)
class _Beginning:
    """The task gives, by verb, why it could not begin; '' for one that did."""

    values: Mapping[str, str]  # by verb
    task: asyncio.Task[dict[str, str]]
    since: float  # monotonic

    @property
    def slow(self) -> bool:
        return time.monotonic() > self.since + SLOW_SECONDS


class Requests:
    """``asked``: by kind, name and verb. ``changed`` is called when something has begun."""

    def __init__(self, folder: Path, changed: Callable[[], None] = lambda: None) -> None:
        self.asked: dict[Key, ObjectRequest] = {}
        self._changed = changed
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)
        self._beginning: dict[intent.Key, _Beginning] = {}  # at most one for each object
        self._file = folder / FILE
        self._lost = False  # what objects ask for may have been carried out already
        self._load()

    def of(self, key: intent.Key) -> Mapping[str, ObjectRequest]:
        """By verb."""
        verbs = (each.verb for _, i in kinds.intents() if i.kind == key[0] for each in i.requests)
        return {v: self.asked[(*key, v)] for v in verbs if (*key, v) in self.asked}

    async def step(self, state: State, verdicts: Iterable[intent.Verdict]) -> None:
        """Begin what is new, and look at what was begun. It waits for neither."""
        running = {each.room.name: each for each in state.running if each.started}
        rooms = {each.kind: (room.name, each) for room, each in kinds.intents()}
        before, wanted = dict(self.asked), set()
        for verdict in verdicts:
            room, found = rooms[verdict.wish.kind]
            asked = [each for each in found.requests if each.verb in verdict.wish.asks]
            for request in asked:
                key, value = (*verdict.wish.key, request.verb), verdict.wish.asks[request.verb]
                wanted.add(key)
                if key not in self.asked or self.asked[key].value != value:
                    self.asked[key] = (
                        ObjectRequest(value, "failed", LOST) if self._lost else ObjectRequest(value)
                    )
            # What an object asks for that is refused is not done, and what was done for it before
            # is not forgotten: mended, it must not be done again.
            if asked and verdict.keys and room in running:
                self._carry_out(verdict.wish.key, asked, running[room].component, verdict.keys[0])
        for key in self.asked.keys() - wanted:
            del self.asked[key]
        for of in self._beginning.keys() - {key[:2] for key in wanted}:
            if self._beginning[of].task.done():
                self._results(of)
        if _over(self.asked) != _over(before):
            await self._save()

    def _carry_out(
        self, of: intent.Key, requests: Iterable[kit.room.Asking], component: Any, name: str
    ) -> None:
        """One step of what is pending of one object."""
        results = self._results(of)
        busy = self._beginning.get(of)
        new: dict[str, tuple[kit.room.Asking, str]] = {}
        for request in requests:
            now = self.asked[(*of, request.verb)]
            if now.state != "pending":
                continue
            if why := results.get((request.verb, now.value)):
                now = ObjectRequest(now.value, message=why)
            elif why is not None:
                now = ObjectRequest(now.value, begun=True)
            if now.begun:
                now = _looked(now, request, component, name)
            elif busy is None:
                new[request.verb] = request, now.value
            elif busy.slow and busy.values.get(request.verb) == now.value:
                now = ObjectRequest(now.value, message="it takes longer than expected")
            self.asked[(*of, request.verb)] = now
        if new:
            task = asyncio.create_task(
                self._begin(of, new, component, name), name=f"requests of {name}"
            )
            values = {verb: value for verb, (_, value) in new.items()}
            self._beginning[of] = _Beginning(values, task, time.monotonic())

    def _results(self, of: intent.Key) -> dict[tuple[str, str], str]:
        """Why not, or '', by verb and value, of a task that is over; it counts once."""
        found = self._beginning.get(of)
        if found is None or not found.task.done():
            return {}
        del self._beginning[of]
        return {(verb, found.values[verb]): why for verb, why in found.task.result().items()}

    async def _begin(
        self,
        of: intent.Key,
        new: Mapping[str, tuple[kit.room.Asking, str]],
        component: Any,
        name: str,
    ) -> dict[str, str]:
        """In their order. Never cancelled: a room may be in the middle of a durable change."""
        found = {}
        async with self._slots:
            for verb, (request, value) in new.items():
                if self.asked.get((*of, verb), ObjectRequest("")).value != value:
                    continue  # nobody asks for it any more
                try:
                    await request.begin(component, name)
                    found[verb] = ""
                except (kit.errors.AgentError, TimeoutError, OSError, RuntimeError) as error:
                    # Not yet possible: it is not there yet, or busy.
                    why = str(error) or "it takes longer than expected"
                    found[verb] = why[:LONGEST_TEXT]
        if "" in found.values():
            self._changed()  # it may be over already
        return found

    async def _save(self) -> None:
        rows = [
            [*key, each.value, each.state, each.message] for key, each in _over(self.asked).items()
        ]
        try:
            await asyncio.to_thread(kit.files.save, self._file, json.dumps(rows).encode())
        except OSError as error:
            log.warning("what was asked for cannot be remembered", why=str(error))

    async def settle(self) -> None:
        """All objects are known by now: what they ask for from here on is new."""
        if self._lost:
            self._lost = False
            await self._save()

    def _load(self) -> None:
        found = kit.formats.read(self._file, None, _rows)
        if isinstance(found, kit.formats.Damage):
            log.error("what was asked for is forgotten", why=str(found))
            self._lost = True
        elif found is not None:
            self.asked = found


def _rows(value: Any) -> dict[Key, ObjectRequest]:
    """ValueError, TypeError for what no agent wrote."""
    rows = msgspec.convert(value, type=list[tuple[str, str, str, str, str, str]])
    return {row[:3]: ObjectRequest(*row[3:]) for row in rows}


def _looked(
    now: ObjectRequest, request: kit.room.Asking, component: Any, name: str
) -> ObjectRequest:
    """At one that was begun."""
    try:
        end = request.end(component, name)
    except kit.errors.NotFoundError:
        return ObjectRequest(now.value)  # it is gone for a moment: anew
    if end is None:
        return ObjectRequest(now.value, begun=True)
    log.info("carried out", name=name, value=now.value, well=end.well, message=end.message)
    return ObjectRequest(now.value, "done" if end.well else "failed", end.message[:LONGEST_TEXT])


def _over(asked: Mapping[Key, ObjectRequest]) -> dict[Key, ObjectRequest]:
    return {key: each for key, each in asked.items() if each.state != "pending"}
