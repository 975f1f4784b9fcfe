"""What objects of the cluster add to the settings file. Pure.

Who wins, where two want the same dataset or image: the settings file of the node; of two objects
the older one. Whoever loses is told so. An object that the models refuse is left out alone.

What was in force and is missing now is not dropped at once (``step``): only a deletion that was
seen ends an object there and then.
"""

import dataclasses
import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pydantic

import kit.errors
import kit.room
import kit.slips
from kube.settings import RoomSettings
from nodeagent.cluster import kinds
from nodeagent.settings import Settings

Key = tuple[str, str]  # kind and name
OURS = ("nodeSelector", "secretRef", "spread")  # of a spec: not the room's
LONGEST_VALUE = 63  # of an annotation that asks for something


@dataclass(frozen=True)
class Wish:
    """One object. ``created``: RFC 3339. ``spec`` is as in the object.

    ``asks``: what annotations ask for (``kit.room.Asking``).
    """

    kind: str
    name: str
    uid: str
    generation: int
    created: str
    spec: Mapping[str, Any]
    asks: Mapping[str, str] = field(default_factory=dict)  # values of annotations, by verb
    chosen: tuple[str, ...] = ()  # the nodes that keep it, when it is not on all
    version: str = field(default="", compare=False)  # of the object, its status too

    @property
    def key(self) -> Key:
        return self.kind, self.name

    def selects(self, labels: Mapping[str, str]) -> bool:
        wanted = self.spec.get("nodeSelector") or {}
        return bool(wanted.items() <= labels.items())

    @property
    def spread(self) -> int:
        """On how many nodes it is kept; 0: on all."""
        return int(self.spec.get("spread") or 0)

    def kept_by(self, node: str, labels: Mapping[str, str]) -> bool:
        placed = node in self.chosen and len(self.chosen) <= self.spread
        return self.selects(labels) and (not self.spread or placed)

    @property
    def secret(self) -> kinds.SecretRef | None:
        """The key that it refers to. ValidationError when there can be no such Secret."""
        found = self.spec.get("secretRef")
        return None if found is None else kinds.SecretRef.model_validate(found)


def wish(kind: str, thing: Mapping[str, Any]) -> Wish:
    """Of an object as the API server gives it. LookupError, TypeError when it is not one."""
    meta = thing["metadata"]
    return Wish(
        kind=kind,
        name=str(meta["name"]),
        uid=str(meta["uid"]),
        generation=int(meta["generation"]),
        created=str(meta["creationTimestamp"]),
        spec=dict(thing["spec"]),
        asks=_asks(kind, meta.get("annotations") or {}),
        chosen=tuple(str(node) for node in (thing.get("status") or {}).get("chosen") or ())
        if thing["spec"].get("spread")
        else (),
        version=str(meta.get("resourceVersion") or ""),
    )


def _asks(kind: str, annotations: Mapping[str, Any]) -> dict[str, str]:
    verbs = (one.verb for _, each in kinds.intents() if each.kind == kind for one in each.requests)
    found = {verb: str(annotations.get(f"{kinds.GROUP}/{verb}") or "") for verb in verbs}
    return {verb: value[:LONGEST_VALUE] for verb, value in found.items() if value}


@dataclass(frozen=True)
class Verdict:
    """What became of a wish. ``keys``: its elements that are in force, by the room's key."""

    wish: Wish
    accepted: bool
    keys: tuple[str, ...] = ()
    message: str = ""
    collides: bool = False


