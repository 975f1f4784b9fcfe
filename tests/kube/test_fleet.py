"""kubectl-nodeagent on a real API server: 1,000 nodes, a login that is a program, a terminal.

How fast it is depends on the machine, so the seconds are printed and not judged.
"""

import base64
import concurrent.futures
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

import kit.units
from tests.testbed import control_plane, kubernetes, waiting

pytestmark = pytest.mark.real

NODES = 1000
LABELS = {"test": "fleet"}
PROGRAM = Path(sys.executable).parent / "kubectl-nodeagent"
GROUP = ("nodeagent.io", "v1alpha1")
FIRST = "gpu-0000.rack-a.internal"


def status_of(number: int) -> dict[str, Any]:
    """Of every node another one: 1 silent, 2 critical, 10 with a warning; coco is whole on all but
    one that fills."""
    now = time.time()
    critical, warning = number in (10, 20), 100 <= number < 110
    findings = []
    if critical or warning:
        findings = [
            {
                "rule": "leaked-mount" if critical else "dataset-partial",
                "severity": "critical" if critical else "warning",
                "subject": "rbd4", "message": "held by a pod " + "x" * 200,
            }
        ]  # fmt: skip
    percent = 40 if number == 500 else 100
    datasets = [
        {
            "name": name, "state": "complete" if share == 100 else "filling", "percent": share,
            "bytes": 2**40, "doneBytes": 2**30, "servedBy": "store",
            "scrubbed": kit.units.rfc3339(now - (27 if number == 42 else 3) * 86400),
        }
        for name, share in (("coco", percent), ("laion-5b", 100), ("imagenet", 100))
    ]  # fmt: skip
    images = [{"ref": "registry.example/train:1", "state": "ready", "percent": 100, "pinned": True}]
    return {
        "written": kit.units.rfc3339(now - (7200 if number == 999 else 30)),
        "findings": findings,
        "findingCounts": {"critical": int(critical), "warning": int(warning)},
        "versions": {"agent": "0.1.0", "kernel": "6.8.0-45-generic"},
        "guard": {"mode": "enforce", "inForce": True, "devices": 4},
        "datasets": datasets, "images": images,
        "objects": [{"kind": "CachedDataset", "name": "coco", "message": "m" * 300}] * 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def login(run_folder: Path, plane: control_plane.ControlPlane) -> Path:
    """A kubeconfig whose user is a program that gives the admin's certificate."""
    folder = run_folder / "fleet"
    folder.mkdir()
    pki = plane.pki
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
        "status": {
            "clientCertificateData": (pki / "admin.crt").read_text(),
            "clientKeyData": (pki / "admin.key").read_text(),
        },
    }  # fmt: skip
    (folder / "credential.json").write_text(json.dumps(credential))
    program = folder / "login"
    program.write_text(f"#!/bin/sh\nexec cat {folder}/credential.json\n")
    program.chmod(0o755)
    return kubeconfig(folder, plane, {"exec": {
        "apiVersion": credential["apiVersion"], "command": str(program),
        "interactiveMode": "IfAvailable",
    }})  # fmt: skip


def kubeconfig(folder: Path, plane: control_plane.ControlPlane, user: dict[str, Any]) -> Path:
    authority = base64.b64encode((plane.pki / "ca.crt").read_bytes()).decode()
    made = {
        "apiVersion": "v1", "kind": "Config", "current-context": "prod",
        "contexts": [{"name": "prod", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {
            "server": f"https://127.0.0.1:{plane.api_port}",
            "certificate-authority-data": authority,
        }}],
        "users": [{"name": "u", "user": user}],
    }  # fmt: skip
    file = folder / "kubeconfig"
    file.write_text(json.dumps(made))
    return file


