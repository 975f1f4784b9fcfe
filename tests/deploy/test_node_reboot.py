"""The node is drained, and rebooted with and without the boot unit: all comes back by itself.

A reboot ends everything on the node and empties /run. The guard is taken out of the kernel, too:
its cgroup is the machine's, which goes on.
"""

import configparser
import contextlib
import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.testbed import installed, kubernetes, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

WANTED = "state/volumes/guard-wanted.json"  # of a node that once had a guard in force
GUARD = installed.REPO / "deploy" / "guard"
UNIT = GUARD / "nodeagent-guard.service"
SETTINGS = f"/{installed.STATE}/settings.yaml"
# Its container says whether a guard was attached when ceph-csi would have begun to stage volumes.
CSI = "[ -e /sys/fs/bpf/nodeagent/program ] && echo guarded || echo unguarded; exec sleep 100000"


def csi_wait(image: str) -> dict[str, Any]:
    patch: dict[str, Any] = yaml.safe_load((GUARD / "csi-wait.yaml").read_text())
    patch["spec"]["template"]["spec"]["initContainers"][0]["image"] = image
    return patch


def start_csi(node: installed.Node) -> None:
    """A DaemonSet named as ceph-csi's, patched as an operator would."""
    pod = installed.pod_of(
        "csi-rbdplugin", node.kube.busybox, CSI,
        container={"volumeMounts": [{"name": "bpf", "mountPath": "/sys/fs/bpf"}]},
        volumes=[{"name": "bpf", "hostPath": {"path": "/sys/fs/bpf"}}],
    )  # fmt: skip
    daemonset = installed.deployment_of(pod)
    del daemonset["spec"]["replicas"]
    daemonset["kind"] = "DaemonSet"
    node.kube.apply(daemonset)
    patch = json.dumps(csi_wait(node.image.reference))
    node.kube.kubectl("patch", "daemonset", "csi-rbdplugin", "--type=strategic", "-p", patch)


class Job:
    """Reads the dataset in a Deployment, so that it comes back after a drain."""

    def __init__(self, kube: kubernetes.Kubernetes) -> None:
        self.kube = kube
        pod = installed.reader("job", kube.busybox, unprivileged=True)
        kube.apply(installed.deployment_of(pod))

    def container(self) -> dict[str, Any] | None:
        for pod in self.kube.pods("default", "app=job"):
            for each in pod["status"].get("containerStatuses", []):
                return dict(each, pod=pod["metadata"]["name"])
        return None

    def wait_reads(self, another_than: str = "") -> str:
        """Until a container (another one) has read whole rounds without an error; its id."""

        def reads() -> str:
            found = self.container()
            if not found or "running" not in found["state"]:
                return ""
            identity = str(found.get("containerID", ""))
            if identity in ("", another_than):
                return ""
            with contextlib.suppress(AssertionError):  # it may have ended meanwhile
                said = self.kube.kubectl("logs", found["pod"]).splitlines()
                if "ERROR" in " ".join(said):
                    pytest.fail(f"{said[-5:]}")
                return identity if len(said) > 2 else ""
            return ""

        read: str = waiting.until(
            reads, 90, "the job to read", pause=0.3,
            detail=lambda: self.kube.kubectl("describe", "pods"),
        )  # fmt: skip
        return read


@pytest.fixture(scope="module")
def job(node: installed.Node) -> Iterator[Job]:
    node.all_ready()
    node.agent.tell(installed.DATASET, "warm")
    node.agent.wait_state(installed.DATASET, "complete")
    node.set_mode("enforce")
    made = Job(node.kube)
    start_csi(node)
    try:
        yield made
    finally:
        node.kube.kubectl("delete", "deployment/job", "daemonset/csi-rbdplugin", "--wait=false")
        node.set_mode("settings")


def reboot(node: installed.Node) -> None:
    node.kube.power_off()
    guard = node.cell.guard()
    assert guard.detach() == 1
    node.kube.boot()
    node.reach()


def check_all_is_back(node: installed.Node, pins: list[str], completed: float) -> None:
    node.all_ready()
    guard = node.agent.get("/v1/volumes/guard")
    assert (guard["in_force"], guard["mode"], guard["pinned"]) == (True, "enforce", True)
    shown = node.agent.wait_state(installed.DATASET, "complete")
    assert shown["completed"] == completed  # not filled again
    assert node.leases() == pins
    assert installed.PINNED in node.kube.images()


