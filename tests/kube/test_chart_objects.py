"""What the chart renders: a real API server takes each object, with the kinds of others it uses.

Stricter than schemas of a file: the server knows its own kinds, and refuses unknown fields.
"""

import json
from typing import Any

import pytest
import yaml

from tests.kube import rendered, test_examples
from tests.testbed import waiting
from tests.testbed.control_plane import ControlPlane

TRY = (
    "apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict",
)  # fmt: skip
CLAIMS = [{"namespace": "rook-ceph", "secrets": ["csi", "rbd"]}]
SCRAPED = "metrics.podMonitor.enabled=true,metrics.podMonitor.labels.release=p"
EVERYTHING = (
    "--set", f"{SCRAPED},prometheusRule.enabled=true,prometheusRule.labels.release=p",
    "--set", "metrics.serviceAccount.name=prometheus,metrics.serviceAccount.namespace=monitoring",
    "--set", "dashboards.enabled=true,dashboards.annotations.grafana_folder=GPU",
    "--set", "createNamespace=true,secretName=keys,kubernetes.secrets={ceph}",
    "--set", "policies.datasets.api=v1beta1,uninstall.nodes={gpu-1},imagePullSecrets[0].name=pull",
    "--set", "pools.a100.nodeSelector.gpu=a100,pools.a100.settings.cache.budget=1TiB",
    "--set-json", f"kubernetes.claims={json.dumps(CLAIMS)}",
)  # fmt: skip
ISSUED = "metrics.certificate.certManager.issuerRef.name=corp"
# Values, and kinds that must be among what they render.
SETS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "default": ((), {"DaemonSet", "CSIDriver", "Job"}),
    "k3s": (("--values", str(rendered.CHART / "values-k3s.yaml")), {"DaemonSet"}),
    "rke2": (("--values", str(rendered.CHART / "values-rke2.yaml")), {"DaemonSet"}),
    "everything": (EVERYTHING, {"PodMonitor", "PrometheusRule", "MutatingAdmissionPolicy"}),
    "issued": (("--set", f"{SCRAPED},{ISSUED}"), {"Certificate", "PodMonitor"}),
}


@pytest.fixture(scope="module")
def others(plane: ControlPlane) -> ControlPlane:
    """It has the kinds of Prometheus' operator and cert-manager, and Rook's namespace."""
    folder = test_examples.kinds() / "chart"
    published = [yaml.load(file.read_text(), yaml.CSafeLoader) for file in folder.glob("*.yaml")]
    assert len(published) == 3
    for each in published:
        each["metadata"].pop("labels", None)  # cert-manager's are helm's templates
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": published})
    plane.kubectl("apply", "--server-side", "-f", "-", given=listed, seconds=120)
    served = "podmonitors.monitoring.coreos.com,prometheusrules.monitoring.coreos.com"
    waiting.until(
        lambda: plane._kubectl("get", f"{served},certificates.cert-manager.io").returncode == 0,
        60, "the kinds",
    )  # fmt: skip
    for name in ("rook-ceph", "monitoring"):
        plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return plane


@pytest.mark.real
@pytest.mark.parametrize("name", SETS)
def test_server_takes_what_the_chart_renders(name: str, others: ControlPlane) -> None:
    words, kinds = SETS[name]
    made = rendered.chart(*words)
    assert kinds <= {each["kind"] for each in made}
    known = [(e["kind"], e["metadata"].get("namespace"), e["metadata"]["name"]) for e in made]
    assert len(known) == len(set(known)), "an object is there twice"
    taken = others.kubectl(*TRY, "-f", "-", given=yaml.safe_dump_all(made))
    assert taken.count("serverside-applied (server dry run)") == len(made), taken


@pytest.mark.real
@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule", "Certificate", "DaemonSet"])
def test_server_refuses_a_field_that_no_kind_has(kind: str, others: ControlPlane) -> None:
    """Else the test above could not fail."""
    made = rendered.chart(*EVERYTHING, "--set", ISSUED)
    one: dict[str, Any] = next(each for each in made if each["kind"] == kind)
    one["spec"]["notAField"] = 1
    assert "notAField" in others.refused(one, words=(*TRY[:3], *TRY[4:]))
