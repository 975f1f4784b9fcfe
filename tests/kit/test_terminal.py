"""What commands print: text of others never steers the operator's terminal."""

import json
import logging
import os
import re
from typing import Any

import click
import pytest
import structlog
import yaml
from click.testing import CliRunner

from kit import terminal
from nodeagent import logs
from tests.testbed.own_log import own_log

# What a job may call its process or a file: clear the screen, a title, a forged line, a C1 control
# sequence, text that runs backwards.
EVIL = "\x1b[2J\x1b[31m ok\r\n\x1b]0;title\x07 \x9b1m \x7f \u202egnp \u2028"


def controls(text: str) -> set[str]:
    return {c for c in text if not c.isprintable() and c != "\n"}


def shown(how: str) -> str:
    @click.command()
    def command() -> None:
        rows = [(EVIL, "a"), ("short", EVIL)]
        terminal.show(
            ({EVIL: EVIL}, lambda _: [EVIL, *terminal.table(("ONE", "TWO"), rows)]), output=how
        )

    return CliRunner().invoke(command).output


@pytest.mark.parametrize("how", ["table", "wide", "json", "yaml"])
def test_no_control_character_is_printed(how: str) -> None:
    assert not controls(shown(how))


def test_each_line_stays_one_line_and_columns_stay_straight() -> None:
    first, head, one, two = shown("table").splitlines()
    assert first == terminal.plain(EVIL)
    assert head.index("TWO") == one.index("a") == two.index("\\x1b")


def test_json_and_yaml_read_back_to_the_same() -> None:
    assert json.loads(shown("json")) == {EVIL: EVIL}
    assert yaml.safe_load(shown("yaml")) == {EVIL: EVIL}


def test_yaml_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_yaml({"path": "/data/größe"})
    assert capsys.readouterr().out == "path: /data/größe\n"


def test_only_our_own_colours_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        terminal.say((terminal.Coloured(f"bad {EVIL}", "red"), f" {EVIL}"))

    coloured = CliRunner().invoke(command, color=True).output
    assert coloured.count("\x1b") == 2  # on and off again
    assert coloured.startswith("\x1b[31mbad \\x1b")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not controls(CliRunner().invoke(command, color=True).output)


def test_the_log_on_a_terminal_has_none_but_its_own_colours() -> None:
    ours, theirs = os.openpty()
    with own_log():
        drain = logs.configure(theirs)
        log: Any = structlog.get_logger("test")
        try:
            raise RuntimeError(EVIL)
        except RuntimeError:
            log.exception(EVIL, why=EVIL, deep={"a": [EVIL]})
        logging.getLogger("library").error("failed: %s", EVIL)
        drain.close(60)
    said = os.read(ours, 65536).decode().replace("\r\n", "\n")
    os.close(ours)
    os.close(theirs)
    assert said.count("\\x1b[31m ok") == 5
    assert "\x1b[31m ok" not in said
    assert not controls(re.sub(r"\x1b\[[0-9;]*m", "", said))


# --- tables

HEAD = ("DATASET", "STATE", "READ BY", "SSD HITS", "STORED", "ON SSD", "VERSION", "WHY")
LONG = "the source does not answer: no monitor of 10.0.0.1, 10.0.0.2 took 12 MiB of 1.5 GiB in 30 s"
STATUS = {
    "complete": [
        ("demo", "complete", "nobody", "", "100% 66.9 MiB of 66.9 MiB", "66.9 MiB",
         "frozen-48f7ac31", ""),
    ],
    "filling": [
        ("coco", "filling", "2 pods", "98%", "  7% 110.4 GiB of 1.5 TiB", "118.0 GiB",
         "frozen-48f7ac31", LONG),
        ("laion", "waiting", "nobody", "not known", "  0% 0 B of 0 B", "0 B", "new", ""),
    ],
    "partial": [
        ("imagenet-21k-winter-2021-resized-to-256-pixels", "partial", "nobody", ">99%",
         " 99% 1023.9 GiB of 1023.9 GiB", "1.1 TiB", "frozen-48f7ac31", f"12 files: {LONG}"),
        ("demo", "complete", "nobody", "99%", "100% 66.9 MiB of 66.9 MiB", "66.9 MiB",
         "train@2026-10-01", ""),
    ],
}  # fmt: skip
FIGURE = re.compile(r"\d+(?:\.\d+)? (?:[KMGT]?i?B|s)\b")


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
@pytest.mark.parametrize("rows", STATUS.values(), ids=STATUS)
def test_a_table_folds_its_texts_and_keeps_a_number_with_its_unit(
    rows: list[tuple[str, ...]], columns: int
) -> None:
    table = terminal.table(HEAD, rows, columns)
    shown = [str(part) for line in table for part in terminal.folded(line, columns)]
    assert max(map(len, shown)) <= columns
    figures = [found for row in rows for cell in row for found in FIGURE.findall(cell)]
    assert sorted(f for line in shown for f in FIGURE.findall(line)) == sorted(figures)
    words = {word for row in rows for cell in row[1:] for word in cell.split()}
    assert words <= {word for line in shown for word in line.split()}
    natural = sum(max(map(len, column)) for column in zip(HEAD, *rows, strict=True))
    if natural + 2 * len(HEAD) <= columns:
        assert len(shown) == len(rows) + 1


@pytest.mark.parametrize("columns", [80, 200, None])
def test_a_column_without_content_takes_no_width(columns: int | None) -> None:
    rows = [("a", "", "b", ""), ("c", "", "", "")]
    first = next(terminal.table(("ONE", "TWO", "THREE", "WHY"), rows, columns))
    # In a pipe programs count columns.
    assert first.split() == (["ONE", "THREE"] if columns else ["ONE", "TWO", "THREE", "WHY"])


def test_a_table_without_rows_has_its_head() -> None:
    assert list(terminal.table(("ONE", "TWO"), [], 80)) == ["ONE  TWO"]


@pytest.mark.parametrize(
    ("rows", "most"), [("complete", {80: 3, 100: 2}), ("filling", {80: 9, 100: 9, 120: 6})]
)
def test_a_table_stays_low(rows: str, most: dict[int, int]) -> None:
    for columns, lines in most.items():
        table = terminal.table(HEAD, STATUS[rows], columns)
        shown = [part for line in table for part in terminal.folded(line, columns)]
        assert len(shown) <= lines, "\n".join(map(str, shown))