@pytest.fixture(scope="module")
def many(plane: control_plane.ControlPlane) -> Iterator[None]:
    """NODES NodeStorage objects; gone afterwards, because agents of other tests roll up all."""
    settings = client.Configuration()
    config.load_kube_config(str(plane.admin.kubeconfig), client_configuration=settings)
    settings.connection_pool_maxsize = 16
    api = client.CustomObjectsApi(client.ApiClient(settings))

    def make(number: int) -> None:
        name = f"gpu-{number:04d}.rack-a.internal"
        body = {
            "apiVersion": "/".join(GROUP), "kind": "NodeStorage",
            "metadata": {"name": name, "labels": LABELS},
        }  # fmt: skip
        api.create_cluster_custom_object(*GROUP, "nodestorages", body)
        api.patch_cluster_custom_object_status(
            *GROUP, "nodestorages", name, {"status": status_of(number)},
            _content_type="application/merge-patch+json",
        )  # fmt: skip

    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(make, range(NODES)))
        yield
    finally:
        api.delete_collection_cluster_custom_object(
            *GROUP, "nodestorages", label_selector="test=fleet"
        )
        api.api_client.close()


def run(login: Path, *words: str, code: int = 0) -> str:
    """What the command says; of a failure what it says on standard error."""
    done = subprocess.run(
        [PROGRAM, "--kubeconfig", str(login), *words],
        capture_output=True, text=True, timeout=waiting.limit(60),
    )  # fmt: skip
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout if code in (0, 12, 13) else done.stderr


