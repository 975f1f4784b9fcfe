"""The fleet in lines of text. Pure.

On a terminal a table is as wide as that: the last column is cut, then columns on the right are left
out. In a pipe, and with ``-o wide``, nothing is cut.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import kit.errors
import kit.units
from fleet import folding, shapes
from kit import terminal

MOST_LISTED = 10  # of each part of the status
LEAST_LAST = 16  # characters of a column that is cut
_WORDS = {
    "well": ("WELL", "green"),
    "attention": ("NEEDS A LOOK", "yellow"),
    "critical": ("NEEDS A PERSON NOW", "red"),
}


def fitted(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, keep: int = 2
) -> Iterator[str]:
    """A table of at most ``width`` columns of a terminal; its first ``keep`` columns are whole
    whatever that is."""
    shown = [[terminal.plain(cell) for cell in row] for row in (head, *rows)]
    if width is not None:
        sizes = [max(len(row[i]) for row in shown) for i in range(len(head))]
        while (
            len(sizes) > keep
            and sum(sizes[:-1]) + 2 * (len(sizes) - 1) + min(LEAST_LAST, sizes[-1]) > width
        ):
            sizes.pop()
        room = width - sum(sizes[:-1]) - 2 * (len(sizes) - 1)
        shown = [row[: len(sizes)] for row in shown]
        if len(sizes) > keep:
            shown = [[*row[:-1], cut(row[-1], room)] for row in shown]
    return terminal.table(shown[0], shown[1:])


def cut(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else f"{text[: max(0, room - 1)]}…"


def ago(at: float | None, now: float) -> str:
    """``5m``, ``3h`` or ``12d`` for people."""
    if at is None:
        return "never"
    seconds = max(0.0, now - at)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items() if count)


# --- the status


def status(fleet: folding.Fleet, cluster: str, width: int | None) -> Iterator[terminal.Line]:
    word, colour = _WORDS[fleet.verdict]
    left = None if width is None else width - len(word)
    yield terminal.Coloured(word, colour), cut(f"  {_headline(fleet)}", left)
    yield cut(cluster, width)
    yield ""
    facts = [("NODES", f"{len(fleet.rows)}: {_counted(fleet.nodes_by()) or 'none'}")]
    versions = Counter(row.agent or "unknown" for row in fleet.rows)
    facts.append(("AGENTS", _counted(dict(versions.most_common(4))) or "none"))
    guards = Counter(row.guard for row in fleet.rows if row.guard != "-")
    facts.append(("GUARD", _counted(dict(guards.most_common())) or "on no node"))
    facts.append(("SCRUB", _scrub(fleet)))
    facts.append(("FINDINGS", _counted(fleet.by_severity()) or "none"))
    for name, said in facts:
        yield cut(f"{name:10}{said}", width)
    yield from _part("DATASETS", fleet.datasets.values(), "dataset", width)
    yield from _part("IMAGES", fleet.images.values(), "image", width)
    if fleet.rules:
        yield ""
        rules = sorted(fleet.rules.values(), key=lambda each: each.order)
        rows = [(r.severity, r.rule, str(r.nodes), r.example) for r in rules[:MOST_LISTED]]
        yield from fitted(("SEVERITY", "RULE", "NODES", "FOR EXAMPLE"), rows, width)
        yield from _more(len(rules), "rule", "status -o json")
    if fleet.left_out:
        yield ""
        yield f"{fleet.left_out} names are left out: there are more than {folding.MOST_NAMES}"


def _headline(fleet: folding.Fleet) -> str:
    by, told = fleet.nodes_by(), []
    if not fleet.rows:
        return "no agent has written yet: kubectl get pods -A -l app.kubernetes.io/name=nodeagent"
    for name, said in (
        ("critical", "critical findings on"), ("silent", "silent for 30 minutes:"),
        ("warning", "warnings on"),
    ):  # fmt: skip
        if by[name]:
            told.append(f"{said} {_number(by[name], 'node')}")
    if refused := fleet.refused():
        told.append(f"refused by nodes: {kit.errors.some(refused, 3, ', ')}")
    return "; ".join(told) or f"{_number(len(fleet.rows), 'node')}, nothing to do"


def _scrub(fleet: folding.Fleet) -> str:
    oldest = fleet.oldest_scrub()
    if oldest is None:
        return "none has ended yet"
    return f"oldest {ago(oldest.at, fleet.now)} ago: dataset {oldest.dataset} on {oldest.node}"


def _part(
    title: str, sums: Iterable[folding.NameSum], thing: str, width: int | None
) -> Iterator[terminal.Line]:
    """Those that are not whole come first."""
    found = sorted(sums, key=lambda each: each.order)
    whole = sum(each.complete for each in found)
    yield ""
    if not found:
        yield f"{title:10}none"
        return
    yield f"{title:10}{_number(len(found), thing)}, {whole} whole on all nodes that want them"
    rows = [
        (each.name, f"{each.whole}/{each.wanted}", f"{each.percent}%", _size(each), each.said)
        for each in found[:MOST_LISTED]
    ]
    yield from fitted(("NAME", "WHOLE ON", "FILLED", "SIZE", "WHY"), rows, width)
    yield from _more(len(found), thing, f"{thing}s")


def _size(each: folding.NameSum) -> str:
    return kit.units.format_size(each.bytes) if each.bytes else "-"


def _more(count: int, thing: str, command: str) -> Iterator[str]:
    if count > MOST_LISTED:
        left = _number(count - MOST_LISTED, f"more {thing}")
        yield f"… {left}: kubectl nodeagent {command}"


# --- the lists


def nodes(fleet: folding.Fleet, width: int | None, wide: bool) -> Iterator[str]:
    head = ["NODE", "STATE", "CRIT", "WARN", "DATASETS", "IMAGES", "WRITTEN", "GUARD"]
    head += ["AGENT", "KERNEL"] if wide else []
    rows = []
    for row in sorted(fleet.rows, key=lambda each: each.order):
        cells = [
            row.name, str(row.wellness), str(row.critical), str(row.warning),
            f"{row.whole}/{row.datasets}", f"{row.ready_images}/{row.images}",
            ago(row.written, fleet.now), row.guard,
        ]  # fmt: skip
        cells += [row.agent, row.kernel] if wide else []
        rows.append([*cells, row.worst])
    return fitted([*head, "WORST FINDING"], rows, width)


def datasets(fleet: folding.Fleet, width: int | None, wide: bool) -> Iterator[str]:
    head = ["DATASET", "WHOLE ON", "FILLED", "SIZE", "SCRUBBED"]
    head += ["STATES", "WANTED BY"] if wide else []
    rows = []
    for each in sorted(fleet.datasets.values(), key=lambda one: one.order):
        oldest = ago(each.scrubbed.at, fleet.now) if each.scrubbed else "never"
        whole, filled = f"{each.whole}/{each.wanted}", f"{each.percent}%"
        cells = [each.name, whole, filled, _size(each), oldest]
        by = "CachedDataset" if each.wish is not None else "settings"
        cells += [_counted(dict(each.states.most_common())), by] if wide else []
        rows.append([*cells, each.said])
    return fitted([*head, "WHY"], rows, width)


def images(fleet: folding.Fleet, width: int | None, wide: bool) -> Iterator[str]:
    head = ["IMAGE", "READY ON", "SIZE", "PINNED"] + (["STATES"] if wide else [])
    rows = []
    for each in sorted(fleet.images.values(), key=lambda one: one.order):
        ready, pinned = f"{each.whole}/{each.wanted}", f"{each.pinned}/{each.nodes}"
        cells = [each.name, ready, _size(each), pinned]
        cells += [_counted(dict(each.states.most_common()))] if wide else []
        rows.append([*cells, each.said])
    yield from fitted([*head, "WHY"], rows, width)
    if fleet.sets:
        yield ""
        listed = [_set(each) for each in sorted(fleet.sets, key=lambda one: one.metadata.name)]
        head = ["IMAGESET", "READY ON", "FILLED", "WHY"]
        yield from fitted(head, listed, width)


def _set(each: shapes.WishObject) -> tuple[str, ...]:
    status = each.status
    ready = status.condition("Ready")
    why = "" if ready is None or ready.status == "True" else f"{ready.reason}: {ready.message}"
    nodes = status.nodes
    return each.metadata.name, f"{nodes.ready}/{nodes.wanted}", f"{status.percent}%", why


def events(
    listed: Sequence[Mapping[str, Any]], now: float, width: int | None, wide: bool
) -> Iterator[str]:
    head = ["LAST", "TYPE", "REASON", "OBJECT"] + (["COUNT"] if wide else [])
    rows = []
    for each in listed:
        on = f"{each['kind']}/{each['name']}"
        cells = [ago(each["at"], now), each["type"], each["reason"], on]
        cells += [str(each["count"])] if wide else []
        rows.append([*cells, each["message"]])
    return fitted([*head, "MESSAGE"], rows, width)
