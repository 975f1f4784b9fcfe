"""tests/gate.txt: which real tests ``make test`` runs, one proof of each promise.

A line is a file, a test or one case of it, as pytest writes it: ``tests/cache/test_view.py``,
``tests/cache/test_view.py::test_x``, ``tests/cache/test_view.py::test_x[ext4]``. ``#`` begins a
comment. Unit tests are in every run and need no line.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "gate.txt"


def lines(text: str) -> list[str]:
    """The entries, without comments."""
    stripped = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def names(entry: str, nodeid: str) -> bool:
    """Whether an entry names this test."""
    return nodeid == entry or nodeid.startswith((f"{entry}::", f"{entry}["))


def unknown(entries: Sequence[str], nodeids: Iterable[str]) -> list[str]:
    """Entries whose file was collected, and which name no test in it."""
    every = list(nodeids)
    files = {nodeid.partition("::")[0] for nodeid in every}
    return [
        entry
        for entry in entries
        if entry.partition("::")[0] in files and not any(names(entry, each) for each in every)
    ]


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the file names. UsageError when it names what is not there."""
    entries = lines(FILE.read_text())
    by_file: dict[str, list[str]] = {}
    for entry in entries:
        by_file.setdefault(entry.partition("::")[0], []).append(entry)
    for item in items:
        found = by_file.get(item.nodeid.partition("::")[0], ())
        if any(names(entry, item.nodeid) for entry in found) and item.get_closest_marker("real"):
            item.add_marker(pytest.mark.gate)
    whole = not any("::" in str(each) for each in config.args) and not config.getoption("lf")
    if whole and (wrong := unknown(entries, (item.nodeid for item in items))):
        raise pytest.UsageError(f"{FILE.name} names tests that are not there: {', '.join(wrong)}")
    if missing := [each for each in by_file if not (config.rootpath / each).exists()]:
        raise pytest.UsageError(f"{FILE.name} names files that are not there: {', '.join(missing)}")
