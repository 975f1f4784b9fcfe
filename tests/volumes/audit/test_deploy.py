"""What is shipped mounts and installs what the audit reads and calls, as its defaults say."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from volumes.audit.logs import sources
from volumes.audit.settings import AuditSettings

TOP = Path(__file__).parents[3]
DEFAULTS = AuditSettings()


@pytest.fixture(scope="module")
def pod() -> Any:
    documents = list(yaml.safe_load_all((TOP / "deploy/daemonset.yaml").read_text()))
    daemonset = next(each for each in documents if each["kind"] == "DaemonSet")
    return daemonset["spec"]["template"]["spec"]


def _files() -> list[str]:
    return [str(Path(s.files).parent) for s in DEFAULTS.logs.sources if s.files]


@pytest.mark.parametrize(
    "path", [str(DEFAULTS.kubelet), str(DEFAULTS.containers), *_files(), *sources.JOURNALS]
)
def test_daemonset_mounts_what_the_audit_reads(pod: Any, path: str) -> None:
    hosts = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    mounts = [
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if path == mount["mountPath"] or path.startswith(mount["mountPath"] + "/")
    ]
    assert mounts, path
    for mount in mounts:
        assert hosts[mount["name"]] == mount["mountPath"]  # mount tables and links fit
        assert mount["readOnly"] is True
        # Without it the agent is itself a holder of leaked mounts.
        assert mount["mountPropagation"] == "HostToContainer"


def test_daemonset_bidirectional_mounts(pod: Any) -> None:
    both = {
        mount["mountPath"]
        for mount in pod["containers"][0]["volumeMounts"]
        if mount.get("mountPropagation") == "Bidirectional"
    }
    assert both == {"/var/lib/nodeagent", "/sys/fs/bpf"}
    assert pod["hostPID"] is True


def test_image_has_the_programs_that_the_audit_calls() -> None:
    last = (TOP / "Dockerfile").read_text().rsplit("\nFROM ", 1)[1]
    installed = set(re.findall(r"[\w.-]+", last))
    # journalctl, rados, rbd-nbd, the bindings
    assert {"systemd", "ceph-common", "rbd-nbd", "python3-rados", "python3-rbd"} <= installed
