"""The status page: what it shows, that every text is escaped, and that it asks nobody else."""

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

import kit.findings
import kit.room
import kit.settings
from nodeagent import app
from nodeagent.api import access, own, server
from nodeagent.commands import status
from nodeagent.shown import overview, page
from nodeagent.state import RunningRoom, State
from tests.nodeagent import served as api
from volumes.audit.logs import patterns

EVIL = "<script>&'\""
SAFE = "&lt;script&gt;&amp;&#x27;&quot;"
_VOID = {"meta", "link", "br", "img", "input", "wbr"}


class Component:
    name = f"room {EVIL}"

    def health(self) -> kit.room.Health:
        return kit.room.Health(alive=True, ready=False, reasons=[f"reason {EVIL}"])


def finding(number: int, rule: str = "rule") -> kit.findings.Finding:
    return kit.findings.Finding(
        f"f{number}", rule, kit.findings.Severity.WARNING, f"subject {EVIL}", f"message {EVIL}",
        f"advice {EVIL}",
    )  # fmt: skip


def section(*rows: list[kit.room.Cell], title: str = f"title {EVIL}") -> kit.room.PageSection:
    head = [f"head {EVIL}", "2"]
    return kit.room.PageSection(title, f"summary {EVIL}", head, rows, f"empty {EVIL}")


CELLS = [
    kit.room.Cell(f"cell {EVIL}", tone="bad", style="code", below=[kit.room.Cell(f"below {EVIL}")]),
    kit.room.Cell(progress=(3, 4), number=True),
]


def shown(
    agent: app.Agent, *sections: kit.room.PageSection, found: int = 150, **more: Any
) -> overview.Overview:
    component: Any = Component()
    room = kit.room.Room(
        component.name, "", kit.settings.Section, lambda *_: component, page=lambda _: sections
    )
    state = State(
        agent.state.settings, running=[RunningRoom(room, component, started=True)], **more
    )
    state.findings.report("x", [finding(number) for number in range(found)])
    return overview.of(state, 1e9)


