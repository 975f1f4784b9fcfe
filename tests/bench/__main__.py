"""``python -m tests.bench [ROOM...] [--only GROUP]``: run benchmarks, print a table, keep JSON.

``--rounds N`` and ``--size NAME=SIZE`` take less, or more, than a group takes by itself.
``--tiny`` shows that all of them run, and measures nothing.

A whole room goes to build/bench/<room>.json. A selection of its groups goes to
build/bench/<room>.part.json, so that figures of different runs are never mixed in one file.
"""

import argparse
import dataclasses
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Mapping

import kit.units
import tests.bench
from tests.bench import harness
from tests.testbed import machine


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


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _line(name: str, entry: harness.Entry) -> str:
    bound = "<" if entry.ratio is None else ">="
    low, high = entry.spread
    return (
        f"{name:28} {_number(entry.ratio):>8} {bound + _number(entry.target):>8} "
        f"{'yes' if entry.reached else 'NO':>7} {_number(entry.ours):>10} "
        f"{_number(entry.peer):>10} {_number(low)}..{_number(high)}  {entry.unit} {entry.note}"
    ).rstrip()


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, kit.units.parse_size(value)


def _run(
    room: str,
    groups: Mapping[str, harness.Group],
    only: list[str],
    place: harness.Workplace,
) -> bool:
    entries: dict[str, harness.Entry] = {}
    chosen = {name: group for name, group in groups.items() if not only or name in only}
    with place:
        for name, group in chosen.items():
            harness.say(f"{room}: {name}")
            for key, entry in group(place):
                entries[key] = entry
                harness.say(_line(key, entry))
    if place.tiny:
        print(f"{len(entries)} figures without meaning")
        return True
    file = harness.RESULTS / f"{room}{'.part' if len(chosen) < len(groups) else ''}.json"
    kept = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    head = f"{'benchmark':28} {'ratio':>8} {'target':>8} {'reached':>7} {'ours':>10} {'peer':>10}"
    print(f"\n{head} spread")
    for name, entry in entries.items():
        print(_line(name, entry))
    print(f"written to {file.relative_to(harness.ROOT)}")
    return all(entry.reached for entry in entries.values())


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
    missed = False
    with machine.held():  # real tests would be measured, and meet what is mounted here
        for room, named in known.items():
            if not options.only or set(options.only) & set(named):
                place = harness.Workplace(
                    harness.RESULTS / "work", tiny=options.tiny, rounds=options.rounds,
                    sizes=dict(options.size),
                )  # fmt: skip
                missed |= not _run(room, named, options.only, place)
    harness.say(f"{time.monotonic() - began:.0f} s")
    if missed:
        harness.say("some targets are missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
