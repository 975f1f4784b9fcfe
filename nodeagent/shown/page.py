"""The status page: one server-rendered HTML page, whole without script, live with it.

A room describes its part as tables (``kit.room.PageSection``). Only this module writes HTML, so
that every text of a room is escaped in one place. Style and script are parts of the page, named in
its policy by their digests: a browser runs nothing else and asks nobody else.
"""

import base64
import collections
import datetime
import functools
import hashlib
import importlib.resources
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import yaml

import kit.errors
import kit.findings
import kit.room
import kit.units
from kit.findings import Finding, Severity
from nodeagent import rooms
from nodeagent.shown import overview
from nodeagent.state import Event

REFRESH_SECONDS = 10  # without script
MOST_FINDINGS = 100
MOST_EVENTS = 20
LOG_LINES = "log-line"  # stands for the rules of all log lines (log-...)
LONGEST_REASON = 240  # of a component; its finding has all of it
MOST_REASONS = 3
MOST_UNFILTERED = 12  # rows of a table without a filter
LONGEST_UNBROKEN = 28  # characters of a name that is shown in one line, such as a version

_FILES = importlib.resources.files("nodeagent.shown")
_STYLE = (_FILES / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_FILES / "page.js").read_text(encoding="utf-8")
_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")  # nobody reads the rest
_TAGS = {"strong": "b", "code": "code"}
# What a text may have: a command, of ours also without quotes; a page of the docs; an entry's name.
_PROGRAMS = "nodeagent|kubectl|ceph|rbd|rados|systemctl|umount|ip|ss|helm|ctr|crictl"
_TOKEN = re.compile(
    rf"'(?P<quoted>(?:{_PROGRAMS}) [^']*)'|(?<=: )(?P<bare>nodeagent [a-z][^;.']*)$|"
    r"docs/(?P<page>\w+\.md)(?:#(?P<anchor>[\w-]+))?|(?<![\w'#/.-])(?P<entry>\w+(?:-\w+)*)(?!['-])"
)
_GRAVEST_FIRST = list(Severity)[::-1]
_HARMS = ("allow-format",)  # commands that nobody should have at one click
_WORDS = {
    overview.Verdict.WELL: "Well",
    overview.Verdict.ATTENTION: "Needs a look",
    overview.Verdict.CRITICAL: "Needs a person now",
}


def _digest(text: str) -> str:
    made = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{made}'"


POLICY = (
    f"default-src 'none'; style-src {_digest(_STYLE)}; script-src {_digest(_SCRIPT)}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def render(now: overview.Overview) -> str:
    facts = (
        f"<span>version {escape(now.version)}</span><span>up {ago(now.uptime_seconds)}</span>"
        f"<span id=live>As of {_clock(now.at)} UTC</span>"
    )
    return _document(
        _title(now),
        f"<p class=brand><b>nodeagent</b> on {escape(now.node)}</p><p class=facts>{facts}</p>",
        f"<main class=status id=content tabindex=-1>{content(now)}</main>"
        "<p class=skip id=spoken role=status></p>",
        f"<noscript><meta http-equiv=refresh content={REFRESH_SECONDS}></noscript>",
        f"<script>{_SCRIPT}</script>",
    )


def content(now: overview.Overview) -> str:
    """What a live page replaces: blocks, each with an id of its own."""
    first = [_section(each) for each in now.sections if each.title == overview.FIRST]
    others = [_section(each) for each in now.sections if each.title != overview.FIRST]
    findings = _findings(now)
    # What needs a person comes before the other rooms; that nothing does is read later.
    blocks = [findings, *others] if now.findings else [*others, findings]
    return "".join([_verdict(now), *first, *blocks, _events(now)])


def _document(title: str, header: str, main: str, head: str = "", end: str = "") -> str:
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<title>{escape(title)}</title><meta name=viewport content='width=device-width'>"
        f"<link rel=icon href='data:,'>{head}<style>{_STYLE}</style></head>"
        "<body><a class=skip href='#content'>To the content</a>"
        f"<header>{header}</header>{main}<footer><a href='/runbook'>runbook</a>"
        f"<a href='/metrics'>metrics</a><a href='/readyz'>readiness</a></footer>{end}</body></html>"
    )


def _title(now: overview.Overview) -> str:
    return f"{_WORDS[now.verdict]} · {now.node} · nodeagent"


