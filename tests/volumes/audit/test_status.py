"""The audit through the real process: settings file, API, command line, metrics, alert rules."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ceph.protocol import ImageView
from nodeagent.api import own
from tests.testbed import blockdev, waiting
from tests.testbed.agent import Agent, ApiError
from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage
from tests.volumes.audit.world import DEVICE, INVENTORY, view
from volumes.audit import evaluate, status

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def agent(stage: Stage) -> Iterator[Agent]:
    """An agent that audits the stage, and guards nothing."""
    guard = {"mode": "off", "drivers": ["loop"], "pins": "/sys/fs/bpf/nodeagent-audit-test"}
    audit = {
        "settle": "300ms", "logs": {"sources": []},
        "names": [blockdev.NAMES],
    }  # fmt: skip
    made = Agent(
        stage.folder / "agent",
        {
            "kubelet": {"root_dir": str(stage.kubelet)},
            "volumes": {"guard": guard, "audit": audit},
        },
    )

    def scanned() -> Any:
        with contextlib.suppress(ApiError):
            return made.get("/v1/audit/devices")

    made.start()
    try:
        waiting.until(scanned, what="the first scan")
        yield made
    finally:
        made.stop()


def volume(agent: Agent, *words: str) -> str:
    """What a volume command that succeeds says."""
    done = agent.cli("volume", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _valid(schema: str, value: dict[str, Any]) -> None:
    """As much of the document as a client relies on: required fields, types and enumerations."""
    described = json.loads(own.OPENAPI.read_text())["components"]["schemas"][schema]
    for name in described["required"]:
        assert name in value, name
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    for name, field in described["properties"].items():
        if name in value and isinstance(field.get("type"), str):
            assert isinstance(value[name], kinds[field["type"]]), name
        if name in value and "enum" in field:
            assert value[name] in field["enum"], name


def test_operator_finds_and_frees_a_leak(stage: Stage, agent: Agent) -> None:
    device = stage.loop()
    target, handle = stage.staged(device)
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    pid = stage.holder("container", rootfs, "private", stage.folder)
    stages.run("umount", target)

    def leaks() -> list[dict[str, Any]]:
        found = agent.cli_json("volume", "findings", "--rule", "leaked-mount")
        return [each for each in found if each["device"] == device]

    (leak,) = waiting.until(leaks)
    _valid("AuditFinding", leak)
    assert (leak["rule"], leak["pid"]) == ("leaked-mount", pid)
    assert {"id", "severity", "evidence", "since", "advice"} <= leak.keys()

    text = volume(agent, "findings")
    assert "CRITICAL leaked-mount" in text and f"pid {pid}" in text
    devices = agent.cli_json("volume", "list")
    (listed,) = [each for each in devices if each["name"] == device]
    _valid("AuditDevice", listed)
    assert (listed["state"], listed["volume"]) == ("leaked", handle)
    assert re.search(rf"^{device} .*leaked", volume(agent, "list"), re.MULTILINE)
    assert f"pid {pid}" in volume(agent, "show", f"/dev/{device}")
    assert agent.cli_json("volume", "show", device)["elsewhere"][0]["propagation"] == ("private")
    audit = agent.cli_json("volume", "audit")
    _valid("Audit", audit)
    states = {each["rule"]: each["state"] for each in audit["rules"]}
    assert states["leaked-mount"] == "found"
    assert states["guard-not-enforcing"] == "found"  # its mode is off here
    assert states["mapped-elsewhere"] == "off"
    assert "RULE" in volume(agent, "audit", "--last")

    metrics = agent.get("/metrics")
    assert re.search(
        r'nodeagent_volume_findings\{rule="leaked-mount",severity="critical"\} [1-9]', metrics
    )
    general = agent.findings()
    assert leak["id"] in [each["id"] for each in general]  # through the one reporting port

    assert "dry-run: unmount" in volume(agent, "act", leak["id"])
    assert stages.active(device)
    assert "done: unmount" in volume(agent, "act", leak["id"], "--yes")
    waiting.until(lambda: not stages.active(device))
    waiting.until(lambda: not leaks())
    assert stage.is_alive(pid)


def test_bad_requests(agent: Agent) -> None:
    assert "no watched device has that name" in agent.cli("volume", "show", "nosuch").stderr
    assert "has no action for it" in agent.cli("volume", "act", "no/such").stderr


def test_metrics(stage: Stage, agent: Agent) -> None:
    for _ in range(3):
        stage.staged(stage.loop())
    waiting.until(lambda: "nodeagent_volume_rule_state" in agent.get("/metrics"))
    metrics = agent.get("/metrics")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True, check=False
    )
    ours = [line for line in checked.stderr.splitlines() if "nodeagent_volume_" in line]
    assert ours == []
    series = [line for line in metrics.splitlines() if line.startswith("nodeagent_volume_")]
    states = [line for line in series if line.startswith("nodeagent_volume_rule_state{")]
    assert len(states) == len(evaluate.RULES)
    assert len(series) < 100
    assert not any("loop" in line and "driver=" not in line for line in series)


RULES = Path(__file__).parents[3] / "deploy/alerts"


def test_alert_rules_use_metrics_that_exist(agent: Agent) -> None:
    waiting.until(lambda: "nodeagent_volume_rule_state" in agent.get("/metrics"))
    metrics = agent.get("/metrics")
    text = "".join(each.read_text() for each in RULES.glob("*.rules.yaml"))
    for name in set(re.findall(r"nodeagent_volumes?_\w+", text)):
        assert f"# TYPE {name} " in metrics or f"# TYPE {name.removesuffix('_total')}" in metrics


def test_detail_uses_the_view_of_the_devices_own_cluster() -> None:
    """Two clusters know an image of that name; DEVICE says whose it is (fsid f1)."""
    own = view(images=(ImageView("rbd", "", "csi-vol-1", features=1),))
    other = view(name="c2", fsid="f2", images=(ImageView("rbd", "", "csi-vol-1", features=2),))
    audit: Any = SimpleNamespace(findings=[], cluster_views=lambda: {"c2": other, "c1": own})
    assert status.detail(audit, INVENTORY, DEVICE)["cluster"]["features"] == 1
    audit.cluster_views = lambda: {"c2": other, "c1": "no answer within 15s"}
    assert status.detail(audit, INVENTORY, DEVICE)["cluster"] is None
