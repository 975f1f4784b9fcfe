"""A first day with the docs, word for word: a real shell, kubectl, API server and kubelet.

What differs from a user's cluster is what the pages leave to them: variables, and values of the
chart for this cluster. No Ceph: the test data of docs/first-dataset.md stand for it.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.testbed import blockdev, cell, docpages, image, kubernetes, ports, waiting

REPO = docpages.ROOT
DATA = "examples/first-dataset/data.yaml"
DATA_CHAPTER = "Test data"  # of first-dataset.md: it comes last, and is needed first
MARK = "=== next block ==="
TIDY = """\
helm uninstall nodeagent --namespace nodeagent --wait --ignore-not-found
kubectl delete pod read --ignore-not-found --wait=false
kubectl delete cacheddataset coco --ignore-not-found --wait=false
kubectl delete pod -n default make-coco --ignore-not-found --wait=false
"""
# The values that this cluster needs beside those of the pages.
HELM = """\
#!/bin/sh
[ "$1" = install ] && set -- "$@" --values "$HOME/cluster.yaml"
exec {helm} "$@"
"""

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def blocks() -> list[docpages.Block]:
    """What a reader pastes, page by page, and what they see; a console is only shown."""
    install, first, remove = (
        [each for each in docpages.blocks(REPO / "docs" / page) if each.language in ("sh", "text")]
        for page in ("install.md", "first-dataset.md", "remove.md")
    )
    data = [each for each in first if each.chapter == DATA_CHAPTER]
    variables, *rest = [each for each in first if each.chapter != DATA_CHAPTER]
    assert install and data and rest and remove
    return [*install, variables, *data, *rest, *remove]


def told(text: str) -> list[list[str]]:
    """Lines as words; of a table of kubectl all but the age, which is another one each time."""
    lines = [line.split() for line in text.strip().splitlines()]
    aged = bool(lines) and lines[0][-1:] == ["AGE"]
    return [line[:-1] for line in lines] if aged else lines


class Shell:
    """Runs commands as the reader of the pages does, in a directory that stands for the clone."""

    def __init__(self, kube: kubernetes.Kubernetes, folder: Path, values: object) -> None:
        self._folder = folder
        (folder / "deploy").symlink_to(REPO / "deploy")
        data = folder / DATA
        data.parent.mkdir(parents=True)
        data.write_text((REPO / DATA).read_text().replace("busybox:1.36", kube.busybox))
        (folder / "bin").mkdir()
        (folder / "bin" / "helm").write_text(HELM.format(helm=kubernetes.BIN / "helm"))
        (folder / "bin" / "helm").chmod(0o755)
        (folder / "cluster.yaml").write_text(yaml.safe_dump(values))
        made = image.build()
        kube.import_image(made.archive)
        nowhere = str(folder / "helm")
        self._environment = {
            "PATH": f"{folder}/bin:{kubernetes.BIN}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(kube.folder / "pki" / "admin.kubeconfig"),
            **dict.fromkeys(("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"), nowhere),
            "NODE": kubernetes.NODE, "REPOSITORY": image.NAME, "TAG": made.tag,
            "BUSYBOX": kube.busybox,
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


def test_the_first_day_works_word_for_word(kube: kubernetes.Kubernetes, shell: Shell) -> None:
    script, expected = [], {}
    for block in blocks():
        if block.is_shell:
            script.append(f"echo '{MARK}'\n{block.text}\n")
        else:
            expected[len(script)] = block.text
    assert len(script) > 5 and len(expected) > 1, "the blocks are not found"

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
