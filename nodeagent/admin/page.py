"""The status page: one server-rendered HTML page, no script."""

from html import escape
from typing import TYPE_CHECKING

from aiohttp import web

import cache.component
import kit.units
from cache import status

if TYPE_CHECKING:
    from nodeagent.app import Agent

REFRESH_SECONDS = 5

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

_CLASS = {"complete": "good", "failed": "bad", "waiting": "bad", "partial": "mid"}


def render(agent: "Agent") -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<meta http-equiv=refresh content={REFRESH_SECONDS}>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>nodeagent</title><style>{_STYLE}</style><h1>nodeagent</h1>",
        _health(agent),
    ]
    parts += [_datasets(c) for c in agent.components if isinstance(c, cache.component.Cache)]
    parts.append(_findings(agent))
    parts.append(
        "<p class=small><a href=/metrics>metrics</a> · <a href=/readyz>readiness</a> · "
        "<a href=/openapi.json>API</a></p></html>"
    )
    return "".join(parts)


def _health(agent: "Agent") -> str:
    rows = []
    for component in agent.components:
        health = component.health()
        word = (
            "<span class=good>ready</span>" if health.ready else "<span class=bad>not ready</span>"
        )
        why = "<br>".join(escape(reason) for reason in health.reasons)
        rows.append(f"<tr><td>{escape(component.name)}<td>{word}<td>{why}")
    trouble = [agent.config_error] if agent.config_error else []
    trouble += [f"{name} needs a restart to change" for name in agent.refused]
    notes = "".join(f"<p class=mid>settings: {escape(text)}</p>" for text in trouble)
    return f"<table><tr><th>Component<th>State<th>Why{''.join(rows)}</table>{notes}"


def _datasets(component: cache.component.Cache) -> str:
    size = kit.units.format_size
    rows = []
    for name in sorted(component.datasets):
        d = status.of_dataset(component.datasets[name])
        done, total = d["files"]["done"], d["files"]["total"]
        about = "about " if d["estimated"] else ""
        left = d["eta_seconds"]
        pace = (
            f"{d['rate']['files']:.0f} files/s, {size(d['rate']['bytes'])}/s" if d["phase"] else ""
        )
        eta = f", {kit.units.format_duration(left)} left" if left is not None else ""
        failed = d["files"]["failed"]
        bad = f"<br><span class=bad>{failed} failed</span>" if failed else ""
        rows.append(
            f"<tr><td><b>{escape(name)}</b><br><code class=small>{escape(d['view'])}</code>"
            f"<td><span class={_CLASS.get(d['state'], 'mid')}>{d['state']}</span>"
            f"<br><span class=small>served by {d['served_by']}</span>"
            f"<td><progress max={max(total, 1)} value={done}></progress><br>"
            f"<span class=small>{done} of {about}{total} files, {size(d['bytes']['done'])} of "
            f"{size(d['bytes']['total'])}<br>{pace}{eta}{bad}</span>"
            f"<td>{size(d['store_bytes'])}<td class=small>{escape(d['why'])}"
        )
    used, budget = size(component.used()), size(component.settings.budget)
    return (
        f"<h2>Datasets</h2><p>{used} of {budget} used.</p><table><tr><th>Dataset<th>State"
        f"<th>Stored<th>On SSD<th>Why{''.join(rows)}</table>"
    )


def _findings(agent: "Agent") -> str:
    found = agent.findings.current()
    if not found:
        return "<h2>Findings</h2><p class=good>None.</p>"
    rows = [
        f"<tr><td>{f.severity}<td>{escape(f.subject)}<td>{escape(f.message)}<td>{escape(f.advice)}"
        for f in found[:100]
    ]
    head = "<tr><th>Severity<th>About<th>What<th>What to do"
    return f"<h2>Findings</h2><table>{head}{''.join(rows)}</table>"


def routes(agent: "Agent") -> list[web.RouteDef]:
    async def status_page(_: web.Request) -> web.Response:
        """200: the page."""
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=render(agent), content_type="text/html", headers=headers)

    return [web.get("/", status_page)]
