"""What the chart makes for Prometheus' operator and Grafana, and which values it refuses."""

import base64
import re
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent import configfile
from tests.nodeagent.test_runbook import alerts
from tests.testbed import kubernetes, scripts

REPO = Path(__file__).parents[2]
CHART = REPO / "deploy" / "chart"
INHIBIT = REPO / "deploy" / "alertmanager" / "inhibit.yaml"
SCRAPED = "metrics.podMonitor.enabled=true"
ALL = f"{SCRAPED},prometheusRule.enabled=true,dashboards.enabled=true"
KINDS = {"PodMonitor", "PrometheusRule", "Secret"}


def _template(*words: str) -> Any:
    sets = [word for each in words for word in ("--set", each)]
    chart = ("template", "nodeagent", str(CHART), "--namespace", "gpu")
    return kubernetes.helm(*chart, *kubernetes.IMAGE, *sets)


def _render(*words: str) -> list[dict[str, Any]]:
    done = _template(*words)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _of(made: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (
        each for each in made if each["kind"] == kind and name in ("", each["metadata"]["name"])
    )
    return found


def test_copies_in_the_chart_are_equal() -> None:
    made = scripts.load("chart_files")
    wanted = made.files()
    there = {path: path.read_text() for path in made.TARGET.glob("*/*")}
    assert there == wanted, "run scripts/chart_files.py"


@pytest.mark.real
def test_nothing_of_it_is_there_by_default() -> None:
    made = _render()
    assert not KINDS & {each["kind"] for each in made}
    assert (
        "api"
        not in yaml.safe_load(_of(made, "ConfigMap", "nodeagent")["data"]["nodeagent.yaml"])[
            "admin"
        ]
    )


@pytest.mark.real
def test_a_scrape_has_a_port_a_certificate_a_token_and_a_right(tmp_path: Path) -> None:
    made = _render(SCRAPED)
    (scrape,) = _of(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    pod = _of(made, "DaemonSet")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    file = tmp_path / "nodeagent.yaml"
    file.write_text(_of(made, "ConfigMap", "nodeagent")["data"]["nodeagent.yaml"])
    api = configfile.load(file).admin.api
    assert api is not None and api.kubernetes is not None
    assert api.listen == f"0.0.0.0:{ports[scrape['port']]}"
    assert scrape["scheme"] == "https" and scrape["path"] == "/metrics"
    chosen = _of(made, "PodMonitor")["spec"]["selector"]["matchLabels"].items()
    assert chosen <= pod["metadata"]["labels"].items()
    # The files that the settings name are those of the Secret.
    (config,) = (each for each in pod["spec"]["volumes"] if each["name"] == "config")
    (given,) = (s["secret"] for s in config["projected"]["sources"] if "secret" in s)
    mounted = {f"/etc/nodeagent/{item['path']}": item["key"] for item in given["items"]}
    assert mounted == {str(api.cert_file): "tls.crt", str(api.key_file): "tls.key"}
    assert scrape["tlsConfig"]["ca"]["secret"]["name"] == given["name"]
    # The certificate fits its key, its authority and the name that Prometheus expects.
    data = _of(made, "Secret", given["name"])["data"]
    for name, text in data.items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
        tmp_path / "tls.crt", tmp_path / "tls.key"
    )
    assert scrape["tlsConfig"]["serverName"] == "nodeagent-metrics.gpu.svc"
    # Token and right.
    token = _of(made, "Secret", scrape["authorization"]["credentials"]["name"])
    account = token["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    binding = _of(made, "ClusterRoleBinding", "gpu-nodeagent--metrics")
    assert [each["name"] for each in binding["subjects"]] == [account]
    role = _of(made, "ClusterRole", binding["roleRef"]["name"])
    assert role["rules"] == [
        {"apiGroups": ["nodeagent"], "resources": ["agents"], "verbs": ["read"]}
    ]
    assert _of(made, "ClusterRoleBinding", "gpu-nodeagent-reviews")
    (node,) = (each for each in scrape["relabelings"] if each["targetLabel"] == "node")
    assert node["sourceLabels"] == ["__meta_kubernetes_pod_node_name"]


@pytest.mark.real
def test_another_account_may_scrape_and_another_certificate_may_serve() -> None:
    made = _render(SCRAPED, "metrics.serviceAccount.name=prom,metrics.serviceAccount.namespace=mon",
                   "metrics.certificate.secretName=ours")  # fmt: skip
    subjects = _of(made, "ClusterRoleBinding", "gpu-nodeagent--metrics")["subjects"]
    assert {"kind": "ServiceAccount", "name": "prom", "namespace": "mon"} in subjects
    assert [each["metadata"]["name"] for each in made if each["kind"] == "Secret"] == [
        "nodeagent--metrics-token"
    ]
    (scrape,) = _of(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scrape["tlsConfig"]["ca"]["secret"]["name"] == "ours"
    made = _render(SCRAPED, "metrics.certificate.certManager.issuerRef.name=corp")
    wanted = _of(made, "Certificate")["spec"]
    assert wanted["issuerRef"] == {"name": "corp"}
    # Not the name of the chart's own: helm takes that one away, and cert-manager makes its own.
    issued = wanted["secretName"]
    assert issued not in [e["metadata"]["name"] for e in _render(SCRAPED) if e["kind"] == "Secret"]
    (scrape,) = _of(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scrape["tlsConfig"]["ca"]["secret"]["name"] == issued
    sources = _of(made, "DaemonSet")["spec"]["template"]["spec"]["volumes"][0]["projected"]
    assert [s["secret"]["name"] for s in sources["sources"] if "secret" in s] == [issued]


@pytest.mark.real
def test_a_prometheus_without_the_operator_is_let_in_by_its_account() -> None:
    """No kind of the operator is made: an API server that does not know it refuses the release."""
    made = _render("metrics.serviceAccount.name=prom,metrics.serviceAccount.namespace=mon")
    assert not {"PodMonitor", "PrometheusRule"} & {each["kind"] for each in made}
    subjects = _of(made, "ClusterRoleBinding", "gpu-nodeagent--metrics")["subjects"]
    assert {"kind": "ServiceAccount", "name": "prom", "namespace": "mon"} in subjects
    assert "ca.crt" in _of(made, "Secret", "nodeagent--metrics")["data"]
    (container,) = _of(made, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    assert "secure" in [each["name"] for each in container["ports"]]


@pytest.mark.real
def test_rules_are_those_of_the_alerts_and_link_where_the_site_says() -> None:
    for url, page in (("", "docs/runbook.md"), ("https://w.example/r", "https://w.example/r")):
        made = _render(f"prometheusRule.enabled=true,prometheusRule.runbookUrl={url}",
                       "prometheusRule.labels.release=p")  # fmt: skip
        rules = [each for each in made if each["kind"] == "PrometheusRule"]
        assert {each["metadata"]["labels"]["release"] for each in rules} == {"p"}
        there = {
            r["alert"]: r for each in rules for g in each["spec"]["groups"] for r in g["rules"]
        }
        assert there.keys() == alerts().keys()
        for name, rule in alerts().items():
            link = there[name]["annotations"].pop("runbook_url")
            assert link == f"{page}#{name.lower()}"
            rule["annotations"].pop("runbook_url")
            assert there[name] == rule


@pytest.mark.real
def test_dashboards_are_what_the_sidecar_looks_for() -> None:
    made = _render("dashboards.enabled=true")
    found = [each for each in made if "grafana_dashboard" in each["metadata"].get("labels", {})]
    there = {name: text for each in found for name, text in each["data"].items()}
    assert {each["metadata"]["labels"]["grafana_dashboard"] for each in found} == {"1"}
    for file in (REPO / "deploy" / "dashboards").glob("*.json"):
        assert there[file.name].strip() == file.read_text().strip()


REFUSED = {
    f"{SCRAPED},settings.admin.api.listen=0.0.0.0:9999": "metrics.port",
    f"{SCRAPED},settings.admin.api.cert_file=/c": "metrics.certificate.secretName",
    f"{SCRAPED},metrics.port=9470": "port 9470",
    f"{SCRAPED},settings.admin.api.listen=127.0.0.1:9471": "admin.api.listen is 127.0.0.1:9471",
    f"{SCRAPED},settings.admin.api.listen=localhost:9471": "admin.api.listen is localhost:9471",
    f"{SCRAPED},settings.admin.api.listen=[::1]:9471": "admin.api.listen is [::1]:9471",
    f"{SCRAPED},settings.admin.api.listen=10.0.0.17:9471": "admin.api.listen is 10.0.0.17:9471",
    f"{SCRAPED},metrics.serviceAccount.name=prometheus": "metrics.serviceAccount has name",
    f"{SCRAPED},metrics.serviceAccount.namespace=monitoring": "metrics.serviceAccount has name",
    f"{SCRAPED},metrics.certificate.certManager.issuerRef.kind=ClusterIssuer": "property 'name'",
    f"{SCRAPED},metrics.certificate.secretName=a,"
    "metrics.certificate.certManager.issuerRef.name=b": "name one of them",
    "metrics.podMonitor.interval=often": "interval",
    "metrics.podmonitor.enabled=true": "podmonitor",
    "prometheusRule.runbookUrl=wiki": "runbookUrl",
    "prometheusRule.enable=true": "enable",
}


@pytest.mark.real
@pytest.mark.parametrize("odd", REFUSED)
def test_what_nobody_could_scrape_is_refused_by_its_name(odd: str) -> None:
    done = _template(odd)
    assert done.returncode != 0
    assert REFUSED[odd] in done.stderr


def test_inhibition_rules_name_alerts_that_are_there_and_labels_that_both_have() -> None:
    rules = yaml.safe_load(INHIBIT.read_text())["inhibit_rules"]
    assert len(rules) > 5
    for rule in rules:
        of = {side: _matched(rule[f"{side}_matchers"]) for side in ("source", "target")}
        for names in of.values():
            assert names and names <= alerts().keys()
            for name in names:
                assert set(rule["equal"]) <= _labels(alerts()[name]["expr"]), (name, rule["equal"])
        assert not of["source"] & of["target"]


def _matched(matchers: list[str]) -> set[str]:
    (names,) = (m[1] for each in matchers if (m := re.match(r"alertname =~? (.*)", each)))
    return set(names.strip('"').split("|"))


def _labels(expression: str) -> set[str]:
    """Labels of an alert: of its outermost aggregation, or all where there is none."""
    of_target = {"cluster", "node", "instance", "component", "dataset", "rule"}
    by = re.match(r"\s*\(?\s*(?:sum|count|max) by \(([^)]*)\)", expression)
    return set(re.split(r",\s*", by[1])) if by else of_target


@pytest.mark.real
def test_no_pool_takes_a_name_of_it() -> None:
    pools = [f"pools.{name}.nodeSelector.a=b" for name in ("metrics", "dashboard-node", "agent")]
    made = _render(ALL, *pools)
    names = [(each["kind"], each["metadata"]["name"]) for each in made]
    assert len(names) == len(set(names))
