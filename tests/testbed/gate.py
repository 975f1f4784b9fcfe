"""tests/gate.txt: which real tests ``make test`` runs, one proof of each promise.

A line is a folder, a file, a test or one case of it, as pytest writes it: ``tests/linux``,
``tests/linux/test_loop.py``, ``tests/linux/test_loop.py::test_x``, or that with ``[ext4]``. ``#``
begins a comment. Unit tests are in every run and need no line.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "gate.txt"
UNIT = "not real"  # the expression of marks for unit tests
REAL = r"\bpytest\.mark\.real\b"


def lines(text: str) -> list[str]:
    """The entries, without comments."""
    stripped = (line.partition(" #")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line and not line.startswith("#")]


def files() -> list[str]:
    """What the file names, without tests and cases."""
    return list(dict.fromkeys(entry.partition("::")[0] for entry in lines(FILE.read_text())))


def names(entry: str, nodeid: str) -> bool:
    """Whether an entry names this test."""
    return nodeid == entry or nodeid.startswith((f"{entry}/", f"{entry}::", f"{entry}["))


def unknown(
    entries: Sequence[str], nodeids: Iterable[str], collected: Iterable[str] = ()
) -> list[str]:
    """Entries whose file or folder was ``collected``, and which name none of ``nodeids``, the real
    tests in it."""
    every = list(nodeids)
    there = {nodeid.partition("::")[0] for nodeid in (*every, *collected)}
    places = there.union(*(map(str, Path(file).parents) for file in there))
    return [
        entry
        for entry in entries
        if entry.partition("::")[0] in places and not any(names(entry, each) for each in every)
    ]


def module_marks(text: str) -> str:
    """The marks that a module with this text gives to all its tests."""
    return "".join(re.findall(r"^pytestmark = (?:\[\n(?: .*\n)*\]|.*)$", text, re.MULTILINE))


def is_real_whole(text: str) -> bool:
    """Whether every test of a module with this text has the mark ``real``."""
    return re.search(REAL, module_marks(text)) is not None


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what the file names. UsageError when it names what is not there."""
    entries = lines(FILE.read_text())
    real = [item for item in items if item.get_closest_marker("real")]
    for item in real:
        if any(names(entry, item.nodeid) for entry in entries):
            item.add_marker(pytest.mark.gate)
    whole = not any("::" in str(each) for each in config.args) and not config.getoption("lf", False)
    whole = whole and config.option.markexpr != UNIT  # that reads no module of real tests
    ids = [item.nodeid for item in items]
    if whole and (wrong := unknown(entries, (item.nodeid for item in real), ids)):
        raise pytest.UsageError(f"{FILE.name} names no real test with: {', '.join(wrong)}")
    if missing := [each for each in files() if not (config.rootpath / each).exists()]:
        raise pytest.UsageError(f"{FILE.name} names files that are not there: {', '.join(missing)}")
