"""The status page: one server-rendered HTML page, no script.

A room describes its part as tables (``kit.room.PageSection``). Only this module writes HTML, so
that every text of a room is escaped in one place.
"""

from collections.abc import Sequence
from html import escape

import kit.room
from nodeagent.state import State

REFRESH_SECONDS = 5
MOST_FINDINGS = 100

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--good:#1a7f37;--bad:#cf222e;--mid:#9a6700}
body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.4rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;font-size:.85rem}code{font-size:.9em}
progress{width:9rem;height:.8rem}
.good{color:var(--good)}.bad{color:var(--bad)}.mid{color:var(--mid)}.small{font-size:.85rem}
"""

_TAGS = {"strong": "b", "code": "code"}


def render(state: State) -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<meta http-equiv=refresh content={REFRESH_SECONDS}>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>nodeagent</title><style>{_STYLE}</style><h1>nodeagent</h1>",
        _health(state),
    ]
    for each in state.running:
        if each.room.page is not None:
            parts += [_section(section) for section in each.room.page(each.component)]
    parts.append(_findings(state))
    parts.append(
        "<p class=small><a href=/metrics>metrics</a> · <a href=/readyz>readiness</a></p></html>"
    )
    return "".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[kit.room.Cell]]) -> str:
    lines = ["".join(f"<td>{_cell(cell)}" for cell in row) for row in rows]
    return f"<table><tr><th>{'<th>'.join(map(escape, head))}<tr>{'<tr>'.join(lines)}</table>"


def _cell(cell: kit.room.Cell) -> str:
    parts = []
    if cell.progress is not None:
        done, total = cell.progress
        parts.append(f"<progress max={total:g} value={done:g}></progress>")
    if cell.text:
        parts.append(_text(cell))
    parts += [f"<span class=small>{_text(below)}</span>" for below in cell.below]
    return "<br>".join(parts)


def _text(cell: kit.room.Cell) -> str:
    text = escape(cell.text)
    if tag := _TAGS.get(cell.style):
        text = f"<{tag}>{text}</{tag}>"
    return f"<span class={escape(cell.tone)}>{text}</span>" if cell.tone else text


def _section(section: kit.room.PageSection) -> str:
    return (
        f"<h2>{escape(section.title)}</h2><p>{escape(section.summary)}</p>"
        f"{_table(section.head, section.rows)}"
    )


def _health(state: State) -> str:
    rows = []
    for each in state.running:
        health = each.health()
        word = kit.room.Cell("ready", "good") if health.ready else kit.room.Cell("not ready", "bad")
        reasons = kit.room.Cell(below=[kit.room.Cell(reason) for reason in health.reasons])
        rows.append([kit.room.Cell(each.room.name), word, reasons])
    trouble = [state.config_error] if state.config_error else []
    trouble += [f"{name} needs a restart to change" for name in state.refused]
    notes = "".join(f"<p class=mid>settings: {escape(text)}</p>" for text in trouble)
    return _table(("Component", "State", "Why"), rows) + notes


def _findings(state: State) -> str:
    found = state.findings.current()
    if not found:
        return "<h2>Findings</h2><p class=good>None.</p>"
    rows = [
        [kit.room.Cell(text) for text in (f.severity, f.subject, f.message, f.advice)]
        for f in found[:MOST_FINDINGS]
    ]
    table = _table(("Severity", "About", "What", "What to do"), rows)
    return f"<h2>Findings</h2>{table}"
