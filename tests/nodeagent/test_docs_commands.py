"""Commands in the docs: each block is run by a test or stands in ``COVERED``; all are parsed."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click

from nodeagent import main
from tests.testbed import docpages

ROOT = docpages.ROOT
PAGES = docpages.PAGES
# Blocks of these pages, written as ``sh``, are run word for word by the test.
RUN = {"tutorial.md": "tests/nodeagent/test_tutorial.py"}
RUN |= dict.fromkeys(("install.md", "first-dataset.md", "remove.md"), "tests/kube/test_tutorial.py")
RUN |= dict.fromkeys(
    ("connect-ceph.md", "connect-rook.md", "connect-ceph-csi.md"), "tests/kube/test_connect.py"
)
DEBIAN = "python3-venv libbpf1 kmod ceph-fuse python3-rados python3-rbd python3-cephfs"
MONITORED = (
    "helm upgrade nodeagent deploy/chart --namespace nodeagent --reset-then-reuse-values  --set "
    "metrics.podMonitor.enabled=true,prometheusRule.enabled=true,dashboards.enabled=true"
)
SCRAPED = (
    "helm upgrade nodeagent deploy/chart --namespace nodeagent --reset-then-reuse-values  --set "
    "metrics.serviceAccount.name=prometheus,metrics.serviceAccount.namespace=monitoring"
)
CA = (
    "kubectl -n nodeagent get secret nodeagent--metrics -o jsonpath='{.data.ca\\.crt}' | "
    "base64 -d >ca.crt"
)
REMOVED = (
    "helm upgrade nodeagent deploy/chart --namespace nodeagent --reset-then-reuse-values  --set "
    "pools.default.nodeSelector.removed=yes --set 'uninstall.nodes={gpu-1,gpu-2}'"
)
# Other blocks, by page and first command: the test that does what they do, or why none can.
COVERED = {
    ("README.md", "make run"): "tests/nodeagent/test_tutorial.py",
    (
        "install.md",
        "docker build -t registry.example/nodeagent:0.1.0 .",
    ): "tests/deploy/test_dockerfile.py",  # without docker
    ("install.md", "kubectl get nodestorages"): "tests/kube/test_storage.py",
    ("remove.md", REMOVED): "tests/deploy/test_node_uninstall.py",
    ("CONTRIBUTING.md", "make setup"): "tests/nodeagent/test_docs_commands.py",  # make -n
    (
        "connect-ceph.md",
        "ceph mon set auth_allowed_ciphers aes,aes256k",
    ): "tests/e2e/test_ceph_releases.py",
    (
        "CONTRIBUTING.md",
        "TEST_CEPH=trixie .venv/bin/python -m pytest -q tests/cache/sources/test_cephfs.py",
    ): "tests/e2e/test_ceph_releases.py",  # its cluster, without the variable
    ("bare-metal.md", f"apt-get install {DEBIAN}"): "tests/deploy/test_release.py",
    (
        "bare-metal.md",
        "sbatch --comment=dataset=coco,imagenet train.sh",
    ): "tests/examples/test_train.py",  # without Slurm
    (
        "upgrade.md",
        "kubectl apply --server-side --force-conflicts -f deploy/manifests/crds.yaml",
    ): "tests/deploy/test_release.py",  # an upgrade: test_node_rounds.py
    (
        "guard.md",
        "kubectl get daemonsets --all-namespaces -o wide | grep -w csi-rbdplugin",
    ): "tests/kube/test_docs.py",
    ("audit.md", "nodeagent volume findings"): "tests/volumes/audit/test_status.py",
    (
        "cache.md",
        "nodeagent dataset publish-manifest imagenet --to /mnt/imagenet/v7.manifest",
    ): "tests/cache/sources/test_cephfs_keys.py",
    ("bench.md", "make bench"): "tests/nodeagent/test_docs_commands.py",  # hours; make -n
    (
        "CONTRIBUTING.md",
        "SEED=12 KILLS=200 .venv/bin/python -m pytest -s tests/faults/test_kills.py",
    ): "tests/faults/test_kills.py",  # with fewer kills
    ("monitoring.md", MONITORED): "tests/deploy/test_chart_monitoring.py",
    ("monitoring.md", SCRAPED): "tests/deploy/test_chart_monitoring.py",
    ("monitoring.md", CA): "tests/deploy/test_chart_monitoring.py",  # the Secret's entry
    ("kubectl.md", "kubectl nodeagent status"): "tests/kube/test_fleet.py",
    ("kubectl.md", "python3 -m venv ~/.nodeagent"): "tests/fleet/test_install.py",
    (
        "kubernetes.md",
        "kubectl annotate --overwrite cds coco nodeagent.io/verify=nightly-7",
    ): "tests/kube/test_requests.py",
}

# Where a command begins: a line, what kubectl runs in the pod, a loop, a list.
_OURS = re.compile(r"(?:^|-- |until |[|&;(] ?)(?:\.venv/bin/)?nodeagent ((?!nodeagent/)[^|;&()>]+)")


def shell_blocks() -> list[docpages.Block]:
    return [each for each in docpages.all_blocks() if each.is_shell]


def lines(block: docpages.Block) -> list[str]:
    """The commands of a block, without comments; of a ``console`` those after a prompt."""
    text = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        text = [line.removeprefix("$ ") for line in text if line.startswith("$ ")]
    return [re.sub(r"\s+#\s.*", "", line).strip() for line in text]


def run_elsewhere(block: docpages.Block) -> bool:
    return block.page in RUN and block.language == "sh"


def test_each_block_says_what_it_is() -> None:
    """A fence without a language could hide commands from this test."""
    unnamed = [f"{each.page}:{each.line}" for each in docpages.all_blocks() if not each.language]
    assert unnamed == []


def test_each_shell_block_is_covered_by_a_test() -> None:
    found = [each for each in shell_blocks() if not run_elsewhere(each)]
    keys = {(each.page, lines(each)[0]) for each in found}
    assert sorted(keys - COVERED.keys()) == [], "no test does what these blocks do"
    assert sorted(COVERED.keys() - keys) == [], "the docs have these blocks no longer"
    assert len(found) == len(keys)
    tests = {*COVERED.values(), *RUN.values()}
    assert [test for test in sorted(tests) if not (ROOT / test).exists()] == []


def test_no_command_hides_in_an_indented_block() -> None:
    hidden = [
        f"{page.name}: {line.strip()}"
        for page in PAGES
        for line in re.findall(r"^    .*$", outside(page), re.MULTILINE)
        if re.match(r" +(\$ |nodeagent |make |kubectl |helm |\.venv/)", line)
    ]
    assert hidden == []


def outside(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands_of_ours() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each ``nodeagent`` command: of blocks, and of those within sentences."""
    for block in shell_blocks():
        for line in lines(block):
            yield from ((block.page, shlex.split(text)) for text in _OURS.findall(line))
    for page in PAGES:
        for text in re.findall(r"[`']nodeagent ([a-z][^`'\n]*)[`']", outside(page)):
            yield page.name, text.split()