def _verdict(now: overview.Overview) -> str:
    parts = []
    for part in now.components:
        tone = "good" if part.ready else "mid" if part.starting else "bad"
        word = "ready" if part.ready else "starting" if part.starting else "not ready"
        reasons = [overview.clipped(each, LONGEST_REASON) for each in part.reasons]
        told = kit.errors.some([r for r in reasons if r not in now.headline], MOST_REASONS)
        why = f": {escape(told)}" if told and not part.ready else ""
        held = f" · {escape(part.brief)}" if part.brief else ""
        parts.append(
            f"<li><span class='dot {tone}'>{escape(part.name)} {word}</span>{held}{why}</li>"
        )
    notes = "".join(f"<p class='small mid'>{escape(text)}</p>" for text in now.trouble)
    if found := _counted(now.findings):
        notes = f"<p class=small>Findings: <a href='#findings'>{found}</a></p>{notes}"
    return (
        f"<section id=verdict class='verdict wide {now.verdict}' "
        f"data-title='{escape(_title(now))}'>"
        f"<div><p class=word>{_WORDS[now.verdict]}</p>"
        f"<h1 id=headline>{escape(now.headline)}</h1></div>"
        f"<ul class=parts aria-label=Components>{''.join(parts)}</ul>{notes}</section>"
    )


# --- the rooms


def _section(section: kit.room.PageSection) -> str:
    name = "part-" + "".join(c for c in section.title.lower() if c.isalnum())
    search = ""
    if section.rows:
        body = _table(section.title, section.head, section.rows)
        if len(section.rows) > MOST_UNFILTERED:  # its script shows it
            search = (
                f"<p class=filter><label>Filter <input type=search id={name}-filter></label>"
                "<output></output></p>"
            )
    else:
        body = f"<p class=none>{rich(section.empty)}</p>" if section.empty else ""
    return (
        f"<section id={name} class=wide aria-labelledby={name}-title>"
        f"<h2 id={name}-title>{escape(section.title)}</h2>"
        f"<p class=sum>{rich(section.summary)}</p>{_disk(section.disk)}{search}{body}</section>"
    )


def _disk(parts: Sequence[kit.room.Slice]) -> str:
    """A bar, and its parts in words."""
    whole, at = sum(each.bytes for each in parts), 0
    drawn, said = [], []
    for each in parts:
        if each.bytes <= 0:
            continue
        begin, width = 100 * at / whole, 100 * each.bytes / whole
        drawn.append(f"<rect class={each.tone} x={begin:.2f} width={width:.2f} height=10></rect>")
        size = kit.units.format_size(each.bytes)
        said.append(f"<li class='dot {each.tone}'>{escape(each.name)}: {size}</li>")
        at += each.bytes
    if not drawn:
        return ""
    return (
        "<svg class=disk viewBox='0 0 100 10' preserveAspectRatio=none aria-hidden=true>"
        f"{''.join(drawn)}</svg><ul class=legend aria-label='The disk'>{''.join(said)}</ul>"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[kit.room.Cell]]) -> str:
    """A column that says nothing is left out. Roles are said although the elements have them: on a
    phone the table is drawn as cards, and browsers then forget that it is a table."""
    said = [at for at in range(len(head)) if any(_says(row[at]) for row in rows)]
    columns = [at for at in said if not rows[0][at].wide]
    heads = "".join(
        f"<th role=columnheader scope=col{' class=num' if rows[0][at].number else ''}>"
        f"{escape(head[at])}</th>"
        for at in columns
    )
    lines = []
    for row in rows:
        cells = (_cell(row[at], head[at], row[0].text) for at in columns)
        lines.append(f"<tr role=row>{''.join(cells)}</tr>")
        for at in said:
            if row[at].wide and _says(row[at]):
                cell = _cell(row[at], head[at], row[0].text).removeprefix("<td role=cell")
                lines.append(
                    f"<tr role=row class=note><td role=cell colspan={len(columns)}{cell}</tr>"
                )
    return (
        f"<table role=table aria-label='{escape(title)}'><thead role=rowgroup>"
        f"<tr role=row>{heads}</tr></thead><tbody role=rowgroup>{''.join(lines)}</tbody></table>"
    )


def _says(cell: kit.room.Cell) -> bool:
    return bool(cell.text or cell.below or cell.progress is not None)


def _cell(cell: kit.room.Cell, head: str, row: str) -> str:
    parts = []
    if cell.text:
        parts.append(f"<span>{_text(cell)}</span>")
    if cell.progress is not None:
        done, total = cell.progress
        label = escape(f"{row}: {head}")
        parts.append(f"<progress max={total:.0f} value={done:.0f} aria-label='{label}'></progress>")
    if sum(each is not None for each in cell.spark) > 1:
        parts.append(_spark(cell.spark, cell.spark_top))
    parts += [f"<span class=small>{_text(below)}</span>" for below in cell.below]
    kinds = [word for word, on in (("num", cell.number), ("empty", not parts)) if on]
    named = f" class='{' '.join(kinds)}'" if kinds else ""
    return f"<td role=cell{named} data-head='{escape(head)}'>{''.join(parts)}</td>"