class Checker(HTMLParser):
    """Fails where an element is not closed in order; collects ids and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [v for n, v in attrs if n in ("href", "src", "action", "srcset") and v]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(html: str) -> Checker:
    made = Checker()
    made.feed(html)
    assert made.open == []
    assert len(made.ids) == len(set(made.ids))
    return made


def test_every_text_is_escaped(agent: app.Agent) -> None:
    now = shown(agent, section(CELLS), section(title="b"), config_error=f"error {EVIL}",
                refused=[f"setting {EVIL}"])  # fmt: skip
    html = page.render(now)
    for text in ("room", "reason", "title", "summary", "head", "cell", "below", "subject",
                 "message", "advice", "error", "setting", "empty"):  # fmt: skip
        assert f"{text} {SAFE}" in html, text
    assert html.count("<script>") == 1  # our own
    assert EVIL not in html
    checked(html)


def test_a_reason_that_the_headline_has_is_not_said_again(agent: app.Agent) -> None:
    now = shown(agent, found=0)
    assert now.components[0].reasons[0] in now.headline
    assert page.render(now).count(f"reason {SAFE}") == 1
    other = dataclasses.replace(now, headline="This node needs a person now.")
    assert page.render(other).count(f"reason {SAFE}") == 1


def test_cells_have_tone_style_and_bar(agent: app.Agent) -> None:
    html = page.render(shown(agent, section(CELLS)))
    assert f"<span class='tone bad'><code class=short>cell {SAFE}</code></span>" in html
    assert f"<progress max=4 value=3 aria-label='cell {SAFE}: 2'></progress>" in html
    assert "<th role=columnheader scope=col class=num>2</th>" in html


def test_a_column_that_says_nothing_is_left_out(agent: app.Agent) -> None:
    first = kit.room.Cell("first")
    for other, there in ((kit.room.Cell(), False), (kit.room.Cell(below=[first]), True)):
        rows = ([first, kit.room.Cell()], [first, other])
        html = page.render(shown(agent, section(*rows)))
        assert (">2</th>" in html) is there
        assert html.count("<td role=cell") == 2 * (1 + there)


def test_a_spark_is_drawn_from_nothing_to_the_highest(agent: app.Agent) -> None:
    for points, there in (((), 0), ((5.0,), 0), ((0.0, 5.0, 10.0), 1), ((0.0, 0.0), 1)):
        cell = kit.room.Cell("text", spark=points)
        html = page.render(shown(agent, section([cell, kit.room.Cell("b")])))
        checked(html)
        assert html.count("<svg class=spark") == there
        if points and max(points):
            assert ("points='0.0,19.0 50.0,10.0 100.0,1.0'" in html) is bool(there)


def test_a_spark_is_broken_where_nothing_is_known(agent: app.Agent) -> None:
    cell = kit.room.Cell("text", spark=(0.0, 0.5, None, 0.5, 0.5), spark_top=1.0)
    html = page.render(shown(agent, section([cell, kit.room.Cell("b")])))
    checked(html)
    assert "points='0.0,19.0 25.0,10.0'" in html
    assert "points='75.0,10.0 100.0,10.0'" in html
    cell = kit.room.Cell("text", spark=(0.5, None), spark_top=1.0)
    assert "<svg" not in page.render(shown(agent, section([cell, kit.room.Cell("b")])))


def test_digests_in_events_are_cut(agent: app.Agent) -> None:
    agent.state.findings.journal.note("changed", "image a", f"digest sha256:{'0' * 12}{'1' * 52}")
    assert f"digest sha256:{'0' * 12}…</p>" in page.render(overview.of(agent.state, 0.0))


@pytest.mark.parametrize(
    "text", ["is only partly stored", "a: is only partly stored", "a is only partly stored"]
)
def test_an_event_says_what_it_is_about_once(agent: app.Agent, text: str) -> None:
    agent.state.findings.journal.note("changed", "a", text)
    html = page.render(overview.of(agent.state, 0.0))
    assert "<b>a</b> is only partly stored</p>" in html
    assert kit.findings.without("a", "about it") == "about it"
    told = {"at": 0.0, "severity": "", "kind": "changed", "subject": "a", "text": text}
    line = status._event(told)[-1]
    assert line in (" a: is only partly stored", " a is only partly stored")


def test_findings_are_bounded_and_the_rest_is_counted(agent: app.Agent) -> None:
    html = page.render(shown(agent))
    assert html.count("<li class=finding>") == page.MOST_FINDINGS
    assert f"{150 - page.MOST_FINDINGS} more: <code>nodeagent status" in html


def test_findings_come_before_all_but_datasets_when_there_are_some(agent: app.Agent) -> None:
    parts = [section(CELLS, title=title) for title in ("Volumes", "Datasets", "Images")]
    for found, order in (
        (0, ["verdict", "part-datasets", "part-volumes", "part-images", "findings"]),
        (1, ["verdict", "part-datasets", "findings", "part-volumes", "part-images"]),
    ):
        ids = checked(page.render(shown(agent, *parts, found=found))).ids
        assert [each for each in ids if each in order] == order


def test_findings_are_folded_by_severity_and_those_to_act_on_are_open(agent: app.Agent) -> None:
    found = [
        dataclasses.replace(finding(number), severity=kit.findings.Severity(severity))
        for number, severity in enumerate(["info", "warning", "critical", "warning"])
    ]
    agent.state.findings.report("x", found)
    html = page.render(overview.of(agent.state, 0.0))
    checked(html)
    folds = re.findall(r"<details id=findings-(\w+)( open)?><summary[^>]*>(.*?)</summary>", html)
    assert folds == [
        ("critical", " open", "1 critical"), ("warning", " open", "2 warnings"),
        ("info", "", "1 info"),
    ]  # fmt: skip
    assert "<a href='#findings'>1 critical, 2 warnings, 1 info</a>" in html
    assert html.count("<li class=finding>") == 4


def test_long_texts_stand_below_their_row(agent: app.Agent) -> None:
    rows = [[kit.room.Cell("a"), kit.room.Cell(below=[kit.room.Cell("why")], wide=True)],
            [kit.room.Cell("b"), kit.room.Cell(wide=True)]]  # fmt: skip
    html = page.render(shown(agent, section(*rows)))
    checked(html)
    assert html.count("<tr role=row class=note>") == 1
    assert ">2</th>" not in html
    assert "<td role=cell colspan=1 data-head='2'><span class=small>why</span></td>" in html


def test_a_disk_is_drawn_to_scale_and_said_in_words(agent: app.Agent) -> None:
    given = ((f"mine {EVIL}", 2**30, "used"), ("free", 3 * 2**30, "free"), ("none left", 0, "left"))
    parts = [kit.room.Slice(*each) for each in given]
    html = page.render(shown(agent, dataclasses.replace(section(CELLS), disk=parts)))
    checked(html)
    assert re.findall(r"<rect class=(\w+) x=([\d.]+) width=([\d.]+) ", html) == [
        ("used", "0.00", "25.00"), ("free", "25.00", "75.00"),
    ]  # fmt: skip
    assert f"mine {SAFE}: 1.0 GiB</li>" in html
    assert "none left" not in html
    assert "<svg class=disk" not in page.render(shown(agent, section(CELLS)))


def test_many_rows_have_a_filter(agent: app.Agent) -> None:
    for number, there in ((page.MOST_UNFILTERED, False), (page.MOST_UNFILTERED + 1, True)):
        html = page.render(shown(agent, section(*[CELLS] * number, title="Datasets")))
        checked(html)
        assert ("<input type=search id=part-datasets-filter" in html) is there


RICH = (
    ("see 'nodeagent status -o json', then",
     ("see <code>nodeagent status -o json</code><button type=button class=copy "
      "aria-label='Copy: nodeagent status -o json'></button>, then")),
    ("more: nodeagent dataset list", "<code>nodeagent dataset list</code><button"),
    ("'a <b>' isn't one", "&#x27;a &lt;b&gt;&#x27; isn&#x27;t one"),
    ("'kubectl get cds <b>'", "<code>kubectl get cds &lt;b&gt;</code>"),
    ("'nodeagent volume allow-format X'", "<code>nodeagent volume allow-format X</code>"),
    ("(docs/audit.md#log-lines)", "(docs/audit.md, log lines)"),
    ("see store-unusable.", "see <a href='/runbook#store-unusable'>store-unusable</a>."),
    ("my-store-unusable-x", "my-store-unusable-x"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "html"), RICH)
def test_commands_can_be_copied_and_entries_are_linked(text: str, html: str) -> None:
    shown = page.rich(text)
    checked(shown)
    assert html in shown
    assert ("<button" in shown) is ("nodeagent status" in text or "list" in text or "cds" in text)


def test_every_link_of_the_runbook_leads_somewhere() -> None:
    entries = checked(page.runbook())
    targets = {f"#{each}" for each in entries.ids} | {f"/runbook#{each}" for each in entries.ids}
    others = {"/", "/runbook", "/metrics", "/readyz", "data:,"}
    assert set(entries.links) - targets - others == set()
    listed = entries.links[: entries.links.index("/runbook")]
    for each in page.runbook_entries():
        assert f"#{each.name}" in listed
    assert "docs/audit.md#" not in page.runbook()
    titles = re.findall(r"<h2>([^<]*)</h2>", page.runbook())
    assert titles[: len(titles) // 2] == titles[len(titles) // 2 :]
    assert len(titles) // 2 == len(set(titles)) > 4


def test_every_rule_of_a_log_line_has_an_anchor(agent: app.Agent) -> None:
    ids = checked(page.runbook()).ids
    known = [f"log-{each.id}" for each in patterns.built_in()]
    assert "log-hung-task" in known
    assert set(known) <= set(ids)
    own = "log-of-the-operator"
    agent.state.findings.report("x", [finding(1, own), finding(2, "log-hung-task")])
    html = page.render(overview.of(agent.state, 0.0))
    assert f"href='/runbook#{page.LOG_LINES}'>runbook: {own}<" in html
    assert "href='/runbook#log-hung-task'" in html


def test_finding_links_to_its_entry_of_the_runbook(agent: app.Agent) -> None:
    agent.state.findings.report("x", [finding(1, "store-unusable"), finding(2, "unknown-rule")])
    html = page.render(overview.of(agent.state, 0.0))
    assert "href='/runbook#store-unusable'" in html
    assert "#unknown-rule" not in html
    entries = checked(page.runbook())
    assert "store-unusable" in entries.ids
    assert {each.name for each in page.runbook_entries()} <= set(entries.ids)


def test_empty_parts_say_how_there_come_to_be_some(whole: app.Agent) -> None:
    html = page.render(overview.of(whole.state, 0.0))
    assert "No dataset yet. Name one in the settings" in html
    assert "No image yet. Name one in the settings" in html
    assert "No guarded device is attached." in html
    assert "Nothing has happened since the agent began." in html


async def test_page_runs_only_its_own_script_and_asks_nobody_else(whole: app.Agent) -> None:
    async with api.served(whole.state) as client:
        for path in ("/", "/runbook"):
            answer = await client.get(path)
            html, policy = await answer.text(), answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            for tag in ("style", "script"):
                for block in re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL):
                    digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
                    assert f"{tag}-src 'sha256-{digest}'" in policy
            made = checked(html)
            assert all(re.match(r"/|#|data:,$", link) for link in made.links), made.links
            assert not [t for t, given in made.tags if "style" in given or "onclick" in given]


async def test_live_part_is_the_pages_content_and_goes_on(
    whole: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(overview, "HELD_SECONDS", 0.0)
    made = server.metrics_application(whole.state, None, with_page=True)
    async with TestClient(TestServer(made)) as client:
        answer = await client.get("/live")
        assert answer.headers["Content-Type"] == "text/event-stream"
        first = json.loads((await answer.content.readuntil(b"\n\n"))[6:])
        assert "id=verdict" in first
        assert "Findings" in first
        checked(f"<main>{first}</main>")
        whole.state.findings.report("x", [finding(1)])
        while f"message {SAFE}" not in first:  # pytest's own timeout ends this
            block = await answer.content.readuntil(b"\n\n")
            first = json.loads(block[6:]) if block.startswith(b"data: ") else first
        answer.close()
    without = server.metrics_application(whole.state, None, with_page=False)
    async with TestClient(TestServer(without)) as client:
        for path in ("/", "/live", "/runbook", "/v1/status", "/v1/events"):
            assert (await client.get(path)).status == 404


async def test_live_pages_are_bounded(whole: app.Agent) -> None:
    made = server.metrics_application(whole.state, None, with_page=True)
    async with TestClient(TestServer(made)) as client:
        opened = [await client.get("/live") for _ in range(access.STREAMS_OF_CALLER)]
        assert {each.status for each in opened} == {200}
        assert (await client.get("/live")).status == 429
        assert (await client.get("/")).status == 200
        for each in opened:
            each.close()


def test_ago_is_coarse() -> None:
    assert [page.ago(s) for s in (0, 59, 60, 3599, 3600, 86399, 86400 * 3)] == [
        "less than a minute", "less than a minute", "1 min", "59 min", "1 h", "23 h", "3 d",
    ]  # fmt: skip
