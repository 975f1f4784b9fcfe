"""The shells of the docs' tests, and how outputs are compared."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import docpages

SECONDS = 20.0  # for waiting.limit


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[docpages.Shell]:
    made = docpages.Shell(tmp_path, os.environ)
    try:
        yield made
    finally:
        made.end()


def test_what_a_block_sets_is_there_in_the_next_one(shell: docpages.Shell) -> None:
    shell.begin("HERE=some\\ thing\ncat <<Y\nfirst\nY")
    assert shell.finish(SECONDS) == "first\n"
    shell.begin('echo "$HERE"')
    assert shell.finish(SECONDS) == "some thing\n"


def test_a_command_that_fails_in_the_middle_is_told(shell: docpages.Shell) -> None:
    shell.begin("false\necho last")
    with pytest.raises(AssertionError, match="command-failed 1: false"):
        shell.finish(SECONDS)
    shell.begin("false || echo expected")
    assert shell.finish(SECONDS) == "expected\n"


def test_an_interrupt_waits_for_the_end_of_its_command(shell: docpages.Shell) -> None:
    slow = "bash -c 'trap \"sleep 0.3; echo cleaned up; exit\" INT; echo begun; sleep 600 & wait'"
    for _ in range(2):  # the mark of the first one says nothing about the second
        shell.begin(slow)
        docpages.wait_begins(shell, "begun", SECONDS)
        shell.interrupt(SECONDS)
        assert "cleaned up" in shell.said()
        shell.begin("echo next")
        assert shell.finish(SECONDS) == "next\n"


@pytest.mark.parametrize("text", ["```sh\nmake run\n", "a\n```\nb\n```\n```"])
def test_a_block_that_is_not_closed_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match="not closed"):
        docpages.blocks(tmp_path / "page.md")


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("a … c", "a  b  c\n", True),
        ("a … c", "a b\nc\n", False),
        ("...\nlast", "first\nsecond\nlast\n", True),
        ("...\nlast", "first\nlast\nmore\n", False),
        ("2002 files", "200 files\n", False),
    ],
)
def test_output_is_compared_as_the_page_shows_it(expected: str, output: str, same: bool) -> None:
    assert docpages.as_on_page(output, expected) is same
