"""The commands of a person on call, typed into a real terminal beside a busy agent."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import agent, busy_node, tmux

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

WIDTH, HEIGHT = 130, 60
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def terminal(area: Path, busy: busy_node.BusyNode) -> Iterator[tmux.Terminal]:
    with tmux.opened(area, WIDTH, HEIGHT) as made:
        made.enter(f"export NODEAGENT_API=unix://{busy.agent.socket}; clear")
        yield made


def test_status_tells_on_one_screen_and_by_its_exit_code(
    terminal: tmux.Terminal, busy: busy_node.BusyNode
) -> None:
    terminal.enter("nodeagent status; echo ended with $?")
    seen = terminal.wait("ended with 12")  # a warning stands
    for text in (
        *("NEEDS A LOOK", "DATASETS", "IMAGES", "VOLUMES", "FINDINGS  1"),
        *(busy_node.COMPLETE, busy_node.WARMING, busy_node.PINNED, "preheat-image-skipped"),
    ):
        assert text in seen, text
    styled = terminal.screen(styled=True)
    assert _COLOUR.search(styled)
    assert "SSD HITS" in seen
    terminal.enter("nodeagent status | cat; echo ended")
    terminal.wait("ended", "NEEDS A LOOK")
    assert not re.search(r"\x1b\[3[123]m", terminal.screen(styled=True))  # only on a terminal


def test_status_is_watched_until_interrupted(
    terminal: tmux.Terminal, busy: busy_node.BusyNode
) -> None:
    terminal.enter("nodeagent status --watch --interval 1; echo ended with $?")
    seen = terminal.wait("DATASETS", "IMAGES", "VOLUMES", "FINDINGS  1")
    assert re.search(rf"{busy_node.COMPLETE} .*100%", seen)
    busy.add("c4-sample")
    terminal.wait("c4-sample", "DATASETS")
    terminal.size(80, 24)  # as small as a terminal gets: the verdict stays in sight
    terminal.wait("NEEDS A LOOK", " more lines")
    terminal.press("C-c")
    terminal.wait("ended with 0")


def test_events_are_followed_until_interrupted(
    terminal: tmux.Terminal, busy: busy_node.BusyNode
) -> None:
    terminal.enter("nodeagent events --follow")
    terminal.wait(f"changed  dataset {busy_node.COMPLETE}: new:")  # what was before
    terminal.enter("")  # an empty screen: what comes now is new
    busy.add("laion-sample")
    terminal.wait("dataset laion-sample: new:")
    try:
        busy.agent.tell("laion-sample", "pause")  # it may wait long for its turn to be filled
    except agent.ApiError:  # it is complete, perhaps since it was seen first
        busy.agent.tell("laion-sample", "evict", {"force": True})
    terminal.wait("dataset laion-sample: state")
    terminal.press("C-c")
    terminal.wait(tmux.PROMPT)


def test_tab_completes_commands_and_options(terminal: tmux.Terminal) -> None:
    terminal.enter("source <(nodeagent completion bash); echo can complete")
    terminal.wait("can complete\n")
    for typed, completed in (
        ("nodeagent dataset ev", "nodeagent dataset evict "),
        ("nodeagent support", "nodeagent support-bundle "),
        ("nodeagent events --fo", "nodeagent events --follow "),
    ):
        terminal.enter("")
        terminal.type(typed)
        terminal.press("Tab")
        terminal.wait(completed.rstrip())
        terminal.press("C-c")
