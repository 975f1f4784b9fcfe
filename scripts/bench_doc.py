"""Write docs/bench.md from docs/bench.json.

    bench_doc.py [REPORT]   first take the later figures of REPORT into docs/bench.json

REPORT is what 'python -m tests.bench' has written: build/bench/report.json.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pages

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.bench import __main__ as bench
from tests.bench import report

TARGET = report.KEPT.with_suffix(".md")

HEAD = """\
# Benchmarks

```console
$ make bench                                  # 30 minutes on 2 cores
$ make soak                                   # the audit for ten minutes
$ make soak-node                              # the agent's pod, restarts, updates
$ .venv/bin/python -m tests.bench cache --only view   # one group
$ PYTHONPATH=. .venv/bin/python scripts/bench_doc.py build/bench/report.json
```

The last command takes the figures of a run into this page. A benchmark needs root, 5 GiB under
`build/` and a quiet machine. Some drop all caches or start a Ceph cluster.

## Figures

* **ours**, **peer**: medians of the agent and of the program that we compare it with
* **ratio**: the median of the rounds' ratios ours / peer
* **spread**, **target**: of the ratio. Without a peer: of ours.

"""
COLUMNS = (
    *("component", "group", "row", "what", "ours", "peer", "unit"),
    *("ratio", "spread", "target", "rounds"),
)


def _line(cells: Iterator[str] | tuple[str, ...]) -> str:
    return f"|{'|'.join(cells)}|"


def _rows(parts: report.Parts) -> Iterator[tuple[str, ...]]:
    """Rows of one meaning stand below each other; only the first says it."""
    found = [
        (row.says, name, part, row)
        for part, each in sorted(parts.items())
        for name, row in each.rows.items()
    ]
    # In the order of the parts, but rows that say the same beside the first that does.
    first: dict[str, int] = {}
    for number, (says, *_) in enumerate(found):
        first.setdefault(says, number)
    found.sort(key=lambda each: (first[each[0]], each[2], each[1]))
    for says, same in itertools.groupby(found, key=lambda each: each[0]):
        for number, (_, name, part, row) in enumerate(same):
            low, high = (report.number(each) for each in row.spread)
            bound = f"{'&lt;' if row.ratio is None else '≥'}{report.number(row.target)}"
            yield (
                *part.split(" "),
                f"`{name}`",
                "" if number else says,
                report.number(row.ours),
                report.number(row.peer),
                row.unit,
                report.number(row.ratio),
                low if low == high else f"{low}–{high}",
                bound if row.reached else f"{bound}, missed",
                str(row.rounds),
            )


def _runs(parts: report.Parts) -> Iterator[str]:
    """What the rows come from, and which groups have none."""
    told: dict[str, list[str]] = {}
    for name, part in sorted(parts.items()):
        if part.run is not None:
            standard = f"python -m tests.bench {name.replace(' ', ' --only ')}"
            other = f", `{part.run.command}`" if part.run.command != standard else ""
            lost = f"; {part.lost}" if part.lost else ""
            made = f"{_said(part.run)}, {part.run.machine}{other}{lost}"
            told.setdefault(made, []).append(name)
    for name, part in sorted(parts.items()):
        if part.failed is not None:
            told.setdefault(f"no figures, {part.why}: {_said(part.failed)}", []).append(name)
    for what, names in told.items():
        yield pages.wrapped(f"* {_listed(names)}: {what}", "  ")
    missing = [
        f"{room} {group}"
        for room, groups in bench.rooms([]).items()
        for group in groups
        if f"{room} {group}" not in parts
    ]
    if missing:
        yield pages.wrapped(f"* Not run: {_listed(missing)}", "  ")


def _said(run: report.Run) -> str:
    return f"{run.date.partition(' ')[0]}, commit {run.commit}"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def document() -> str:
    """The whole page."""
    parts = report.read(report.KEPT)
    head = [_line(COLUMNS), _line(("---",) * len(COLUMNS))]
    table = "\n".join([*head, *map(_line, _rows(parts))])
    return f"{HEAD}{table}\n\n## Runs\n\n{chr(10).join(_runs(parts))}\n"


def main() -> None:
    reports = [report.read(Path(name)) for name in sys.argv[1:]]
    report.KEPT.write_text(report.text(report.merged(report.read(report.KEPT), *reports)))
    TARGET.write_text(document())


if __name__ == "__main__":
    main()
