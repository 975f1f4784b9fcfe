"""Is the node well: the judgement, the headline, and that all who show it agree."""

import dataclasses
import itertools
import json
from pathlib import Path

import msgspec
import pytest

from kit import terminal
from kit.findings import Finding, Severity
from nodeagent import app
from nodeagent.commands import status
from nodeagent.shown import overview
from nodeagent.shown.overview import Part, Verdict
from nodeagent.state import State
from tests.nodeagent import served as api
from tests.testbed import census

WELL = Part("cache", True, brief="datasets 1/1")
SICK = Part("cache", False, reasons=("no store",))
STARTING = Part("cache", False, starting=True, reasons=("it is starting",))


def finding(severity: Severity, name: str = "a") -> Finding:
    return Finding(name, "rule", severity, f"disk {name}", f"{name} is gone", "look")


INFO, WARNING, CRITICAL = (finding(each, str(each)) for each in Severity)


@pytest.mark.parametrize(
    ("parts", "findings", "trouble", "verdict"),
    [
        ([WELL], [], [], Verdict.WELL),
        ([WELL], [INFO], [], Verdict.WELL),
        ([WELL], [WARNING], [], Verdict.ATTENTION),
        ([WELL], [], ["settings"], Verdict.ATTENTION),
        ([STARTING], [], [], Verdict.ATTENTION),
        ([], [], [], Verdict.ATTENTION),
        ([SICK], [], [], Verdict.CRITICAL),
        ([WELL], [WARNING, CRITICAL], [], Verdict.CRITICAL),
        ([WELL, SICK], [], [], Verdict.CRITICAL),
    ],
)
def test_judgement(
    parts: list[Part], findings: list[Finding], trouble: list[str], verdict: Verdict
) -> None:
    assert overview.judge(parts, findings, trouble) is verdict


@pytest.mark.parametrize(
    ("found", "trouble"),
    [
        (("needs-restart", "admin", "admin: the settings file has changed it"),
         "setting admin has changed and needs a restart"),
        (("settings-unusable", "settings", "the settings file cannot be used"),
         "the settings file's latest content is not in force: f:1: cahce"),
        (("tokens", "tokens", "tokens file /t: is empty"), "tokens: tokens file /t: is empty"),
    ],
)  # fmt: skip
def test_headline_counts_trouble_that_a_finding_tells_once(
    found: tuple[str, str, str], trouble: str
) -> None:
    rule, subject, message = found
    told = [Finding(rule, rule, Severity.WARNING, subject, message, "look")]
    said = overview.headline(Verdict.ATTENTION, [WELL], told, [trouble])
    assert "more" not in said
    both = overview.headline(Verdict.ATTENTION, [WELL], [*told, WARNING], [trouble, "another"])
    assert both.endswith(" And 2 more.")


def test_headline_is_one_sentence_that_begins_with_the_worst() -> None:
    def said(parts: list[Part], findings: list[Finding], trouble: list[str]) -> str:
        verdict = overview.judge(parts, findings, trouble)
        return overview.headline(verdict, parts, findings, trouble)

    assert said([WELL], [], []) == "This node is well: datasets 1/1."
    assert said([WELL], [WARNING, CRITICAL], []) == (
        "This node needs a person now: disk critical: critical is gone. And 1 more."
    )
    assert said([SICK], [WARNING], []) == (
        "This node needs a person now: cache does not work fully: no store. And 1 more."
    )
    assert said([WELL], [], ["setting x needs a restart"]) == (
        "This node works, but setting x needs a restart."
    )
    assert "its settings have no section" in said([], [], [])


NO_STORE = Part("cache", False, reasons=("disk gone (jobs read from the sources)",))
GONE = Finding("gone", "store-unusable", Severity.CRITICAL, "/store", "disk gone", "look")
CHANGED = Finding(
    "r", "needs-restart", Severity.WARNING, "cache.store", "cache.store: it has changed", "restart"
)
ONCE: tuple[tuple[list[Part], list[Finding], list[str], str], ...] = (
    ([NO_STORE], [GONE], [], "This node needs a person now: /store: disk gone."),
    ([NO_STORE], [CHANGED, dataclasses.replace(GONE, severity=Severity.WARNING)], [],
     ("This node needs a person now: cache does not work fully: disk gone "
      "(jobs read from the sources). And 1 more.")),
    ([WELL], [CHANGED], ["setting cache.store has changed and needs a restart"],
     "This node works, but cache.store: it has changed."),
    ([WELL], [WARNING], ["listener: warning is gone", "setting y needs a restart"],
     "This node works, but disk warning: warning is gone. And 1 more."),
)  # fmt: skip


