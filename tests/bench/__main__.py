"""``python -m tests.bench [ROOM...] [--only GROUP]``: run benchmarks, print a table, keep a report.

``--rounds N`` and ``--size NAME=SIZE`` take less, or more, than a group takes by itself.
``--tiny`` shows that all of them run, and measures nothing.

build/bench/report.json gets the rows of each group that ran to its end. Of other groups it keeps
what it has, with its date and its commit. A group that fails does not stop the others.
"""

import argparse
import contextlib
import importlib
import os
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import kit.units
import tests.bench
from tests.bench import harness, report
from tests.testbed import machine

SIZES = ("SOAK_SECONDS",)


def rooms(wanted: list[str]) -> dict[str, Mapping[str, harness.Group]]:
    """Every module beside this one that has GROUPS; only the ``wanted`` ones if any are named.

    Others are not even imported: what one room needs may be missing where another can run.
    """
    found: dict[str, Mapping[str, harness.Group]] = {}
    for module in pkgutil.iter_modules(tests.bench.__path__):
        if module.name.startswith(("_", "test_")) or (wanted and module.name not in wanted):
            continue
        groups = getattr(importlib.import_module(f"tests.bench.{module.name}"), "GROUPS", None)
        if groups is not None:
            found[module.name] = groups
    return found


def _line(name: str, entry: harness.Entry) -> str:
    bound = "<" if entry.ratio is None else ">="
    ratio, target, ours, peer, low, high = (
        report.number(each)
        for each in (entry.ratio, entry.target, entry.ours, entry.peer, *entry.spread)
    )
    return (
        f"{name:28} {ratio:>8} {bound + target:>8} {'yes' if entry.reached else 'NO':>7} "
        f"{ours:>10} {peer:>10} {low}..{high}  {entry.unit} {entry.note}"
    ).rstrip()


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, kit.units.parse_size(value)


def _set() -> str:
    """Variables that change what a group measures, as they stand before its command."""
    return "".join(f"{each}={os.environ[each]} " for each in SIZES if each in os.environ)


def measure(
    groups: Mapping[str, harness.Group],
    room: str,
    place: harness.Workplace,
    kept: report.Report,
    options: str = "",
) -> dict[str, harness.Entry | None]:
    """Each group of a room, into the report; None under the name of a group that failed."""
    entries: dict[str, harness.Entry | None] = {}
    for group, act in groups.items():
        name = f"{room} {group}"
        run = report.this_run(f"{_set()}python -m tests.bench {room} --only {group}{options}")
        harness.say(f"{room}: {group}")
        kept.begin(name, run)
        rows: dict[str, report.Row] = {}
        try:
            for key, entry in act(place):
                rows[key] = report.row(key, entry)
                entries[key] = entry
                harness.say(_line(key, entry))
        except Exception as error:  # whatever a benchmark meets: the others are measured
            traceback.print_exc()
            kept.fail(name, run, f"{type(error).__name__} after {len(rows)} rows")
            entries[name] = None
        except BaseException:
            kept.fail(name, run, f"cut after {len(rows)} rows")
            raise
        else:
            kept.end(name, run, rows)
    return entries


def _show(entries: Mapping[str, harness.Entry | None]) -> None:
    head = f"{'benchmark':28} {'ratio':>8} {'target':>8} {'reached':>7} {'ours':>10} {'peer':>10}"
    print(f"\n{head} spread")
    for name, entry in entries.items():
        print(_line(name, entry) if entry else f"{name:28} FAILED")


@contextlib.contextmanager
def _report(tiny: bool) -> Iterator[Path]:
    """The file of the report; of a tiny run one that goes with it."""
    if not tiny:
        yield harness.RESULTS / report.NAME
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / report.NAME


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("room", nargs="*", help="default: all")
    parser.add_argument("--only", action="append", default=[], metavar="GROUP")
    parser.add_argument("--rounds", type=int, default=harness.ROUNDS)
    parser.add_argument(
        "--size", action="append", default=[], type=_size, metavar="NAME=SIZE",
        help="instead of what a group takes of it, for example files=1000 (docs/bench.md)",
    )  # fmt: skip
    parser.add_argument(
        "--tiny", action="store_true", help="all in seconds: shows that it runs, measures nothing"
    )
    options = parser.parse_args()
    known = rooms(options.room)
    for room in options.room:
        if room not in known:
            parser.error(f"no benchmarks of {room!r}; there are: {', '.join(rooms([]))}")
    for group in options.only:
        if not any(group in named for named in known.values()):
            names = "; ".join(f"{room}: {', '.join(named)}" for room, named in known.items())
            parser.error(f"no group {group!r}; there are: {names}")
    if os.geteuid() != 0:
        parser.error("benchmarks mount file systems and drop caches: run them as root")
    began = time.monotonic()
    sizes = "".join(f" --size {name}={size}" for name, size in options.size)
    rounds = f" --rounds {options.rounds}" if options.rounds != harness.ROUNDS else ""
    entries: dict[str, harness.Entry | None] = {}
    with machine.held(), _report(options.tiny) as file:  # real tests would be measured
        for room, named in known.items():
            chosen = {n: act for n, act in named.items() if not options.only or n in options.only}
            if chosen:
                place = harness.Workplace(
                    harness.RESULTS / "work", tiny=options.tiny, rounds=options.rounds,
                    sizes=dict(options.size),
                )  # fmt: skip
                with place:
                    kept = report.Report(file)
                    found = measure(chosen, room, place, kept, f"{rounds}{sizes}")
                if not options.tiny:
                    _show(found)
                entries |= found
    if options.tiny:
        print(f"{len(entries)} figures without meaning")
    else:
        print(f"written to {file.relative_to(harness.ROOT)}")
    harness.say(f"{time.monotonic() - began:.0f} s")
    if not options.tiny and not all(entry is None or entry.reached for entry in entries.values()):
        harness.say("some targets are missed")
    return 1 if None in entries.values() else 0


if __name__ == "__main__":
    sys.exit(main())
