"""The status page: what it shows, and that every text is escaped."""

from typing import Any

import kit.findings
import kit.room
import kit.settings
from nodeagent import app, page
from nodeagent.state import Running, State

EVIL = "<script>&'\""
SAFE = "&lt;script&gt;&amp;&#x27;&quot;"


class Component:
    name = f"room {EVIL}"

    def health(self) -> kit.room.Health:
        return kit.room.Health(alive=True, ready=False, reasons=[f"reason {EVIL}"])


def finding(number: int) -> kit.findings.Finding:
    return kit.findings.Finding(
        f"f{number}", "rule", kit.findings.Severity.WARNING, f"subject {EVIL}", f"message {EVIL}",
        f"advice {EVIL}",
    )  # fmt: skip


def shown(agent: app.Agent, **more: Any) -> str:
    cells = [
        kit.room.Cell(
            f"cell {EVIL}", tone="bad", style="code", below=[kit.room.Cell(f"below {EVIL}")]
        ),
        kit.room.Cell(progress=(3, 4)),
    ]
    section = kit.room.PageSection(f"title {EVIL}", f"summary {EVIL}", [f"head {EVIL}"], [cells])
    component: Any = Component()
    room = kit.room.Room(
        component.name, "", kit.settings.Section, lambda *_: component, page=lambda _: [section]
    )
    state = State(agent.state.settings, running=[Running(room, component, started=True)], **more)
    state.findings.report("x", [finding(number) for number in range(150)])
    return page.render(state)


def test_every_text_is_escaped(agent: app.Agent) -> None:
    html = shown(agent, config_error=f"error {EVIL}", refused=[f"setting {EVIL}"])
    for text in ("room", "reason", "title", "summary", "head", "cell", "below", "subject",
                 "message", "advice", "error", "setting"):  # fmt: skip
        assert f"{text} {SAFE}" in html, text
    assert "<script>" not in html


def test_cells_have_tone_style_and_bar(agent: app.Agent) -> None:
    html = shown(agent)
    assert f"<span class=bad><code>cell {SAFE}</code></span>" in html
    assert "<progress max=4 value=3></progress>" in html
    assert "<span class=bad>not ready</span>" in html


def test_findings_are_bounded(agent: app.Agent) -> None:
    assert shown(agent).count("<td>warning<td>") == page.MOST_FINDINGS
