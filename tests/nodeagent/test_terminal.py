"""The commands of a person on call, typed into a real terminal beside a busy agent.

With PICTURES=FOLDER in the environment pictures of the screens stay there (docs/terminal-top.svg).
"""

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tests.testbed import busy_node, tmux, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(600 if os.environ.get("PICTURES") else 120)]

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
    keep("terminal-status", "nodeagent status", styled)
    assert "SSD HITS" in seen
    terminal.enter("nodeagent status | cat; echo ended")
    terminal.wait("ended", "NEEDS A LOOK")
    assert not re.search(r"\x1b\[3[123]m", terminal.screen(styled=True))  # only on a terminal


def test_top_draws_the_node_goes_on_and_leaves_the_screen_as_it_was(
    terminal: tmux.Terminal, busy: busy_node.BusyNode
) -> None:
    terminal.enter("echo before")
    terminal.wait("before")
    terminal.type("nodeagent top --interval 1")
    terminal.press("Enter")
    seen = terminal.wait("DATASETS", "IMAGES", "VOLUMES", "FINDINGS  1", without="before")
    assert re.search(rf"{busy_node.COMPLETE} .*100%", seen)
    keep("terminal-top", "nodeagent top", terminal.screen(styled=True))
    busy.add("c4-sample")
    terminal.wait("c4-sample", "DATASETS")
    terminal.size(80, 24)  # as small as a terminal gets: every room is still there
    terminal.wait("DATASETS", "IMAGES", "VOLUMES", "FINDINGS  1")
    terminal.press("q")
    terminal.wait("before", without="DATASETS")
    waiting.until(terminal.idle, 20, "the shell to be back", detail=terminal.screen)


def test_events_are_followed_until_interrupted(
    terminal: tmux.Terminal, busy: busy_node.BusyNode
) -> None:
    terminal.enter("nodeagent events --follow")
    terminal.wait(f"changed  dataset {busy_node.COMPLETE}: new:")  # what was before
    terminal.enter("")  # an empty screen: what comes now is new
    busy.add("laion-sample")
    terminal.wait("dataset laion-sample: new:")
    busy.agent.tell("laion-sample", "pause")  # it may wait long for its turn to be filled
    terminal.wait("dataset laion-sample: state")
    keep("terminal-events", "nodeagent events --follow", terminal.screen(styled=True))
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


def keep(name: str, title: str, styled: str) -> None:
    """As an SVG that asks nobody for a font."""
    if not (folder := os.environ.get("PICTURES")):
        return
    lines = [line.rstrip() for line in styled.rstrip("\n").split("\n")]
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=False)
    drawn = console.export_svg(title=title, theme=MONOKAI, unique_id=name)
    drawn = re.sub(r"@font-face \{.*?\}\n?|<!--.*?-->", "", drawn, flags=re.DOTALL)
    assert "https://" not in drawn
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.svg").write_text(drawn)