def on_terminal(login: Path, columns: int, *words: str) -> list[str]:
    """The lines that it prints on a terminal so wide."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    said = b""
    with subprocess.Popen(
        [PROGRAM, "--kubeconfig", str(login), *words], stdin=its, stdout=its, stderr=its,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": ""},
    ):  # fmt: skip
        os.close(its)
        try:
            while part := os.read(mine, 65536):
                said += part
        except OSError:
            pass  # its end of the terminal is closed
        finally:
            os.close(mine)
    return said.decode().replace("\r", "").splitlines()


def test_kubectl_finds_the_plugin_and_shows_1000_nodes_in_pages(
    login: Path, many: None, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "KUBECONFIG": str(login)}
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        done = subprocess.run(
            [kubernetes.BIN / "kubectl", "nodeagent", "status", "-o", "json"],
            env=env, capture_output=True, text=True, timeout=waiting.limit(60),
        )  # fmt: skip
        seconds.append(time.monotonic() - began)
        assert done.returncode == 13, done.stderr
    with capsys.disabled():
        print(
            f"\nkubectl nodeagent status, {NODES} nodes: {min(seconds):.2f} to {max(seconds):.2f} s"
        )
    made = json.loads(done.stdout)
    assert made["nodes"] == {"all": 1000, "critical": 2, "silent": 1, "warning": 10, "well": 987}
    assert made["findings"] == {"critical": 2, "warning": 10, "info": 0}
    assert [(each["rule"], each["nodes"]) for each in made["rules"]] == [
        ("leaked-mount", 2), ("dataset-partial", 10),
    ]  # fmt: skip
    sums = {each["name"]: (each["whole"], each["wanted"]) for each in made["datasets"]}
    assert sums == {"coco": (998, 1000), "laion-5b": (999, 1000), "imagenet": (999, 1000)}
    assert made["oldest_scrub"]["node"] == "gpu-0042.rack-a.internal"
    assert made["guard"] == {"enforce": 1000}
    assert made["images"][0]["pinned"] == 1000


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("words", [("status",), ("nodes",), ("datasets",), ("images",)])
def test_tables_fit_the_terminal(
    login: Path, many: None, columns: int, words: tuple[str, ...]
) -> None:
    lines = on_terminal(login, columns, *words)
    assert max(map(len, lines)) <= columns, "\n".join(lines)
    text = "\n".join(lines)
    if words == ("status",):
        assert lines[0].startswith("NEEDS A PERSON NOW  critical findings on 2 nodes")
        assert "NODES     1000: 2 critical, 1 silent, 10 warning, 987 well" in text
        assert "SCRUB     oldest 27d ago: dataset coco on gpu-0042.rack-a.internal" in text
    if words == ("nodes",):
        assert len(lines) == NODES + 1
        assert lines[1].split()[:2] == ["gpu-0010.rack-a.internal", "critical"]
        assert lines[3].split()[:2] == ["gpu-0999.rack-a.internal", "silent"]
        assert lines[-1].split()[1] == "well"


def test_wide_and_json_list_every_node(login: Path, many: None) -> None:
    wide = run(login, "nodes", "-o", "wide").splitlines()
    assert "6.8.0-45-generic" in wide[1]
    assert "x" * 200 in wide[1]
    rows = json.loads(run(login, "nodes", "-o", "json"))
    assert len(rows) == NODES
    assert rows[0]["wellness"] == "critical"


def test_a_selector_takes_the_nodes_with_these_labels(
    login: Path, many: None, plane: control_plane.ControlPlane
) -> None:
    plane.node(FIRST, pool="a100")
    try:
        rows = json.loads(run(login, "nodes", "-o", "json", "-l", "pool=a100"))
        assert [row["name"] for row in rows] == [FIRST]
        assert "no Node has these labels" in run(login, "status", "-l", "pool=h100", code=7)
    finally:
        plane.kubectl("delete", "node", FIRST)


def test_a_name_that_is_not_there_gets_the_one_that_was_meant(login: Path, many: None) -> None:
    wrong = FIRST.replace("rack-a", "rack-b")
    for words in (("exec", wrong, "--", "status"), ("bundle", wrong), ("events", wrong)):
        said = run(login, *words, code=7)
        assert f"node {wrong}: " in said
        assert FIRST in said
        assert "did you mean" in said
    said = run(login, "exec", FIRST, "--", "status", code=7)
    assert "no pod of a DaemonSet with app.kubernetes.io/name=nodeagent runs there" in said
    said = run(login, "warm", "cocoo", code=7)
    assert "dataset cocoo: no CachedDataset is named so" in said
    said = run(login, "warm", "coco", code=8)
    assert "1000 nodes have it of their settings file" in said


LIKE_AGENTS = {"app.kubernetes.io/name": "nodeagent"}
LIKE_AN_AGENT = {
    "nodeName": FIRST, "automountServiceAccountToken": False,
    "containers": [{"name": "nodeagent", "image": "nodeagent:test"}],
}  # fmt: skip


def _daemon_set(plane: control_plane.ControlPlane, name: str, namespace: str) -> None:
    """With one pod on a node; it starts none by itself."""
    nowhere = {**LIKE_AN_AGENT, "nodeName": None, "nodeSelector": {"test": "nowhere"}}
    template = {"metadata": {"labels": LIKE_AGENTS}, "spec": nowhere}
    plane.apply(
        {
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"selector": {"matchLabels": LIKE_AGENTS}, "template": template},
        }
    )  # fmt: skip
    made = plane.get("daemonset", name, "-n", namespace)
    owner = {
        "apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "controller": True,
        "uid": made["metadata"]["uid"],
    }  # fmt: skip
    _pod(plane, name, namespace, owner)


def _pod(plane: control_plane.ControlPlane, name: str, namespace: str, *owners: Any) -> None:
    plane.apply(
        {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": namespace, "labels": LIKE_AGENTS,
                "ownerReferences": list(owners),
            },
            "spec": LIKE_AN_AGENT,
        }
    )  # fmt: skip


def test_only_a_daemon_sets_pod_is_an_agents(
    login: Path, many: None, plane: control_plane.ControlPlane
) -> None:
    ours, others = control_plane.NAMESPACE, "default"
    try:
        _pod(plane, "stranger", others)
        assert "no pod of a DaemonSet" in run(login, "bundle", FIRST, code=7)
        _daemon_set(plane, "agent-x", ours)
        assert f"its pod {ours}/agent-x is Pending" in run(login, "bundle", FIRST, code=8)
        _daemon_set(plane, "stranger-2", others)
        for words in (("bundle", FIRST), ("exec", FIRST, "--", "status")):
            said = run(login, *words, code=8)
            assert f"in several namespaces: {', '.join(sorted((ours, others)))}" in said
        said = run(login, "bundle", "-n", ours, FIRST, code=8)
        assert f"its pod {ours}/agent-x is Pending" in said
    finally:
        # No kubelet ends them.
        now = ("--ignore-not-found", "--force", "--grace-period=0")
        for namespace, *names in ((ours, "agent-x"), (others, "stranger", "stranger-2")):
            plane.kubectl("delete", "daemonset,pod", *names, "-n", namespace, *now)


def _coco(plane: control_plane.ControlPlane, name: str) -> None:
    plane.apply(
        {
            "apiVersion": "/".join(GROUP), "kind": "CachedDataset", "metadata": {"name": name},
            "spec": {"source": {"kind": "dir", "path": "/data"}, "freshness": "frozen"},
        }
    )  # fmt: skip


def test_warm_sets_the_annotation_and_waits_for_all_nodes(
    login: Path, plane: control_plane.ControlPlane
) -> None:
    name = control_plane.unique("warm")
    _coco(plane, name)
    try:
        said = run(login, "warm", name, "--value", "today", "--wait", "--timeout", "1s", code=11)
        assert f"dataset {name}: not on all of its nodes after 1s" in said
        found = plane.get("cacheddataset", name)
        assert found["metadata"]["annotations"]["nodeagent.io/warm"] == "today"
        for status, code, words in (("False", 11, "n1: no room"), ("True", 0, "on 2 nodes")):
            _warmed(plane, name, status, words)
            done = run(login, "warm", name, "--value", "today", "--wait", code=code)
            assert f"today: {words}" in done
        assert "did you mean" in run(login, "warm", f"{name}x", code=7)
    finally:
        plane.kubectl("delete", "cacheddataset", name)


def _warmed(plane: control_plane.ControlPlane, name: str, status: str, words: str) -> None:
    condition = {
        "type": "Warmed", "status": status, "reason": "CarriedOut", "message": f"today: {words}",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    patch = {"status": {"conditions": [condition], "carriedOut": {"warm": "today"}}}
    plane.kubectl(
        "patch", "cacheddataset", name, "--subresource=status", "--type=merge",
        "-p", json.dumps(patch),
    )  # fmt: skip


def test_events_are_those_of_agents(login: Path, plane: control_plane.ControlPlane) -> None:
    stamp = kit.units.rfc3339(time.time() - 300)
    made = [
        {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": control_plane.unique("e"), "namespace": "default"},
            "involvedObject": {"kind": "Node", "apiVersion": "v1", "name": node},
            "reason": reason, "message": "held by a pod", "type": "Warning",
            "source": {"component": component, "host": node},
            "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 3,
        }
        for component, node, reason in (
            ("nodeagent", "n1", "LeakedMount"), ("nodeagent", "n2", "DiskTrouble"),
            ("kubelet", "n1", "Rebooted"),
        )
    ]  # fmt: skip
    plane.apply(*made)
    reasons = {each["reason"] for each in json.loads(run(login, "events", "-o", "json"))}
    assert {"LeakedMount", "DiskTrouble"} <= reasons
    assert "Rebooted" not in reasons
    line = run(login, "events", "n1", "--warnings").splitlines()[-1]
    assert line.split() == ["5m", "Warning", "LeakedMount", "Node/n1", "held", "by", "a", "pod"]


def test_who_lacks_a_right_is_told_which(
    login: Path, plane: control_plane.ControlPlane, tmp_path: Path
) -> None:
    waiting.until(lambda: plane._ask("get", "serviceaccount", "default"), 30, "the account")
    token = plane.kubectl("create", "token", "default", "--duration", "1h").strip()
    poor = kubeconfig(tmp_path, plane, {"token": token})
    for words, right in (
        (("status",), "list nodestorages.nodeagent.io"),
        (("events",), "list events in namespace default"),
        (("exec", "n1", "--", "status"), "list pods in all namespaces (or name one with -n)"),
        (("exec", "-n", "kube-system", "n1", "--", "status"), "list pods in namespace kube-system"),
        (("warm", "coco"), "patch cacheddatasets.nodeagent.io"),
        (("nodes", "-l", "a=b"), "list nodes"),
    ):
        said = run(poor, *words, code=8)
        assert f"lacks the right to {right}" in said
        assert "user system:serviceaccount:default:default" in said
    nobody = kubeconfig(tmp_path, plane, {"token": "wrong"})
    assert "does not know its user (401)" in run(nobody, "status", code=3)