def test_drained_node_comes_back(node: installed.Node, job: Job) -> None:
    first = job.wait_reads()
    pod = node.pod()["metadata"]["name"]
    node.kube.kubectl("drain", kubernetes.NODE, "--ignore-daemonsets", "--timeout=60s")
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": installed.SPACE},
    }
    path = f"/api/v1/namespaces/{installed.SPACE}/pods/{pod}/eviction"
    node.kube.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))
    node.pod(another_than=pod)
    node.all_ready()
    assert node.agent.dataset(installed.DATASET)["served_by"] == "store"
    node.kube.kubectl("uncordon", kubernetes.NODE)
    job.wait_reads(another_than=first)


def test_rebooted_node_comes_back_and_volumes_wait_for_the_guard(
    node: installed.Node, job: Job
) -> None:
    first = job.wait_reads()
    pins, completed = node.leases(), node.agent.dataset(installed.DATASET)["completed"]

    reboot(node)

    check_all_is_back(node, pins, completed)
    job.wait_reads(another_than=first)
    assert csi_said(node) == "guarded\n"


def csi_said(node: installed.Node) -> str:
    """Of its container that began after the boot."""

    def said() -> str:
        (pod,) = node.kube.pods("default", "app=csi-rbdplugin")
        (status,) = pod["status"].get("containerStatuses", [{}])
        with contextlib.suppress(AssertionError):
            if status.get("restartCount"):
                return node.kube.kubectl("logs", pod["metadata"]["name"], "-c", "main")
        return ""

    detail = ("describe", "pods", "-l", "app=csi-rbdplugin")
    found: str = waiting.until(
        said, 60, "ceph-csi to begin", pause=0.3, detail=lambda: node.kube.kubectl(*detail)
    )
    return found


def test_boot_unit_attaches_the_guard_before_anything_runs(
    node: installed.Node, job: Job, volume: str
) -> None:
    first = job.wait_reads()
    pins, completed = node.leases(), node.agent.dataset(installed.DATASET)["completed"]
    kube = node.kube
    kube.on_node("ln", "-sfn", str(installed.REPO / ".venv"), "/opt/nodeagent")
    kube.on_node("systemd-analyze", "verify", "--man=no", str(UNIT))
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    attempt = f"echo 0 >{node.cell.path}/cgroup.procs; exec 3<>{volume} && echo let through"
    lines = [
        f"export SETTINGS={SETTINGS}",  # the drop-in that docs/deploy.md asks for
        f"timeout {service['TimeoutStartSec']} {service['ExecStart']}",
        "echo attached: $?",
        f"sh -c {shlex.quote(attempt)} 2>&1 || true",
        "pidof kubelet || echo before kubelet",
    ]
    (kube.root / kubernetes.BOOT.lstrip("/")).write_text("\n".join(lines) + "\n")

    reboot(node)

    said = kube.said("boot")
    assert "attached: 0\n" in said, said
    assert "Operation not permitted" in said and "let through\n" not in said, said
    assert said.endswith("before kubelet\n")
    check_all_is_back(node, pins, completed)
    job.wait_reads(another_than=first)


@pytest.mark.parametrize(
    ("files", "wait", "says"),
    [
        ({WANTED}, "2", "no format guard after 2 s: volumes are staged unguarded\n"),
        (set(), "100000", ""),  # no guard was ever in force here
        ({WANTED, "unguarded"}, "100000", ""),  # the emergency file
    ],
    ids=["never longer than said", "only where a guard is wanted", "emergency file"],
)
def test_wait_for_the_guard_ends_without_one(
    node: installed.Node, files: set[str], wait: str, says: str
) -> None:
    spec = csi_wait(node.image.reference)["spec"]["template"]["spec"]
    (init,) = spec["initContainers"]
    init["env"] = [{"name": "WAIT_SECONDS", "value": wait}]
    state = f"mnt/state-{len(files)}-{wait}"
    (node.kube.root / state).mkdir()
    for name in files:
        (node.kube.root / state / name).parent.mkdir(parents=True, exist_ok=True)
        (node.kube.root / state / name).touch()
    places = {"guard-state": f"/{state}", "guard-bpf": "/mnt"}
    for each in spec["volumes"]:
        each["hostPath"] = {"path": places[each["name"]]}
    name = f"csi-{len(files)}-{wait}"
    pod = installed.pod_of(name, node.kube.busybox, "exec sleep 100000", **spec)
    node.kube.apply(pod)
    try:
        node.kube.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=60s")
        assert node.kube.kubectl("logs", name, "-c", init["name"]) == says
    finally:
        node.kube.kubectl("delete", "pod", name, "--force", "--wait=false")
