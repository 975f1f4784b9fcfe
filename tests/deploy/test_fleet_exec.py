"""kubectl-nodeagent's exec and bundle through a real kubelet, into a pod that stands for the agent.

Its program says what a test asks for: bytes that are no text, much, nothing for a while, an error.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import kubernetes, waiting

pytestmark = pytest.mark.real

PROGRAM = Path(sys.executable).parent / "kubectl-nodeagent"
LABELS = {"app.kubernetes.io/name": "nodeagent"}
PACKED = b"packed\x00\xff\xfe\n" * 1000
SCRIPT = """\
#!/bin/busybox sh
case "$1" in
support-bundle)
  [ "$2 $3" = "--file -" ] || exit 2
  i=0; while [ $i -lt 1000 ]; do printf 'packed\\000\\377\\376\\n'; i=$((i+1)); done
  echo '-: 3 files' >&2 ;;
much) i=0; while [ $i -lt 20000 ]; do echo "line $i"; i=$((i+1)); done ;;
slow) echo first; /bin/busybox sleep 3; echo last ;;
words) shift; for each in "$@"; do echo "<$each>"; done ;;
*) echo "no such thing" >&2; exit 7 ;;
esac
"""


@pytest.fixture(scope="module")
def fake(kube: kubernetes.Kubernetes) -> Iterator[None]:
    kube.apply(
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "fleet-exec"},
            "data": {"nodeagent": SCRIPT},
        },
        {
            "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "fleet-exec"},
            "spec": {
                "selector": {"matchLabels": LABELS},
                "template": {"metadata": {"labels": LABELS}, "spec": pod_spec(kube)},
            },
        },
    )  # fmt: skip
    kube.kubectl("rollout", "status", "daemonset/fleet-exec", "--timeout=120s")
    yield
    kube.kubectl("delete", "daemonset/fleet-exec", "configmap/fleet-exec", "--now")


def pod_spec(kube: kubernetes.Kubernetes) -> dict[str, Any]:
    return {
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": "nodeagent", "image": kube.busybox,
                "env": [{"name": "PATH", "value": "/usr/local/bin:/bin"}],
                "volumeMounts": [{"name": "bin", "mountPath": "/usr/local/bin"}],
            }
        ],
        "volumes": [{"name": "bin", "configMap": {"name": "fleet-exec", "defaultMode": 0o755}}],
    }  # fmt: skip


def run(
    kube: kubernetes.Kubernetes, *words: str, where: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PROGRAM, "-n", "default", "--kubeconfig", kube._kubeconfig("admin"), *words],
        capture_output=True, timeout=waiting.limit(60), cwd=where,
    )  # fmt: skip


def test_exec_gives_output_errors_and_the_exit_code(
    kube: kubernetes.Kubernetes, fake: None
) -> None:
    done = run(kube, "exec", kubernetes.NODE, "--", "words", "a b", "--flag", "-o", "")
    assert (done.returncode, done.stdout) == (0, b"<a b>\n<--flag>\n<-o>\n<>\n"), done.stderr
    done = run(kube, "exec", kubernetes.NODE, "--", "nodeagent", "words", "x")
    assert done.stdout == b"<x>\n"
    done = run(kube, "exec", kubernetes.NODE, "--", "what")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"no such thing\n")
    done = run(kube, "exec", kubernetes.NODE, "--", "much")
    assert done.stdout.decode().split("\n") == [*(f"line {i}" for i in range(20000)), ""]


def test_output_comes_while_the_command_runs(kube: kubernetes.Kubernetes, fake: None) -> None:
    words = ["exec", kubernetes.NODE, "--", "slow"]
    with subprocess.Popen(
        [PROGRAM, "-n", "default", "--kubeconfig", kube._kubeconfig("admin"), *words],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        first = time.monotonic()
        assert process.stdout.readline() == b"last\n"
        assert time.monotonic() - first > 1


def test_a_bundle_is_fetched_byte_by_byte_into_a_new_file_of_its_owner(
    kube: kubernetes.Kubernetes, fake: None, tmp_path: Path
) -> None:
    done = run(kube, "bundle", kubernetes.NODE, where=tmp_path)
    (file,) = tmp_path.iterdir()
    assert done.returncode == 0, done.stderr
    assert file.name.startswith(f"nodeagent-support-{kubernetes.NODE}-")
    assert file.read_bytes() == PACKED
    assert os.stat(file).st_mode & 0o777 == 0o600
    assert done.stdout.decode().startswith(f"{file.name}: ")
    assert done.stderr == b"-: 3 files\n"
    done = run(kube, "bundle", kubernetes.NODE, "-o", str(file))
    assert (done.returncode, file.read_bytes()) == (8, PACKED)
    assert b"it exists; remove it, or name another with -o" in done.stderr
