"""The policy about RBD volumes that are declared read-only, on a real API server: each that it lets
through and each that it refuses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube import rendered
from tests.kube.test_host_paths import refusal
from tests.testbed import waiting
from tests.testbed.control_plane import NAMESPACE, ControlPlane, unique

pytestmark = pytest.mark.real

NAME = f"{NAMESPACE}-nodeagent-read-only-volumes"
WHY = "declared read-only"
MAKER = "provisioner"


def csi(read_only: bool | None = None, driver: str = "rbd.csi.ceph.com") -> dict[str, Any]:
    flag = {} if read_only is None else {"readOnly": read_only}
    return {"csi": {"driver": driver, "volumeHandle": "image", **flag}}


def rbd(read_only: bool | None = None) -> dict[str, Any]:
    flag = {} if read_only is None else {"readOnly": read_only}
    return {"rbd": {"monitors": ["10.0.0.1:6789"], "image": "coco", **flag}}


def volume(
    source: dict[str, Any], *modes: str, storage_class: str = "", label: str = ""
) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {
            "name": unique("pv"), "labels": {"nodeagent.io/read-only": label} if label else {},
        },
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": list(modes or ("ReadOnlyMany",)),
            "storageClassName": storage_class, **source,
        },
    }  # fmt: skip


REFUSED = {
    "CSI, not said": (volume(csi()), "spec.csi.readOnly: true"),
    "CSI, false": (volume(csi(False)), "spec.csi.readOnly: true"),
    "the type rbd": (volume(rbd()), "spec.rbd.readOnly: true"),
    "by label": (volume(csi(), "ReadWriteOnce", label="true"), "take ReadWriteOnce out"),
    "by label, flagged": (volume(csi(True), "ReadWriteMany", "ReadOnlyMany", label="true"),
                          "take ReadWriteMany out"),
    "by class": (volume(csi(), "ReadWriteOnce", storage_class="datasets"), "spec.csi.readOnly"),
}  # fmt: skip
ALLOWED = {
    "CSI, read-only": volume(csi(True)),
    "the type rbd, read-only": volume(rbd(True)),
    "one that is written": volume(csi(), "ReadWriteOnce"),
    "one that may be written or read": volume(csi(), "ReadWriteOnce", "ReadOnlyMany"),
    "label that says no": volume(csi(), "ReadWriteOnce", label="false"),
    "by label": volume(csi(True), label="true"),
    "by class": volume(csi(True), storage_class="datasets"),
    "exempt class": volume(csi(), storage_class="legacy"),
    "another driver": volume(csi(driver="cephfs.csi.ceph.com")),
    "no CSI": volume({"hostPath": {"path": "/mnt"}}),
}


def policies(plane: ControlPlane, mode: str) -> None:
    found = rendered.of_kind(
        rendered.chart(
            "--set", f"policies.readOnlyVolumes.mode={mode}",
            "--set", "policies.readOnlyVolumes.classes={datasets}",
            "--set", "policies.readOnlyVolumes.exemptClasses={legacy}",
            "--set", f"policies.readOnlyVolumes.exemptAccounts={{default/{MAKER}}}",
        ), *rendered.POLICIES,
    )  # fmt: skip
    plane.apply(*(each for each in found if each["metadata"]["name"] == NAME))


@pytest.fixture(scope="module")
def denying(plane: ControlPlane) -> Iterator[None]:
    policies(plane, "deny")
    waiting.until(lambda: refusal(plane, volume(csi())), 30, "the policy to count")
    yield
    plane.kubectl("delete", "validatingadmissionpolicybinding", NAME)


@pytest.mark.parametrize("case", REFUSED)
def test_volume_that_nodes_would_map_writable_is_refused(
    plane: ControlPlane, denying: None, case: str
) -> None:
    made, remedy = REFUSED[case]
    said = refusal(plane, made)
    assert WHY in said and remedy in said, said


@pytest.mark.parametrize("case", ALLOWED)
def test_every_other_volume_is_taken(plane: ControlPlane, denying: None, case: str) -> None:
    assert refusal(plane, ALLOWED[case]) == ""


def test_account_that_is_exempt_makes_any_volume(plane: ControlPlane, denying: None) -> None:
    plane.apply(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": {"name": "makers"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                        "name": "system:persistent-volume-provisioner"},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": "default"}
                         for name in (MAKER, "other")],
        }
    )  # fmt: skip

    def said(account: str) -> str:
        done = plane._kubectl(
            "create", "--dry-run=server", "-f", "-",
            f"--as=system:serviceaccount:default:{account}",
            given=json.dumps(volume(csi())),
        )  # fmt: skip
        return "" if done.returncode == 0 else done.stderr

    waiting.until(lambda: not said(MAKER), 30, "the exempt account", detail=lambda: said(MAKER))
    assert WHY in said("other")


def test_volumes_that_are_there_can_be_written_to_but_not_declared_anew(
    plane: ControlPlane, denying: None
) -> None:
    policies(plane, "audit")
    old = volume(csi())
    name = old["metadata"]["name"]
    waiting.until(lambda: not refusal(plane, old), 30, "volumes to be let through")
    plane.apply(old, fresh := volume(csi(), "ReadWriteOnce"))
    policies(plane, "deny")
    waiting.until(lambda: refusal(plane, volume(csi())), 30, "the policy to count again")
    try:
        plane.kubectl("annotate", "pv", name, "note=kept")  # as controllers do
        other = fresh["metadata"]["name"]
        done = plane._kubectl("label", "pv", other, "nodeagent.io/read-only=true")
        assert done.returncode != 0 and WHY in done.stderr
    finally:
        plane.kubectl("delete", "pv", name, fresh["metadata"]["name"], "--wait=false")


def test_warning_lets_volumes_through_and_says_why(plane: ControlPlane, denying: None) -> None:
    bad = volume(csi())
    try:
        policies(plane, "warn")
        waiting.until(lambda: not refusal(plane, bad), 30, "volumes to be let through")
        waiting.until(lambda: WHY in plane.said_of(bad), 30, "a warning")
        policies(plane, "audit")
        waiting.until(lambda: WHY not in plane.said_of(bad), 30, "no warning any more")
    finally:
        policies(plane, "deny")
        waiting.until(lambda: refusal(plane, bad), 30, "the policy to count again")
