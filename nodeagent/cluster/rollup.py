"""What all nodes together say of one object: ready and wanted nodes, percent, size. Pure."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import kit.errors
import kit.units
from nodeagent.cluster import intent, kinds, storage

# On which nodes a dataset with ``spread`` is kept. Pure: rendezvous hashing.
#
# Each node has a place of its own in the order of each dataset, so a node that comes or goes moves
# only its own share.


def choose_nodes(dataset: str, nodes: Iterable[str], most: int) -> tuple[str, ...]:
    """``most`` of ``nodes``, or all if they are fewer; by name."""
    ordered = sorted(set(nodes), key=lambda node: (_place(dataset, node), node))
    return tuple(sorted(ordered[:most]))


def _place(dataset: str, node: str) -> bytes:
    return hashlib.sha256(f"{dataset}/{node}".encode()).digest()


# A node that has not written for so long counts as not ready: agents write every 10 minutes.
SILENT_SECONDS = 1800.0
SETTLE_SECONDS = 120.0
MOST_NAMED = 3
CONDITIONS = {"warm": "Warmed", "verify": "Verified", "pause": "Paused", "rescan": "Rescanned"}


@dataclass(frozen=True)
class View:
    """One NodeStorage, as far as it matters here. ``written``: RFC 3339."""

    node: str
    observed: str
    written: str
    objects: Mapping[intent.Key, kinds.ObjectStatus]


def view(thing: Mapping[str, Any]) -> View:
    """Of a NodeStorage as the API server gives it."""
    status = thing.get("status") or {}
    objects = [kinds.ObjectStatus.model_validate(each) for each in status.get("objects") or ()]
    return View(
        node=str(thing["metadata"]["name"]),
        observed=str(status.get("observed") or ""),
        written=str(status.get("written") or ""),
        objects={(each.kind, each.name): each for each in objects},
    )


def of_object(
    asked: intent.Wish,
    before: Mapping[str, Any],
    nodes: Iterable[View],
    observed: str,
    now: float,
    *,
    patient: bool = False,
) -> dict[str, Any]:
    """The status of one object. ``before``: the status that it has. ``observed``: the digest of
    nodes that know all objects. ``patient``: nobody could write until a moment ago, so nothing is
    moved away from a node that is silent (and nothing to one, ever).

    Invariant: Ready becomes True only when every node that wrote lately knows this generation, so
    that 'kubectl wait' never ends before a node has even looked.
    """
    of = _Object(asked, before, now)
    wanted = ready = refused = percent = size = behind = 0
    selected: list[tuple[str, kinds.ObjectStatus]] = []
    filling: list[str] = []
    waiting: list[str] = []  # for something that they name, or for their agents
    refusing: list[str] = []
    nodes = list(nodes)
    chosen = of.chosen(nodes, observed, patient)
    for each in nodes:
        fresh = is_fresh(each, of.now)
        behind += fresh and each.observed != observed
        mine = each.objects.get(asked.key)
        if mine is None or (asked.spread and each.node not in chosen):
            continue
        wanted += 1
        selected.append((each.node, mine))
        current = fresh and mine.observed_generation == asked.generation
        percent += mine.percent
        size = max(size, mine.bytes)
        if mine.ready and current:
            ready += 1
        elif not mine.accepted:
            refused += 1
            refusing.append(f"{each.node}: {mine.message}")
        elif mine.message or not fresh:
            waiting.append(f"{each.node}: {mine.message if fresh else 'its agent is silent'}")
        else:
            filling.append(f"{each.node}: {mine.percent} %")
    reason, message = _reason(behind, filling, waiting, refusing)
    complete = wanted > 0 and ready == wanted
    was = _condition(before, "Ready")
    if complete and behind and was.get("observedGeneration") == asked.generation:
        complete = was.get("status") == "True"
    elif behind:
        complete = False
    if complete:
        reason, message = "Complete", f"on {ready} nodes"
    accepted = "Refused" if refused else "Accepted"
    conditions = (
        of.condition("Ready", complete, reason, message),
        of.condition("Accepted", refused == 0, accepted, _some(refusing)),
    )
    told, carried_out = of.requests(selected, behind)
    return kinds.IntentStatus(
        observed_generation=asked.generation,
        nodes=kinds.NodesStatus(wanted=wanted, ready=ready, refused=refused),
        ready=f"{ready}/{wanted}",
        percent=percent // wanted if wanted else 0,
        bytes=size,
        size=kit.units.format_size(size),
        conditions=conditions + told,
        chosen=chosen,
        carried_out=carried_out,
    ).model_dump(mode="json", by_alias=True)


def is_fresh(view: View, now: float) -> bool:
    """Whether the node has written lately (``now``: Unix time)."""
    return view.written >= kit.units.rfc3339(now - SILENT_SECONDS)


def placed(asked: intent.Wish, nodes: Iterable[View], now: float) -> tuple[str, ...]:
    """The nodes that keep an object with ``spread``, by what all nodes report."""
    return _Object(asked, {}, now).chosen(list(nodes), "", patient=False)


def patch(before: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """The merge patch that makes ``made`` of ``before``: such a patch takes no key out of a map by
    leaving it out, and a value whose annotation is gone would count as carried out for ever."""
    gone = dict.fromkeys((before.get("carriedOut") or {}).keys() - made["carriedOut"].keys())
    return {**made, "carriedOut": {**gone, **made["carriedOut"]}}


@dataclass(frozen=True)
class _Object:
    """``before``: the status that it has."""

    asked: intent.Wish
    before: Mapping[str, Any]
    now: float  # Unix time

    def chosen(self, nodes: list[View], observed: str, patient: bool) -> tuple[str, ...]:
        """Of the nodes that write and may keep it. Of a new object only once all have looked, or it
        would begin on one node and end on another."""
        asked, were = self.asked, tuple(self.before.get("chosen") or ())
        if not asked.spread:
            return ()
        kept = were if patient else ()
        fresh = [each for each in nodes if is_fresh(each, self.now) or each.node in kept]
        young = asked.created > kit.units.rfc3339(self.now - SETTLE_SECONDS)
        if young and any(each.observed != observed for each in fresh):
            return were
        may = (e.node for e in fresh if (mine := e.objects.get(asked.key)) and mine.candidate)
        return choose_nodes(asked.name, may, asked.spread)

    def requests(
        self, selected: list[tuple[str, kinds.ObjectStatus]], behind: int
    ) -> tuple[tuple[kinds.ObjectCondition, ...], dict[str, str]]:
        """A condition for each annotation, and the values that all nodes carried out."""
        was = self.before.get("carriedOut") or {}
        told, carried_out = [], {}
        for verb, value in sorted(self.asked.asks.items()):
            waiting, failed = [], []
            for node, mine in selected:
                one = next((r for r in mine.requests if (r.verb, r.value) == (verb, value)), None)
                text = f"{node}: {one.message or one.state}" if one else f"{node}: has not seen it"
                if one is None or one.state == "pending":
                    waiting.append(text)
                elif one.state == "failed":
                    failed.append(text)
            over = bool(selected) and not waiting and (not behind or was.get(verb) == value)
            if over:
                carried_out[verb] = value
            elif verb in was:
                carried_out[verb] = str(was[verb])
            reason = ("Failed" if failed else "CarriedOut") if over else "Pending"
            message = f"{value}: {_some(failed or waiting) or f'on {len(selected)} nodes'}"
            kind = CONDITIONS.get(verb, verb.title())
            told.append(self.condition(kind, over and not failed, reason, message))
        return tuple(told), carried_out

    def condition(self, kind: str, holds: bool, reason: str, message: str) -> kinds.ObjectCondition:
        status: Literal["True", "False"] = "True" if holds else "False"
        was = _condition(self.before, kind)
        changed = was.get("status") != status
        return kinds.ObjectCondition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            last_transition_time=kit.units.rfc3339(self.now)
            if changed
            else str(was["lastTransitionTime"]),
            observed_generation=self.asked.generation,
        )


def _reason(
    behind: int, filling: list[str], waiting: list[str], refusing: list[str]
) -> tuple[str, str]:
    if refusing:
        return "Refused", _some(refusing)
    if waiting:
        return "Waiting", _some(filling + waiting)
    if filling:
        return "Filling", _some(filling)
    if behind:
        return "Unknown", f"{behind} nodes have not said yet whether they have it"
    return "NoNodes", "no node is selected, or no agent runs there"


def _some(texts: list[str]) -> str:
    return kit.errors.some(sorted(texts), MOST_NAMED)[: storage.LONGEST_TEXT * 2]


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = (each for each in status.get("conditions") or () if each.get("type") == kind)
    return next(found, {})
