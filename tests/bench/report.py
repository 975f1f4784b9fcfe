"""What the benchmarks found, in one file: build/bench/report.json.

The file has a part for each group of each room. A part has the rows of one whole run of the group,
and of this run the commit, the date, the command and the machine: rows of different commits stand
in different parts. A run that fails or is cut changes no row; the part says that it failed.

docs/bench.json is such a file, too: what docs/bench.md shows (scripts/bench_doc.py).
"""

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit import files
from tests.bench import harness, words
from tests.testbed import waiting

NAME = "report.json"
KEPT = harness.ROOT / "docs" / "bench.json"
CUT = "it did not end"


@dataclass(frozen=True)
class Run:
    """``date``: UTC, to the minute; as text it sorts. ``machine`` names no host."""

    command: str
    commit: str
    date: str
    machine: str


@dataclass(frozen=True)
class Row:
    """An entry with what it says in plain words."""

    says: str
    unit: str
    ours: float
    peer: float | None
    ratio: float | None
    spread: Sequence[float]
    target: float
    reached: bool
    rounds: int
    note: str


@dataclass(frozen=True)
class Part:
    """``run`` gave ``rows``. ``failed`` is a later run that gave none, and ``why``; ``lost`` says
    which rows of ``run`` are missing."""

    rows: Mapping[str, Row]
    run: Run | None = None
    failed: Run | None = None
    why: str = ""
    lost: str = ""


Parts = Mapping[str, Part]


def row(name: str, entry: harness.Entry) -> Row:
    """KeyError for a row without words: a report that nobody can read is none."""
    return Row(says=words.of(name), **dataclasses.asdict(entry))


def read(file: Path) -> dict[str, Part]:
    """Empty without a file."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    return {name: _part(each) for name, each in found.items()}


def _part(found: Mapping[str, Any]) -> Part:
    run, failed = (each and Run(**each) for each in (found["run"], found["failed"]))
    rows = {name: Row(**each) for name, each in found["rows"].items()}
    return Part(rows, run, failed, found["why"], found["lost"])


def text(parts: Parts) -> str:
    """Sorted, so that two reports differ only where their figures do."""
    kept = {name: dataclasses.asdict(part) for name, part in parts.items()}
    return json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def failed(before: Part | None, run: Run, why: str) -> Part:
    """With the rows that were there."""
    return dataclasses.replace(before or Part({}), failed=run, why=why)


def merged(*reports: Parts) -> dict[str, Part]:
    """Of each part the rows of its latest run, and the latest failure unless a run came after."""
    found: dict[str, Part] = {}
    for report in reports:
        for name, part in report.items():
            found[name] = _later(found[name], part) if name in found else part
    return found


def _later(one: Part, other: Part) -> Part:
    whole = max(one, other, key=lambda part: _date(part.run))
    last = max(one, other, key=lambda part: _date(part.failed))
    if _date(last.failed) < _date(whole.run):
        return dataclasses.replace(whole, failed=None, why="")
    return dataclasses.replace(whole, failed=last.failed, why=last.why)


def _date(run: Run | None) -> str:
    return run.date if run else ""


def number(value: float | None) -> str:
    """As people read it: here, on the page, and in the README."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if shown == "-0" else shown


def this_run(command: str) -> Run:
    git = ("git", "-C", str(harness.ROOT))
    commit, changed = (
        subprocess.run(
            [*git, *words_of_git], capture_output=True, text=True, check=False,
            timeout=waiting.limit(60),
        ).stdout.strip()
        for words_of_git in (
            ("rev-parse", "--short=8", "HEAD"),
            ("status", "--porcelain", "--untracked-files=no"),
        )
    )  # fmt: skip
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kernel, _, _ = os.uname().release.partition("-")  # what follows may name who runs the machine
    return Run(
        command=command,
        commit=f"{commit or 'unknown'}{' with changes' if changed else ''}",
        date=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        machine=f"{os.cpu_count()} CPUs, {memory / 2**30:.0f} GiB, Linux {kernel}",
    )


class Report:
    """The file, written after each step: a run that is killed leaves what it had."""

    def __init__(self, file: Path, kept: Path = KEPT) -> None:
        self._file = file
        self._parts = merged(read(kept), read(file))

    def begin(self, name: str, run: Run) -> None:
        self.fail(name, run, CUT)

    def fail(self, name: str, run: Run, why: str) -> None:
        self._parts[name] = failed(self._parts.get(name), run, why)
        self._write()

    def end(self, name: str, run: Run, rows: Mapping[str, Row]) -> None:
        self._parts[name] = Part(dict(rows), run)
        self._write()

    def _write(self) -> None:
        files.save(self._file, text(self._parts).encode(), 0o644)
