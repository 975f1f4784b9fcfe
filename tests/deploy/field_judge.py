"""What the soak makes of what it saw: pure functions.

``NAMED`` says which errors a page names, under which fault. All other errors are faults of ours,
and so is each wrong byte.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
MINUTE = 60.0
NOISY_MINUTES = 3  # running, each with more than one line for the same fact


@dataclass(frozen=True)
class Named:
    """An error that a page names. Each field is a pattern for the whole text.

    ``fault``: in force when the error was seen, or "" for any time.
    """

    fault: str
    reader: str
    dataset: str
    what: str
    page: str
    text: str = ".*"


_AWAY = "docs/cache.md#While the source does not answer"
_GONE = "EIO|ESTALE|ENOTCONN|ETIMEDOUT|ENOENT|ECONNABORTED|SIGBUS|slow"
_COMMANDS = r"(tar|rsync) \d+"
_SOURCE = "source (hung|fails|stopped|dies)"
_DIRECT = "docs/kubernetes.md#Ask for a dataset"
_CHANGES = "docs/cache.md#Add a dataset"
NAMED = (
    # Fields: fault, reader, dataset, what, page, text.
    Named("", "getcwd", ".*", "ENOENT", "docs/mount.md#When it is swapped", "getcwd: .*"),
    Named(_SOURCE, ".*", "hung-.*|squash-.*", f"{_GONE}|{_COMMANDS}", _AWAY),
    Named("source changed", ".*", "change-.*", f"ENOENT|ESTALE|{_COMMANDS}", _CHANGES),
    Named("", "pod userns", ".*", "not started", "docs/mount.md#Rights"),
    Named("SSD (swapped|gone)", "pod direct|pod subpath", ".*", "pod", _DIRECT, ".*I/O error.*"),
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """``ended``: when all datasets were well again."""

    name: str
    began: float
    ended: float


def in_force(faults: Iterable[Fault], began: float, at: float) -> list[str]:
    """The faults of which a part lies within the read."""
    return [each.name for each in faults if each.began <= at and began <= each.ended]


def page(event: dict[str, Any], faults: Sequence[Fault], named: Iterable[Named] = NAMED) -> str:
    """The page that names the error of a read; "" when none does."""
    if event["what"].startswith("wrong"):
        return ""
    there = in_force(faults, event["began"], event["at"])
    text = f"{event['step']}: {event['text']}"
    for each in named:
        under = not each.fault or any(re.fullmatch(each.fault, fault) for fault in there)
        fits = all(
            re.fullmatch(pattern, said, re.DOTALL)
            for pattern, said in (
                (each.reader, event["reader"]),
                (each.dataset, event["dataset"]),
                (each.what, event["what"]),
                (each.text, text),
            )
        )
        if under and fits:
            return each.page
    return ""


def heading(named: str, docs: Path = DOCS) -> bool:
    """Whether docs have the page and the heading."""
    file, _, title = named.partition("#")
    text = (docs.parent / file).read_text()
    return any(line.lstrip("#").strip() == title for line in text.splitlines() if line[:1] == "#")


# --- the log ---------------------------------------------------------------------------------

_TIMES = ("timestamp", "time", "at", "ts")
_IDS = re.compile(r"[0-9a-f]{8,}|\d+(\.\d+)?")

_OF_PASSES = re.compile(r"\w+: (pass started|(fill|update|scrub) ended) ")


def fact(line: str) -> str:
    """The line without time, counts and ids: of the same fact it is the same."""
    try:
        fields = json.loads(line)
    except ValueError:
        return _IDS.sub("#", line)
    if not isinstance(fields, dict):
        return _IDS.sub("#", line)
    said = {name: str(value) for name, value in fields.items() if name not in _TIMES}
    level, event = said.pop("level", ""), said.pop("event", "")
    rest = " ".join(f"{name}={value}" for name, value in sorted(said.items()))
    return f"{level}: {_IDS.sub('#', f'{event} {rest}'.strip())}"


@dataclass(frozen=True)
class Loud:
    """``most``: lines within any 60 s. ``minutes``: running, with more than one line each."""

    fact: str
    lines: int
    most: int
    minutes: int


def loud(lines: Iterable[tuple[float, str]]) -> list[Loud]:
    """Of each fact of the log, (moment, line), the loudest first."""
    moments: dict[str, list[float]] = defaultdict(list)
    for at, line in lines:
        moments[fact(line)].append(at)
    found = [
        Loud(name, len(times), _most(sorted(times)), _minutes(times))
        for name, times in moments.items()
    ]
    return sorted(found, key=lambda each: (-each.minutes, -each.most, each.fact))


def too_loud(each: Loud) -> bool:
    """Lines that tell of different passes are different facts."""
    return each.minutes >= NOISY_MINUTES and not _OF_PASSES.match(each.fact)


def _most(times: Sequence[float]) -> int:
    first, most = 0, 0
    for last, moment in enumerate(times):
        while moment - times[first] >= MINUTE:
            first += 1
        most = max(most, last - first + 1)
    return most


def _minutes(times: Sequence[float]) -> int:
    """The longest run of minutes that have more than one line each."""
    counts: dict[int, int] = defaultdict(int)
    for moment in times:
        counts[int((moment - min(times)) // MINUTE)] += 1
    longest = run = 0
    for minute in range(max(counts) + 1):
        run = run + 1 if counts[minute] > 1 else 0
        longest = max(longest, run)
    return longest


# --- what grows ------------------------------------------------------------------------------


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last third."""
    size = max(1, len(values) // 3)
    return sum(values[:size]) / size, sum(values[-size:]) / size


def flat(first: float, last: float, share: float = 0.1) -> bool:
    return last <= first * (1 + share)