def _spark(points: Sequence[float | None], top: float) -> str:
    """A line from the bottom (0) to the top (``top``, or the highest), broken where nothing is
    known. The last value stands beside it as text, so a screen reader passes it over."""
    top = top or max(each or 0.0 for each in points) or 1e-9
    last = len(points) - 1
    lines = []
    for known, run in itertools.groupby(enumerate(points), lambda each: each[1] is not None):
        if not known:
            continue
        places = [(f"{100 * at / last:.1f}", max(each or 0.0, 0.0) / top) for at, each in run]
        drawn = " ".join(f"{across},{19 - 18 * height:.1f}" for across, height in places)
        lines.append(
            f"<path d='M{places[0][0]},20 L{drawn} {places[-1][0]},20z'></path>"
            f"<polyline points='{drawn}'></polyline>"
        )
    return (
        "<svg class=spark viewBox='0 0 100 20' preserveAspectRatio=none aria-hidden=true>"
        f"{''.join(lines)}</svg>"
    )


def _text(cell: kit.room.Cell) -> str:
    text = escape(cell.text) if cell.style else rich(cell.text)
    if tag := _TAGS.get(cell.style):
        if len(cell.text) <= LONGEST_UNBROKEN:
            text = f"<{tag} class=short>{text}</{tag}>"
        else:
            text = f"<{tag}>{text.replace('/', '/<wbr>')}</{tag}>"
    return f"<span class='tone {escape(cell.tone)}'>{text}</span>" if cell.tone else text


# --- findings and events


def _counted(found: Sequence[Finding]) -> str:
    """``1 critical, 2 warnings``."""
    number = collections.Counter(each.severity for each in found)
    return ", ".join(_number(number[each], each) for each in _GRAVEST_FIRST if number[each])


def _number(number: int, severity: Severity) -> str:
    return f"{number} {severity}{'s' if severity is Severity.WARNING and number > 1 else ''}"


def _findings(now: overview.Overview) -> str:
    """Folded by severity; what nobody has to act on is closed."""
    shown, folds = now.findings[:MOST_FINDINGS], []
    for severity in _GRAVEST_FIRST:
        if lines := [_finding(each, now.at) for each in shown if each.severity == severity]:
            opened = "" if severity == Severity.INFO else " open"
            folds.append(
                f"<details id=findings-{severity}{opened}><summary id=findings-{severity}-fold>"
                f"{_number(len(lines), severity)}</summary><ul class=list>{''.join(lines)}</ul>"
                "</details>"
            )
    more = now.findings_total - len(shown)
    if more > 0:
        folds.append(f"<p class=none>{rich(f'{more} more: nodeagent status -o json')}</p>")
    if not shown:
        folds = ["<p class='none good'>None. A rule that finds something says here what to do.</p>"]
    return (
        "<section id=findings class=wide aria-labelledby=findings-title>"
        f"<h2 id=findings-title>Findings</h2>{''.join(folds)}</section>"
    )


def _finding(each: Finding, now: float) -> str:
    link = ""
    if entry := runbook_entry(each.rule):
        link = f" <a href='/runbook#{escape(entry.name)}'>runbook: {escape(each.rule)}</a>"
    return (
        f"<li class=finding><span class='badge {each.severity}'>{each.severity}</span><div>"
        f"<p class=what>{escape(each.subject)}</p>"
        f"<p>{rich(each.message.removeprefix(f'{each.subject}: '))}</p>"
        f"<p class=small><b>Do:</b> {rich(each.advice)}</p>"
        f"<p class=small>for {ago(now - each.since)}{link}</p></div></li>"
    )


def _events(now: overview.Overview) -> str:
    lines = "".join(_event(each) for each in now.events[:MOST_EVENTS])
    body = f"<ol class=list>{lines}</ol>"
    if not lines:
        body = "<p class=none>Nothing has happened since the agent began.</p>"
    return (
        "<section id=events aria-labelledby=events-title>"
        "<h2 id=events-title>Recent events</h2>"
        f"<p class=sum>The newest first, in UTC.</p>{body}</section>"
    )


def _event(each: Event) -> str:
    when = datetime.datetime.fromtimestamp(each.at, datetime.UTC)
    text = _DIGEST.sub(r"\1…", kit.findings.without(each.subject, each.text))
    return (
        f"<li class=event><time datetime='{when.isoformat(timespec='seconds')}'>{when:%H:%M:%S}"
        f"</time><span class='badge {each.kind} {each.severity}'>{each.kind}</span>"
        f"<p class=plain><b>{escape(each.subject)}</b> {escape(text)}</p></li>"
    )


