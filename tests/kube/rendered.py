"""What the chart renders, by kind."""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.testbed import control_plane, kubernetes

POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
CHART = Path(__file__).parents[2] / "deploy" / "chart"


def chart(*words: str) -> list[dict[str, Any]]:
    done = kubernetes.helm(
        "template", "nodeagent", str(CHART), "--namespace", control_plane.NAMESPACE,
        "--kube-version", kubernetes.VERSION, *kubernetes.IMAGE, *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def rights() -> list[dict[str, Any]]:
    """The agents' account and what it may do, with the policy for one node each."""
    found = chart(
        "--set", "kubernetes.secrets={ceph}", "--set", "policies.hostPaths.mode=off",
        "--set", "policies.readOnlyVolumes.mode=off",
    )  # fmt: skip
    kinds = (
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        *POLICIES,
    )
    return of_kind(found, *kinds)


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] in kinds]


def claims(namespace: str, secret: str) -> list[dict[str, Any]]:
    """The rights to read claims, with keys in ``namespace``."""
    given = json.dumps([{"namespace": namespace, "secrets": [secret]}])
    found = chart("--set-json", f"kubernetes.claims={given}")
    kinds = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    return [e for e in of_kind(found, *kinds) if e["metadata"]["name"].endswith("-claims")]
