"""The audit through the real process: settings file, API, command line, metrics, alert rules."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from nodeagent.api import openapi
from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage
from tests.volumes.audit.world import DEVICE, INVENTORY, view
from volumes.audit import faces
from volumes.inventory.cluster import ImageView

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

NODEAGENT = Path(sys.executable).with_name("nodeagent")


class Agent:
    def __init__(self, stage: Stage) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.config = stage.folder / "nodeagent.yaml"
        settings = {
            "admin": {"listen": self.address},
            "state_dir": str(stage.folder / "state"),
            "volumes": {
                "guard": {
                    "mode": "off",
                    "drivers": ["loop"],
                    "pins": "/sys/fs/bpf/nodeagent-audit-test",
                },
                "audit": {
                    "kubelet": str(stage.kubelet),
                    "settle": "300ms",
                    "logs": {"sources": []},
                },
            },
        }
        self.config.write_text(yaml.safe_dump(settings))
        self.log = (stage.folder / "agent.log").open("w")
        self.process = subprocess.Popen(
            [str(NODEAGENT), "--config", str(self.config), "run"],
            stderr=self.log,
            stdout=self.log,
        )

    def run(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [str(NODEAGENT), "--config", str(self.config), "volume", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self.log.close()


@pytest.fixture
def agent(stage: Stage) -> Iterator[Agent]:
    agent = Agent(stage)
    try:
        _wait(lambda: agent.get("/v1/audit/devices"))
        yield agent
    finally:
        agent.close()


def _wait(condition: Any) -> Any:
    end = time.monotonic() + stages.PATIENCE
    while True:
        try:
            value = condition()
            if value:
                return value
        except OSError:
            pass
        assert time.monotonic() < end, "did not come"
        time.sleep(0.1)


def _valid(schema: str, value: dict[str, Any]) -> None:
    """As much of the document as a client relies on: required fields, types and enumerations."""
    described = openapi.document()["components"]["schemas"][schema]
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


def test_an_operator_finds_and_frees_a_leak_with_the_command_line(
    stage: Stage, agent: Agent
) -> None:
    device = stage.loop()
    target, handle = stage.staged(device)
    rootfs = stage.folder / "exporter"
    rootfs.mkdir()
    pid = stage.holder("container", rootfs, "private", stage.folder)
    stages.run("umount", target)

    def leaks() -> list[dict[str, Any]]:
        found = json.loads(agent.run("findings", "--rule", "leaked-mount", "--json"))
        return [each for each in found if each["device"] == device]

    (leak,) = _wait(leaks)
    _valid("AuditFinding", leak)
    assert (leak["rule"], leak["pid"]) == ("leaked-mount", pid)
    assert {"id", "severity", "evidence", "since", "advice"} <= leak.keys()

    text = agent.run("findings")
    assert "CRITICAL leaked-mount" in text and f"pid {pid}" in text
    devices = json.loads(agent.run("list", "--json"))
    (listed,) = [each for each in devices if each["name"] == device]
    _valid("AuditDevice", listed)
    assert (listed["state"], listed["volume"]) == ("leaked", handle)
    assert re.search(rf"^{device} .*leaked", agent.run("list"), re.MULTILINE)
    assert f"pid {pid}" in agent.run("show", f"/dev/{device}")
    assert json.loads(agent.run("show", device, "--json"))["elsewhere"][0]["propagation"] == (
        "private"
    )
    audit = json.loads(agent.run("audit", "--json"))
    _valid("Audit", audit)
    states = {each["rule"]: each["state"] for each in audit["rules"]}
    assert states["leaked-mount"] == "found"
    assert states["guard-not-enforcing"] == "found"  # its mode is off here, and that is told
    assert states["mapped-elsewhere"] == "off"
    assert "RULE" in agent.run("audit", "--last")

    metrics = agent.get("/metrics")
    assert re.search(
        r'nodeagent_volume_findings\{rule="leaked-mount",severity="critical"\} [1-9]', metrics
    )
    general = json.loads(agent.get("/v1/findings"))["findings"]
    assert leak["id"] in [each["id"] for each in general]  # through the one reporting port

    assert "dry-run: unmount" in agent.run("act", leak["id"])
    assert stages.active(device)
    assert "done: unmount" in agent.run("act", leak["id"], "--yes")
    _wait(lambda: not stages.active(device))
    _wait(lambda: not leaks())
    assert stage.is_alive(pid)


def test_bad_requests_are_answered_with_what_to_do(agent: Agent) -> None:
    assert "no guarded device has that name" in agent.run("show", "nosuch", check=False)
    assert "nothing can be done" in agent.run("act", "no/such", check=False)


def test_metrics_are_well_formed_and_bounded(stage: Stage, agent: Agent) -> None:
    for _ in range(3):
        stage.staged(stage.loop())
    _wait(lambda: "nodeagent_volume_rule_state" in agent.get("/metrics"))
    metrics = agent.get("/metrics")
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics, capture_output=True, text=True, check=False
    )
    ours = [line for line in checked.stderr.splitlines() if "nodeagent_volume_" in line]
    assert ours == []
    series = [line for line in metrics.splitlines() if line.startswith("nodeagent_volume_")]
    assert 50 < len(series) < 300
    assert not any("loop" in line and "driver=" not in line for line in series)


RULES = Path(__file__).parents[3] / "deploy/alerts"


def test_alert_rules_are_right_by_promtool() -> None:
    rules = RULES / "volume-audit.rules.yaml"
    assert rules.exists()
    for command in (
        ("promtool", "check", "rules", str(rules)),
        ("promtool", "test", "rules", str(RULES / "volume-audit.test.yaml")),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=RULES)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alert_rules_use_metrics_that_exist(agent: Agent) -> None:
    _wait(lambda: "nodeagent_volume_rule_state" in agent.get("/metrics"))
    metrics = agent.get("/metrics")
    text = (RULES / "volume-audit.rules.yaml").read_text()
    for name in set(re.findall(r"nodeagent_volume_\w+", text)):
        assert f"# TYPE {name} " in metrics or f"# TYPE {name.removesuffix('_total')}" in metrics


def test_a_device_is_shown_with_the_image_of_its_own_cluster() -> None:
    """Two clusters know an image of that name; DEVICE says whose it is (fsid f1)."""
    own = view(images=(ImageView("rbd", "", "csi-vol-1", features=1),))
    other = view(name="c2", fsid="f2", images=(ImageView("rbd", "", "csi-vol-1", features=2),))
    audit: Any = SimpleNamespace(findings=[], cluster_views=lambda: {"c2": other, "c1": own})
    assert faces.detail(audit, INVENTORY, DEVICE)["cluster"]["features"] == 1
    audit.cluster_views = lambda: {"c2": other, "c1": "no answer within 15s"}
    assert faces.detail(audit, INVENTORY, DEVICE)["cluster"] is None