def ago(seconds: float) -> str:
    """``12 min``: coarse, so that a live page does not change every second."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "less than a minute"


def _clock(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%H:%M:%S}"


# --- texts with commands and names of entries


def rich(text: str) -> str:
    """``text`` as HTML: commands can be copied, names of the runbook's entries are links. The docs
    are not on the node, so their pages are named only."""
    made, at = [], 0
    for found in _TOKEN.finditer(text):
        made += [escape(text[at : found.start()]), _token(found)]
        at = found.end()
    return "".join(made) + escape(text[at:])


def _token(found: re.Match[str]) -> str:
    if entry := found["entry"]:
        return f"<a href='/runbook#{entry}'>{entry}</a>" if entry in _by_name() else entry
    if page := found["page"]:
        return f"docs/{page}" + (
            f", {found['anchor'].replace('-', ' ')}" if found["anchor"] else ""
        )
    command = escape(found["quoted"] or found["bare"])
    button = f"<button type=button class=copy aria-label='Copy: {command}'></button>"
    return f"<code>{command}</code>{'' if any(w in command for w in _HARMS) else button}"


# --- the runbook; scripts/runbook_doc.py makes docs/runbook.md of it, too


@dataclass(frozen=True)
class RunbookEntry:
    """What a finding or an alert means, how to look, what to do (runbook.yaml).

    ``see``: the entry that has its texts, as the finding behind an alert.
    """

    name: str
    means: str = ""
    look: str = ""
    do: str = ""
    see: str = ""
    group: str = ""  # the heading it stands under


@functools.lru_cache(maxsize=1)
def runbook_entries() -> Sequence[RunbookEntry]:
    """All of them, in the order of the file; read when it is first asked for."""
    file = _FILES / "runbook.yaml"
    found, group = [], ""
    for each in yaml.safe_load(file.read_text(encoding="utf-8")):
        if "group" in each:
            group = each["group"]
        else:
            found.append(RunbookEntry(**each, group=group))
    by_name = {each.name: each for each in found}
    return tuple(
        replace(by_name[e.see], name=e.name, see=e.see, group=e.group) if e.see else e
        for e in found
    )


@functools.lru_cache(maxsize=1)
def _log_lines() -> Sequence[RunbookEntry]:
    """One for each line of a log that a room knows."""
    return [
        RunbookEntry(
            f"log-{each.id}", f"A log says: {each.meaning}.", do=each.advice, group="Log lines"
        )
        for room in rooms.ROOMS
        for each in room.log_lines()
    ]


@functools.lru_cache(maxsize=1)
def _by_name() -> dict[str, RunbookEntry]:
    return {each.name: each for each in (*runbook_entries(), *_log_lines())}


def runbook_entry(rule: str) -> RunbookEntry | None:
    """The entry of a finding's rule or of an alert; of an operator's own log line that of all."""
    return _by_name().get(rule) or _by_name().get(LOG_LINES if rule.startswith("log-") else "")


@functools.lru_cache(maxsize=1)
def runbook() -> str:
    """A page of its own, so that it can be read on a node that reaches nothing else."""
    groups: dict[str, list[RunbookEntry]] = {}
    for each in _by_name().values():
        groups.setdefault(each.group, []).append(each)
    listed, parts = [], []
    for group, entries in groups.items():
        names = "".join(f"<li><a href='#{e.name}'>{e.name}</a></li>" for e in entries)
        listed.append(f"<h2>{escape(group)}</h2><ul class=names>{names}</ul>")
        told = "".join(map(_entry, entries))
        parts.append(f"<section class=wide><h2>{escape(group)}</h2><dl>{told}</dl></section>")
    back = "<p class=brand><b>nodeagent</b></p><p class=facts><a href='/'>status</a></p>"
    top = (
        "<section class=wide><h1>Runbook</h1>"
        f"<nav aria-label=Entries>{''.join(listed)}</nav></section>"
    )
    main = f"<main id=content>{top}{''.join(parts)}</main>"
    return _document("nodeagent runbook", back, main, end=f"<script>{_SCRIPT}</script>")


def _entry(each: RunbookEntry) -> str:
    told = (("", each.means), ("Check: ", each.look), ("Do: ", each.do))
    lines = "".join(f"<dd>{word}{rich(text)}</dd>" for word, text in told if text)
    return f"<dt id='{escape(each.name)}'>{escape(each.name)}</dt>{lines}"
