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
