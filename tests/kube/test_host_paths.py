"""The policy about copies of the host's mounts, on a real API server: each pod that it lets through
and each that it refuses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube import rendered
from tests.testbed import waiting
from tests.testbed.control_plane import NAMESPACE, ControlPlane, unique

pytestmark = pytest.mark.real

KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
WHY = "would get a copy of the host's mounts"


def spec_of(
    path: str, mount: dict[str, Any] | None, where: str = "containers", account: str = ""
) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "it", "image": "busybox:1", "volumeMounts": []}
    if mount is not None:
        container["volumeMounts"] = [{"name": "host", "mountPath": "/host", **mount}]
        if mount.get("mountPropagation") == "Bidirectional":
            container["securityContext"] = {"privileged": True}
    plain = {"name": "plain", "image": "busybox:1"}
    made: dict[str, Any] = {
        "containers": [plain],
        "volumes": [{"name": "host", "hostPath": {"path": path}}],
        "automountServiceAccountToken": False,
    }
    if where == "containers":
        made["containers"] = [plain, container]
    else:
        made[where] = [container]
    if account:
        made["serviceAccountName"] = account
    return made


def pod(spec: dict[str, Any], space: str = "default") -> dict[str, Any]:
    metadata = {"name": unique("pod"), "namespace": space}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


# As Prometheus' node-exporter was deployed where a mass accident happened: / without propagation.
NODE_EXPORTER: dict[str, Any] = {
    "hostPID": True,
    "hostNetwork": True,
    "containers": [
        {
            "name": "node-exporter",
            "image": "node-exporter:0.18",
            "args": ["--path.rootfs=/host/root"],
            "volumeMounts": [
                {"name": "proc", "mountPath": "/host/proc", "readOnly": True},
                {"name": "root", "mountPath": "/host/root", "readOnly": True},
            ],
        }
    ],
    "volumes": [
        {"name": "proc", "hostPath": {"path": "/proc"}},
        {"name": "root", "hostPath": {"path": "/"}},
    ],
}

REFUSED = {
    "node-exporter of the accident": NODE_EXPORTER,
    "root": spec_of("/", {}),
    "root, read-only": spec_of("/", {"readOnly": True}),
    "propagation None": spec_of("/", {"mountPropagation": "None"}),
    "above": spec_of("/var", {}),
    "above, with a slash": spec_of("/var/lib/", {}),
    "kubelet": spec_of("/var/lib/kubelet", {}),
    "written oddly": spec_of("//var/./lib//kubelet/", {}),
    "pods": spec_of("/var/lib/kubelet/pods", {}),
    "plugins": spec_of("/var/lib/kubelet/plugins", {}),
    "by subPath": spec_of("/", {"subPath": "var/lib"}),
    "init container": spec_of("/", {}, "initContainers"),
}
ALLOWED = {
    "node-exporter of today": spec_of("/", {"mountPropagation": "HostToContainer"}),
    "a CSI driver": spec_of("/var/lib/kubelet", {"mountPropagation": "Bidirectional"}),
    "another directory": spec_of("/var/log", {}),
    "beside": spec_of("/var/lib/kubelet2", {}),
    "device plugins": spec_of("/var/lib/kubelet/device-plugins", {}),
    "a part of the root": spec_of("/", {"subPath": "etc/ssl"}),
    "a volume that nothing mounts": spec_of("/", None),
    "no volumes": {"containers": [{"name": "it", "image": "busybox:1"}]},
}


@pytest.fixture(scope="module")
def spaces(plane: ControlPlane) -> dict[str, str]:
    made = {"exempt": unique("exempt"), "watched": unique("watched")}
    for space in made.values():
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
        for name in ("default", "collector"):
            plane.apply(
                {
                    "apiVersion": "v1", "kind": "ServiceAccount",
                    "metadata": {"name": name, "namespace": space},
                }
            )  # fmt: skip
    return made


def policies(plane: ControlPlane, spaces: dict[str, str], mode: str) -> None:
    found = rendered.of_kind(
        rendered.chart(
            "--set", f"policies.hostPaths.mode={mode}",
            "--set", f"policies.hostPaths.exemptNamespaces={{{spaces['exempt']}}}",
            "--set", f"policies.hostPaths.exemptAccounts={{{spaces['watched']}/collector}}",
        ), *KINDS,
    )  # fmt: skip
    plane.apply(*(each for each in found if "host-paths" in each["metadata"]["name"]))


@pytest.fixture(scope="module")
def denying(plane: ControlPlane, spaces: dict[str, str]) -> Iterator[str]:
    space = spaces["watched"]
    policies(plane, spaces, "deny")
    waiting.until(lambda: refusal(plane, pod(REFUSED["root"], space)), 30, "the policy to count")
    yield space
    names = ("pods", "workloads")
    plane.kubectl(
        "delete", "validatingadmissionpolicybinding",
        *(f"{NAMESPACE}-nodeagent-host-paths-{each}" for each in names),
    )  # fmt: skip


def refusal(plane: ControlPlane, made: dict[str, Any]) -> str:
    """Why the server refuses it; nothing when it takes it."""
    done = plane._kubectl("create", "--dry-run=server", "-f", "-", given=json.dumps(made))
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_copy_of_the_hosts_mounts_is_refused(plane: ControlPlane, denying: str, case: str) -> None:
    said = refusal(plane, pod(REFUSED[case], denying))
    assert WHY in said and "mountPropagation: HostToContainer" in said, said


@pytest.mark.parametrize("case", ALLOWED)
def test_everything_else_is_taken(plane: ControlPlane, denying: str, case: str) -> None:
    assert refusal(plane, pod(ALLOWED[case], denying)) == ""


def test_debug_container_is_refused_too(plane: ControlPlane, denying: str) -> None:
    host = pod(spec_of("/", None), denying)
    plane.apply(host)
    name = host["metadata"]["name"]
    target = f"/api/v1/namespaces/{denying}/pods/{name}/ephemeralcontainers"
    for mount, taken in (({}, False), ({"mountPropagation": "HostToContainer"}, True)):
        now = plane.get("pod", "-n", denying, name)
        now["spec"]["ephemeralContainers"] = [
            {
                "name": "debug", "image": "busybox:1",
                "volumeMounts": [{"name": "host", "mountPath": "/host", **mount}],
            }
        ]  # fmt: skip
        done = plane._kubectl("replace", "--raw", target, "-f", "-", given=json.dumps(now))
        assert (done.returncode == 0) is taken, done.stderr
        assert taken or WHY in done.stderr


def test_exempt_namespaces_and_accounts_are_left_alone(
    plane: ControlPlane, denying: str, spaces: dict[str, str]
) -> None:
    assert refusal(plane, pod(REFUSED["root"], spaces["exempt"])) == ""
    assert refusal(plane, pod(spec_of("/", {}, account="collector"), denying)) == ""
    assert WHY in refusal(plane, pod(spec_of("/", {}, account="default"), denying))


def test_workloads_are_warned_of_where_pods_are_refused(plane: ControlPlane, denying: str) -> None:
    """Or the controller that has to write to one could not."""
    labels = {"app": "node-exporter"}
    template = {"metadata": {"labels": labels}, "spec": NODE_EXPORTER}
    selected = {"selector": {"matchLabels": labels}, "template": template}
    job = {"template": {"spec": {**NODE_EXPORTER, "restartPolicy": "Never"}}}
    for kind, api, spec in (
        ("DaemonSet", "apps/v1", selected),
        ("Deployment", "apps/v1", selected),
        ("Job", "batch/v1", job),
        ("CronJob", "batch/v1", {"schedule": "0 0 * * *", "jobTemplate": {"spec": job}}),
    ):
        metadata = {"name": unique("work"), "namespace": denying}
        said = plane.said_of({"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec})
        assert "Warning" in said and WHY in said, (kind, said)


def test_the_agents_own_pod_keeps_to_it(plane: ControlPlane, denying: str) -> None:
    (daemonset,) = rendered.of_kind(rendered.chart(), "DaemonSet")
    spec = {k: v for k, v in daemonset["spec"]["template"]["spec"].items()
            if k not in ("serviceAccountName", "priorityClassName")}  # fmt: skip
    assert refusal(plane, pod(spec, denying)) == ""


def test_other_modes_let_pods_through_and_say_so_or_not(
    plane: ControlPlane, denying: str, spaces: dict[str, str]
) -> None:
    bad = pod(REFUSED["node-exporter of the accident"], denying)
    try:
        policies(plane, spaces, "warn")
        waiting.until(lambda: not refusal(plane, bad), 30, "pods to be let through")
        waiting.until(lambda: WHY in plane.said_of(bad), 30, "a warning")
        policies(plane, spaces, "audit")
        waiting.until(lambda: WHY not in plane.said_of(bad), 30, "no warning any more")
    finally:
        policies(plane, spaces, "deny")
        waiting.until(lambda: refusal(plane, bad), 30, "the policy to count again")
