"""Each measured figure of the pages is one of docs/bench.json, by the name of its row.

Of the pages in ``OTHERS`` every number is looked at: it belongs to the rows that its paragraph or
item names, or stands in the table with what it is. Of all other pages this holds for numbers with a
unit of speed or load.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import report

ROOT = Path(__file__).parents[2]
PARTS = report.read(report.KEPT)
ROWS = {name: row for part in PARTS.values() for name, row in part.rows.items()}

VERSION = "a version"
EXAMPLE = "an example that is reckoned"
RECKONED = "reckoned, not measured"
SETTING = "a setting, a default or a bound of the code"
LIMIT = "a limit of what was tried"
NAME = "part of a name"
SOAK = "make soak-node, older than this report"
SCALE = "make bench-scale, older than this report"
LISTING = "python -m tests.bench.listing, older than this report"
RBD = "an earlier run of rbd sparse"
FAILURE = "observed, no benchmark"

# By page: what its numbers are that no row has, as the page writes them.
OTHERS: dict[str, dict[str, str]] = {
    "README.md": {
        "200 nodes train on 1 TiB": EXAMPLE,
        "200 TiB": EXAMPLE,
        "Version 0.1.0": VERSION,
        "Ceph newer than 20.2": VERSION,
        "Python 3.11": VERSION,
        "about 100,000 files": LIMIT,
        "Apache-2.0": NAME,
        "99th percentile": "what the row is",
    },
    "docs/capacity.md": {
        "33 to 91 bytes": SCALE,
        "blocks of 4 KiB": SETTING,
        "about 2 KiB more": RECKONED,
        "less than 4 KiB needs 4 KiB": RECKONED,
        "ext4": NAME,
        "-i 8192": SETTING,
        "136 MiB": SOAK,
        "249 MiB": SOAK,
        "8 workers": SETTING,
        "20 MiB each": SOAK,
        "277 MiB": RBD,
        "600 MiB": FAILURE,
        "0.004 cores": SOAK,
        "1,000 nodes": EXAMPLE,
        "1,000 times": EXAMPLE,
        "50MiB": SETTING,
        "53 GB/s": RECKONED,
        "7.7 requests": LISTING,
        "0.2 requests": LISTING,
        "200 clients": SETTING,
        "7,500": RECKONED,
        "50 s": SETTING,
        "60s": SETTING,
        "10 datasets": EXAMPLE,
        "300 [series]": "tests/testbed/census.py",
    },
    "docs/comparison.md": {"in 2026": "a date", "S3": NAME, "SOCI": NAME},
}
# Numbers with a unit of speed or load on the other pages.
LOADS = {
    "cache.md": {"200 MiB/s": SETTING, "20 MiB/s": SETTING},
    "monitoring.md": {"13 requests/s": RECKONED},
    "preheat.md": {"100 MB/s": "what the simulation is given"},
}

_LOAD = re.compile(
    r"\d[\d,.]* ?(?:files/s|files per second|[KMG]i?B/s|requests/s|cores\b|µs|times (?:as|less))"
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_ROW = re.compile(r"`(\w+)`")


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and items as one line each, without blocks and addresses of links."""
    text = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for each in re.split(r"\n\s*\n|\n(?=\s*(?:\* |\d+\. |\|))", text):
        yield " ".join(re.sub(r"^\s*\d+\. ", "", each).split())


def figures(name: str) -> set[str]:
    """What a page may say of a row. Not its spread: that is no figure of its own."""
    row = ROWS[name]
    sides = {
        f"{report.number(each)} {row.unit}" for each in (row.ours, row.peer) if each is not None
    }
    return sides | {f"{report.number(row.ratio)} times"}


def wrong(text: str, others: dict[str, str]) -> list[str]:
    """The numbers of a page that are neither in a row which their paragraph names nor told."""
    found = []
    for paragraph in paragraphs(text):
        rest = paragraph
        named = {figure for name in _ROW.findall(rest) if name in ROWS for figure in figures(name)}
        for phrase in sorted({*named, *others}, key=len, reverse=True):
            rest = re.sub(rf"(?<![\w.,]){re.escape(phrase)}(?!\w)", "", rest)
        found += [f"{number}: {paragraph[:60]}" for number in _NUMBER.findall(rest)]
    return found


@pytest.mark.parametrize("page", OTHERS)
def test_each_figure_is_that_of_a_row_which_its_paragraph_names(page: str) -> None:
    assert wrong((ROOT / page).read_text(), OTHERS[page]) == []


@pytest.mark.parametrize(
    "text",
    [
        "* Reads: 289,704 files/s (`view_hot_vs_rclone`)",
        "* Reads: 289,703 files/s",
        "* Reads: 289,703 s (`view_hot_vs_rclone`)",
        "* Reads: 104 times (`view_hot_vs_rclone`)",
        "* Reads: 289,703 files/s (`open_guarded_write`)",
        "* Reads: 289,703 files/s (`view_hot_vs_nothing`)",
    ],
)
def test_other_value_or_no_row_is_found(text: str) -> None:
    assert wrong("* Reads: 289,703 files/s (`view_hot_vs_rclone`)", {}) == []
    assert len(wrong(text, {})) == 1


@pytest.mark.parametrize("page", OTHERS)
def test_what_is_told_of_other_numbers_is_on_the_page(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert [phrase for phrase in OTHERS[page] if phrase not in text] == []


def test_other_pages_have_no_speed_or_load_that_nobody_told() -> None:
    found = {
        (page.name, load)
        for page in (ROOT / "docs").glob("*.md")
        if page.name != "bench.md" and f"docs/{page.name}" not in OTHERS
        for paragraph in paragraphs(page.read_text())
        for load in _LOAD.findall(paragraph)
    }
    assert found == {(page, load) for page, loads in LOADS.items() for load in loads}


def test_rows_have_one_name_each_and_groups_that_are_there() -> None:
    assert len(ROWS) == sum(len(part.rows) for part in PARTS.values()) > 0
    groups = {f"{room} {group}" for room, named in bench.rooms([]).items() for group in named}
    assert PARTS.keys() <= groups