def resolved(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and what follows. KeyError when none has that name."""
    command: click.Command = main.cli
    rest = list(words)
    while isinstance(command, click.Group):
        while rest and rest[0].startswith("--"):
            option = next(each for each in command.params if rest[0] in each.opts)
            rest = rest[1 if getattr(option, "is_flag", False) else 2 :]
        if not rest or not re.fullmatch(r"[a-z-]+", rest[0]):
            return command, rest
        found = command.get_command(click.Context(command), rest.pop(0))
        if found is None:
            raise KeyError(words)
        command = found
    return command, rest


def test_commands_of_ours_exist_with_their_options() -> None:
    found = list(commands_of_ours())
    assert len(found) > 60
    wrong = []
    for page, words in found:
        try:
            command, rest = resolved(words)
        except (KeyError, StopIteration):
            wrong.append(f"{page}: nodeagent {' '.join(words)}")
            continue
        known = {text for each in command.params for text in (*each.opts, *each.secondary_opts)}
        given = {match[1] for word in rest if (match := re.match(r"\[?(--[a-z-]+)", word))}
        if given - known - {"--help"}:
            wrong.append(f"{page}: nodeagent {' '.join(words)}: {sorted(given - known)}")
    assert wrong == []


def test_targets_of_make_exist() -> None:
    targets = {
        target
        for block in shell_blocks()
        for line in lines(block)
        for target in re.findall(r"^make ([a-z-]+)", line)
    }
    targets |= {
        target for page in PAGES for target in re.findall(r"`make ([a-z-]+)`", page.read_text())
    }
    assert {"run", "stop", "test"} <= targets
    for target in sorted(targets):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"make {target}: {done.stderr}"