@pytest.mark.parametrize(("parts", "findings", "trouble", "headline"), ONCE)
def test_headline_counts_each_thing_once(
    parts: list[Part], findings: list[Finding], trouble: list[str], headline: str
) -> None:
    verdict = overview.judge(parts, findings, trouble)
    assert overview.headline(verdict, parts, findings, trouble) == headline


CLIPPED = (
    ("short", "short"),
    ("it is gone; " + "a " * 20, "it is gone"),
    ("no monitor answers (10.0.0.1; 10.0.0.2; 10.0.0.3)", "no monitor answers"),
    ("words " * 10, "words words words words words …"),
    ("t" * 50, "t" * 34 + " …"),
)


@pytest.mark.parametrize(("text", "said"), CLIPPED)
def test_long_texts_end_with_a_clause(text: str, said: str) -> None:
    assert overview.clipped(text, 34) == said


def test_headline_exists_for_every_state() -> None:
    """Whatever is wrong, there is a sentence, and it is not that all is well."""
    choices = itertools.product(
        ([], [WELL], [SICK], [STARTING], [WELL, SICK, STARTING]),
        ([], [INFO], [WARNING], [CRITICAL], [INFO, WARNING, CRITICAL]),
        ([], ["t" * 2000]),
    )
    for parts, findings, trouble in choices:
        verdict = overview.judge(parts, findings, trouble)
        said = overview.headline(verdict, parts, findings, trouble)
        assert said.endswith((".", "…"))
        assert "…." not in said
        assert len(said) < 2 * overview.LONGEST_HEADLINE + 40
        assert ("is well" in said) is (verdict is Verdict.WELL)


async def test_api_shows_the_whole_node(
    whole: app.Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.state.findings.report("x", [CRITICAL])
    async with api.served(whole.state) as client:
        answer = await client.get("/v1/status")
        shown = await answer.json()
    assert shown["verdict"] == "critical"
    assert "critical is gone" in shown["headline"]
    assert [each["rule"] for each in shown["findings"]] == ["rule"]
    assert [each["name"] for each in shown["components"]] == [
        each.room.name for each in whole.state.running
    ]
    reported = {each.room.report.field for each in whole.state.running if each.room.report}
    assert set(shown["reports"]) == reported
    assert {each["subject"] for each in shown["events"]} == {"disk critical"}
    for wide in (False, True):
        for line in status._lines(shown, wide=wide):
            terminal.say(line)
        lines = capsys.readouterr().out.splitlines()
        assert "critical is gone" in lines[0]
        assert sum("to do: look" in line for line in lines) == 1


def test_a_crowd_costs_one_look(agent: app.Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    held = overview.HeldOverview(agent.state)
    looks: list[float] = []
    made = overview.of

    def of(state: State, now: float) -> overview.Overview:
        looks.append(now)
        return made(state, now)

    monkeypatch.setattr(overview, "of", of)
    monkeypatch.setattr(overview, "HELD_SECONDS", 3600.0)
    answers = {held.answer() for _ in range(1000)}
    assert len(looks) == len(answers) == 1
    monkeypatch.setattr(overview, "HELD_SECONDS", 0.0)
    agent.state.findings.report("x", [WARNING])
    assert json.loads(held.answer())["verdict"] in ("attention", "critical")


def test_sections_are_told_with_every_field(tmp_path: Path) -> None:
    now = overview.of(census.agent(tmp_path).state, 0.0)
    assert len(now.sections) == 3
    whole = [dataclasses.asdict(each) for each in now.sections]
    assert json.dumps(msgspec.to_builtins(now.sections)) == json.dumps(whole)


def test_a_room_that_cannot_be_shown_hides_nothing_else(whole: app.Agent) -> None:
    sick = whole.state.running[0]
    sick.component = api.Fake()  # has nothing of what the room's page and report ask for
    now = overview.of(whole.state, 0.0)
    (shown,) = [each for each in now.sections if each.title == "Volumes"]
    assert "cannot be shown now" in shown.summary
    assert len(now.sections) == len(whole.state.running)
