"""The runbook has every finding and every alert; alert rules fire, clear and name their entry."""

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import kit.findings
from nodeagent import app, rooms
from nodeagent.shown import page
from tests.nodeagent import served as api
from tests.testbed import scripts
from volumes.audit import evaluate

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "alerts"
FILES = sorted(file.name.removesuffix(".rules.yaml") for file in ALERTS.glob("*.rules.yaml"))
_RULE = re.compile(r"[a-z]+(-[a-z]+)*")


def rules_in(tree: ast.AST) -> Iterator[str]:
    """Rules that code gives to findings: arguments of what makes one, or the variable ``rule``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name.lower().lstrip("_") in ("finding", "find"):
                given = [*node.args[:3], *(k.value for k in node.keywords if k.arg == "rule")]
                yield from _texts(given)
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            if isinstance(first, ast.Name) and first.id == "rule":
                yield from _texts(ast.walk(node.value))


def _texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for each in nodes:
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


@functools.cache
def parsed(folder: str) -> list[ast.Module]:
    return [ast.parse(file.read_text()) for file in (ROOT / folder).rglob("*.py")]


@functools.cache
def every_rule() -> set[str]:
    found = {rule.name for rule in evaluate.RULES} | {evaluate.BLIND}
    for folder in ("kit", "nodeagent", *(room.name for room in rooms.ROOMS)):
        for tree in parsed(folder):
            prefix = "preheat-" if folder == "preheat" else ""
            for rule in rules_in(tree):
                if _RULE.fullmatch(rule) and ("-" in rule or prefix):
                    found.add(prefix + rule)
    return found


def alerts() -> dict[str, dict[str, Any]]:
    return {
        rule["alert"]: rule
        for name in FILES
        for group in yaml.safe_load((ALERTS / f"{name}.rules.yaml").read_text())["groups"]
        for rule in group["rules"]
    }


def test_scan_finds_the_rules_of_every_room() -> None:
    found = every_rule()
    assert {"component-degraded", "cluster-unreachable", "unusable-file", "dataset-partial",
            "store-orphan", "store-damage", "preheat-runtime", "preheat-pull-failed",
            "format-would-be-denied", "format-unchecked", "leaked-mount"} <= found  # fmt: skip


def test_no_finding_and_no_alert_is_missing() -> None:
    wanted = every_rule() | alerts().keys()
    assert {name for name in wanted if page.runbook_entry(name) is None} == set()


def test_no_entry_is_of_something_that_is_not_there() -> None:
    there = every_rule() | alerts().keys() | {page.LOG_LINES}
    assert {each.name for each in page.runbook_entries()} - there == set()


def test_entries_are_whole_and_unique() -> None:
    names = [each.name for each in page.runbook_entries()]
    assert len(names) == len(set(names))
    for each in page.runbook_entries():
        texts = (each.means, *filter(None, (each.look, each.do)))
        assert all(text.endswith((".", ")")) for text in texts), each
    assert page.runbook_entry("log-anything") is page.runbook_entry(page.LOG_LINES)
    assert page.runbook_entry("no-such-rule") is None


def test_document_is_current() -> None:
    made = scripts.load("runbook_doc")
    document = (ROOT / "docs" / "runbook.md").read_text()
    assert document == made.document(), "run scripts/runbook_doc.py"
    for each in page.runbook_entries():
        assert f"\n### {each.name}\n" in document


@pytest.mark.parametrize("name", FILES)
def test_alerts_fire_and_clear(name: str) -> None:
    tests = [f"{name}.test.yaml", *(each.name for each in ALERTS.glob(f"{name}-days.test.yaml"))]
    for words in (("check", "rules", f"{name}.rules.yaml"), ("test", "rules", *tests)):
        done = subprocess.run(
            ["promtool", *words], capture_output=True, text=True, cwd=ALERTS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (group,) = yaml.safe_load((ALERTS / f"{name}.rules.yaml").read_text())["groups"]
    tested = [
        test for file in tests for test in yaml.safe_load((ALERTS / file).read_text())["tests"]
    ]
    for rule in group["rules"]:
        cases = [
            bool(case["exp_alerts"])
            for test in tested
            for case in test["alert_rule_test"]
            if case["alertname"] == rule["alert"]
        ]
        assert True in cases, f"{rule['alert']} is never seen to fire"
        assert False in cases, f"{rule['alert']} is never seen to be silent"


def test_each_alert_links_its_own_entry() -> None:
    """Whatever page a site shows the runbook on: the chart puts its address before the ``#``."""
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        assert "runbook" not in rule["annotations"]