@dataclass(frozen=True)
class Known:
    """What this node took over, and remembers over restarts.

    ``until``: Unix time at which a missing object ends. ``releasing``: kind and key of elements
    that deleted objects asked for, which are to be given up.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    wishes: Mapping[Key, Wish] = field(default_factory=dict)
    until: Mapping[Key, float] = field(default_factory=dict)
    releasing: frozenset[Key] = frozenset()


def step(
    before: Known,
    seen: Mapping[str, Mapping[str, Wish]],
    deleted: Iterable[Key],
    labels: Mapping[str, str],
    now: float,
    drop_after: float,
    node: str = "",
    elsewhere: Container[Key] = (),
) -> Known:
    """What is in force now. ``seen``: of each kind that has been listed, all its objects.
    ``elsewhere``: of what not all nodes keep, what other nodes are known to keep."""
    wishes: dict[Key, Wish] = {}
    until: dict[Key, float] = {}
    gone: list[Wish] = []
    ended = set(deleted)
    for key, old in before.wishes.items():
        if key[0] not in seen:
            wishes[key] = old  # nobody has said yet what there is
            continue
        new = seen[key[0]].get(key[1])
        if new is not None and new.kept_by(node, labels):
            continue
        end = before.until.get(key, now + drop_after)
        shared = new is not None and bool(new.spread) and new.selects(labels)
        if key in ended or (end <= now and (not shared or key in elsewhere)):
            gone.append(old)
        else:
            wishes[key], until[key] = old, end
    for objects in seen.values():
        wishes |= {e.key: e for e in objects.values() if e.kept_by(node, labels)}
    releasing = set(before.releasing)
    for old in gone:
        releasing |= {(old.kind, each) for each in elements_of(old)}
    return Known(dict(labels), wishes, until, frozenset(releasing))


def elements_of(old: Wish) -> list[str]:
    """The keys of what the object asks for, of kinds that have to be released."""
    intent = next((each for _, each in kinds.intents() if each.kind == old.kind), None)
    if intent is None or intent.release is None:
        return []
    return [old.name] if not intent.many else [str(e[intent.key]) for e in old.spec[intent.many]]


@dataclass(frozen=True)
class Secrets:
    """Where keys of Secrets of ``namespace`` are put for the rooms: in ``folder``."""

    folder: Path
    namespace: str

    def file(self, ref: kinds.SecretRef) -> Path:
        """Each key of each Secret has a file of its own, whose name contains no text of others."""
        text = json.dumps([self.namespace, ref.name, ref.key])
        return self.folder / hashlib.sha256(text.encode()).hexdigest()


def secrets_of(wishes: Iterable[Wish]) -> set[kinds.SecretRef]:
    """What they refer to, but for names that no Secret can have: ``merge`` refuses these."""
    found = set()
    for each in wishes:
        try:
            found.add(each.secret)
        except pydantic.ValidationError:
            continue
    return {each for each in found if each is not None}


def merge(
    settings: Settings, wishes: Iterable[Wish], secrets: Secrets
) -> tuple[Settings, list[Verdict]]:
    """The settings of the file with what the objects add, and what became of each object.

    Its work grows with the objects, not with their square: whoever may make one may make many.
    """
    verdicts: list[Verdict] = []
    changed: dict[str, Any] = {}
    ordered = sorted(wishes, key=lambda each: (each.created, each.kind, each.name))
    for room, intent in kinds.intents():
        mine = [each for each in ordered if each.kind == intent.kind]
        section = changed.get(room.name, getattr(settings, room.name))
        if section is None:
            verdicts += [
                Verdict(each, False, message=f"the agent of this node has no '{room.name}'")
                for each in mine
            ]
            continue
        changed[room.name], found = _added(section, room, intent, mine, secrets)
        verdicts += found
    return settings.model_copy(update=changed), verdicts


def _added(
    section: RoomSettings,
    room: kit.room.Room,
    intent: kit.room.Intent,
    wishes: Iterable[Wish],
    secrets: Secrets,
) -> tuple[Any, list[Verdict]]:
    """The section with the elements of objects of one kind, and what became of each.

    The section judges what one object adds as if there were nothing else in its list, then the
    whole list once: beside their keys and their number its elements know nothing of one another.
    """
    given = {name: getattr(section, name) for name in section.model_fields_set}
    elements = list(getattr(section, intent.field))
    taken = {getattr(each, intent.key) for each in elements}
    most = _most(room.settings, intent.field)
    verdicts = []
    for asked in wishes:
        if most is not None and len(elements) >= most:
            verdicts.append(Verdict(asked, False, message=_full(intent, most)))
            continue
        try:
            plain = _elements(intent, asked, secrets)
            wanted = [intent.model.model_validate(each) for each in plain]
            if intent.given is not None:
                wanted = [intent.given(each, section, secrets.folder) for each in wanted]
            new = [each for each in wanted if getattr(each, intent.key) not in taken]
            _judged(room, section, {**given, intent.field: new})
        except (
            kit.errors.SettingsError,
            ValueError,  # pydantic's, too
            LookupError,
            TypeError,
        ) as error:
            verdicts.append(Verdict(asked, False, message=_readable(error)))
            continue
        if most is not None and len(elements) + len(new) > most:
            verdicts.append(Verdict(asked, False, message=_full(intent, most)))
            continue
        keys = [getattr(each, intent.key) for each in new]
        lost = [str(key) for each in wanted if (key := getattr(each, intent.key)) in taken]
        why = "the settings file of the node or an older object has it too, and wins"
        message = f"{kit.errors.some(lost, 3, ', ')}: {why}" if lost else ""
        elements += new
        taken.update(keys)
        verdicts.append(Verdict(asked, bool(new), tuple(map(str, keys)), message, bool(lost)))
    if not any(each.accepted for each in verdicts):
        return section, verdicts
    try:
        return _judged(room, section, {**given, intent.field: elements}), verdicts
    except ValueError as error:
        why = _readable(error)
        return section, [Verdict(each.wish, False, message=why) for each in verdicts]


def _most(section: type[pydantic.BaseModel], field: str) -> int | None:
    """How many elements the list may have; None: any number."""
    limits = (getattr(each, "max_length", None) for each in section.model_fields[field].metadata)
    return next((limit for limit in limits if limit is not None), None)


def _full(intent: kit.room.Intent, most: int) -> str:
    return f"{intent.field}: a node has at most {most}, and older objects and its settings file win"


def _judged(room: kit.room.Room, section: RoomSettings, given: Mapping[str, Any]) -> RoomSettings:
    made = cast(RoomSettings, room.settings.model_validate(given))
    return made.at(section.this_node).fit()


def _elements(
    intent: kit.room.Intent, asked: Wish, secrets: Secrets
) -> Iterable[Mapping[str, Any]]:
    if intent.many:
        yield from asked.spec[intent.many]
        return
    plain = {k: v for k, v in asked.spec.items() if k not in OURS}
    if asked.secret is not None and intent.secret:
        outer, inner = intent.secret
        plain[outer] = {**plain[outer], inner: str(secrets.file(asked.secret))}
    yield {**plain, intent.key: asked.name}


def _readable(error: Exception) -> str:
    if isinstance(error, kit.errors.SettingsError):
        return str(error)
    if not isinstance(error, pydantic.ValidationError):
        return f"the object is not understood ({type(error).__name__}: {error})"[:500]
    found = []
    for each in error.errors()[:3]:
        path = ".".join(str(part) for part in each["loc"])
        cause = kit.slips.cause(each)
        found.append(f"{path}: {cause}" if path else cause)
    return "; ".join(found)[:1000]


# --- remembered over restarts


def to_json(known: Known) -> dict[str, Any]:
    return {
        "labels": dict(known.labels),
        "wishes": [
            {**dataclasses.asdict(each), "until": known.until.get(key)}
            for key, each in sorted(known.wishes.items())
        ],
        "releasing": sorted(known.releasing),
    }


def from_json(plain: Mapping[str, Any]) -> Known:
    """LookupError, TypeError, ValueError when it is not what ``to_json`` made."""
    names = [each.name for each in dataclasses.fields(Wish)]
    wishes, until = {}, {}
    for each in plain["wishes"]:
        found = Wish(**{name: each[name] for name in names if name in each})
        found = dataclasses.replace(found, chosen=tuple(found.chosen))
        wishes[found.key] = found
        if each.get("until") is not None:
            until[found.key] = float(each["until"])
    releasing = frozenset((str(kind), str(key)) for kind, key in plain["releasing"])
    return Known(dict(plain["labels"]), wishes, until, releasing)
