"""The tutorial of docs/kubernetes.md, word for word: a real shell, kubectl, API server and kubelet.

What differs from a user's cluster is what the page leaves to them: variables, ``cluster.yaml``.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.testbed import blockdev, cell, image, kubernetes, ports, waiting

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "kubernetes.md"
HEADING = "## Tutorial: "
MARK = "=== next block ==="
TIDY = """\
helm uninstall nodeagent --namespace nodeagent --wait --ignore-not-found
kubectl delete namespace training --ignore-not-found --wait=false
kubectl delete cacheddataset coco --ignore-not-found --wait=false
kubectl delete pod -n default make-coco --ignore-not-found --wait=false
"""

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def section() -> str:
    return PAGE.read_text().partition(f"\n{HEADING}")[2].partition("\n## ")[0]


def blocks() -> list[tuple[str, str]]:
    """Language and text of each fenced block of the tutorial."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", section(), re.MULTILINE | re.DOTALL)


def told(text: str) -> list[list[str]]:
    """Lines as words; of a table of kubectl all but the age, which is another one each time."""
    lines = [line.split() for line in text.strip().splitlines()]
    aged = bool(lines) and lines[0][-1:] == ["AGE"]
    return [line[:-1] for line in lines] if aged else lines


class Shell:
    """Runs commands as the page's reader does, in a directory that has ``deploy`` in it."""

    def __init__(self, kube: kubernetes.Kubernetes, folder: Path, values: object) -> None:
        self._folder = folder
        (folder / "deploy").symlink_to(REPO / "deploy")
        (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
        made = image.build()
        kube.import_image(made.archive)
        nowhere = str(folder / "helm")
        self._environment = {
            "PATH": f"{kubernetes.BIN}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(kube.folder / "pki" / "admin.kubeconfig"),
            **dict.fromkeys(("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"), nowhere),
            "NODE": kubernetes.NODE, "IMAGE": image.NAME, "TAG": made.tag, "BUSYBOX": kube.busybox,
        }  # fmt: skip

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        file = self._folder / "commands.sh"
        file.write_text(script)
        return subprocess.run(
            ["bash", "-euxo", "pipefail", str(file)],
            cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=waiting.limit(240),
        )  # fmt: skip


@pytest.fixture
def shell(kube: kubernetes.Kubernetes, area: Path) -> Iterator[Shell]:
    with cell.cell(area) as guarded:
        made = Shell(
            kube, area,
            {
                "port": ports.free(1)[0],
                "settings": {
                    # No kube-proxy runs on the node of the tests: the service's address leads
                    # nowhere.
                    "kubernetes": {
                        "server": f"https://127.0.0.1:{kube.api_port}", "interval": "1s",
                    },
                    "kubelet": {"config": "/var/lib/kubelet/config.yaml"},
                    # Nothing else on this machine is to meet the guard.
                    "volumes": {
                        "guard": {
                            "cgroup": str(guarded.path), "drivers": ["loop"],
                            "names": [blockdev.NAMES],
                        },
                        "audit": {"names": [blockdev.NAMES]},
                    },
                },
            },
        )  # fmt: skip
        try:
            yield made
        finally:
            made.run(TIDY.replace("\n", " || true\n"))


def test_tutorial_works_word_for_word(kube: kubernetes.Kubernetes, shell: Shell) -> None:
    script, expected = [], {}
    for language, text in blocks():
        assert language in ("sh", "text"), "the test does not know what to do with it"
        if language == "sh":
            script.append(f"echo '{MARK}'\n{text}")
        else:
            expected[len(script)] = text
    assert len(script) > 5 and len(expected) > 1, "the tutorial is not found"

    done = shell.run("".join(script))

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}\n{trouble(kube)}"
    said = done.stdout.split(f"{MARK}\n")
    for number, text in expected.items():
        end = said[number].splitlines()[-len(text.splitlines()) :]
        assert told("\n".join(end)) == told(text)
    state = kube.root / "var/lib/nodeagent"
    assert not [*state.glob("store/coco"), *state.glob("views/coco")], "it was not given up"


def trouble(kube: kubernetes.Kubernetes) -> str:
    return "\n".join(
        kube._ask(*words.split())
        for words in (
            "get pods -A -o wide", "get events -A --sort-by=.lastTimestamp",
            "get cds,nst -o yaml", "logs -n nodeagent daemonset/nodeagent --tail=40",
        )
    )  # fmt: skip