NODES = 200
# What an agent says of a dataset with a wrong monitor, and of one that is served, on a node that
# chose dry-run.
_OF_ONE_NODE = """
nodeagent_component_ready{component="cache"} 1
nodeagent_component_ready{component="volumes"} 1
nodeagent_settings_in_force 1
nodeagent_volumes_guard_in_force 1
nodeagent_volumes_guard_mode{mode="dry-run"} 1
nodeagent_volumes_guard_findings{rule="guard-attached-late"} 1
nodeagent_volume_findings{rule="guard-not-enforcing",severity="info"} 1
nodeagent_findings{origin="cache",rule="dataset-not-served",severity="critical"} 1
nodeagent_cache_served_by{dataset="typo",stage="none"} 1
nodeagent_cache_state{dataset="typo",state="waiting"} 1
nodeagent_cache_source_reachable{dataset="typo"} 0
nodeagent_cache_served_by{dataset="good",stage="store"} 1
nodeagent_cache_state{dataset="good",state="complete"} 1
nodeagent_cache_source_reachable{dataset="good"} 1
nodeagent_cache_store_health{state="normal"} 1
"""


def _series(line: str, number: int) -> dict[str, str]:
    name, value = line.rsplit(" ", 1)
    bare, _, labels = name.rstrip("}").partition("{")
    where = f'instance="10.0.0.{number}:9470",node="gpu-{number}"'
    return {
        "series": f"{bare}{{{','.join(filter(None, (labels, where)))}}}",
        "values": f"{value}+0x90",
    }


def test_one_broken_dataset_on_all_nodes_is_one_page(tmp_path: Path) -> None:
    """One critical alert; the warning beside it is what inhibit.yaml silences."""
    fires = (("DatasetNotServed", "critical"), ("DatasetSourceSilent", "warning"))
    labels = 'alertname="{}",severity="{}",alertstate="firing",dataset="typo"'
    lines = _OF_ONE_NODE.strip().splitlines()
    asked = {
        "expr": 'ALERTS{alertstate="firing"}',
        "eval_time": "90m",
        "exp_samples": [
            {"labels": f"ALERTS{{{labels.format(*each)}}}", "value": 1} for each in fires
        ],
    }
    test = {
        "interval": "1m",
        "input_series": [_series(line, number) for number in range(NODES) for line in lines],
        "promql_expr_test": [asked],
    }
    rules = [str(ALERTS / f"{name}.rules.yaml") for name in FILES]
    file = tmp_path / "fleet.test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": [test]})
    )
    words = ("promtool", "test", "rules", str(file))
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_alerts_of_agent_and_cache_ask_for_series_that_exist(whole: app.Agent) -> None:
    whole.state.findings.report(
        "x", [kit.findings.Finding("a", "b", kit.findings.Severity.CRITICAL, "c", "d", "e")]
    )
    async with api.served(whole.state) as client:
        shown = await (await client.get("/metrics")).text()
    there = set(re.findall(r"^# TYPE (\w+) ", shown, re.MULTILINE))
    for name in ("agent", "cache"):
        text = (ALERTS / f"{name}.rules.yaml").read_text()
        asked = set(re.findall(r"nodeagent_\w+", text))
        assert asked
        assert asked - there == set()
