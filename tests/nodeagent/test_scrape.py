"""A real Prometheus scrapes an agent as the chart's PodMonitor says: the chart's certificate, a
token that the real API server gives for the chart's account, and the chart's right."""

import asyncio
import base64
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent import app
from nodeagent.api import listeners
from nodeagent.settings import ApiSettings, ClusterSettings, ReviewSettings
from tests.nodeagent.test_listeners import with_admin
from tests.testbed import kubernetes, ports, waiting
from tests.testbed.prometheus import Prometheus

CHART = Path(__file__).parents[2] / "deploy" / "chart"
SPACE = "default"


def _rendered() -> list[dict[str, Any]]:
    done = kubernetes.helm(
        "template", "nodeagent", str(CHART), "--namespace", SPACE, *kubernetes.IMAGE,
        "--set", "metrics.podMonitor.enabled=true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def _certificate(made: list[dict[str, Any]]) -> str:
    secrets = {
        e["metadata"]["name"]: e["data"] for e in made if e["kind"] == "Secret" and "data" in e
    }
    return str(secrets["nodeagent--metrics"]["tls.crt"])


def _token(kube: kubernetes.Kubernetes, secret: str) -> str:
    """What the cluster has filled in; empty before."""
    words = ("get", "secret", secret, "-n", SPACE, "-o", "jsonpath={.data.token}")
    return base64.b64decode(kube.kubectl(*words)).decode()


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_prometheus_scrapes_by_the_chart_and_a_stranger_does_not(
    kube: kubernetes.Kubernetes, agent: app.Agent, tmp_path: Path
) -> None:
    made = _rendered()
    ours = [
        each for each in made
        if each["metadata"]["name"].endswith(("nodeagent--metrics", "nodeagent--metrics-token"))
        or each["metadata"]["name"] == f"{SPACE}-nodeagent-reviews"
        or (each["kind"], each["metadata"]["name"]) == ("ServiceAccount", "nodeagent")
    ]  # fmt: skip
    kube.apply(*ours)
    (scrape,) = next(e for e in made if e["kind"] == "PodMonitor")["spec"]["podMetricsEndpoints"]
    data = next(
        each["data"] for each in ours
        if each["kind"] == "Secret" and each["metadata"]["name"] == "nodeagent--metrics"
    )  # fmt: skip
    # An upgrade finds the certificate and keeps it: agents and Prometheus stay of one mind.
    again = kube.helm(
        "template", "nodeagent", str(CHART), "--namespace", SPACE, *kubernetes.IMAGE,
        "--set", "metrics.podMonitor.enabled=true", "--dry-run=server",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert data["tls.crt"] in again.stdout and data["tls.key"] in again.stdout
    assert data["tls.crt"] != _certificate(_rendered()), "each rendering without the cluster is new"
    for name, text in data.items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
        (tmp_path / name).chmod(0o400)
    held = scrape["authorization"]["credentials"]["name"]
    token = waiting.until(lambda: _token(kube, held), 30, "the cluster to fill in the token")
    own = tmp_path / "own"
    own.write_text(kube.kubectl("create", "token", "nodeagent", "-n", SPACE).strip())
    stranger = kube.kubectl("create", "token", "default", "-n", SPACE).strip()
    (port,) = ports.free(1)
    api = ApiSettings(
        listen=f"127.0.0.1:{port}", cert_file=tmp_path / "tls.crt", key_file=tmp_path / "tls.key",
        kubernetes=ReviewSettings(),
    )  # fmt: skip
    with_admin(agent, api=api)
    cluster = ClusterSettings(
        server=f"https://127.0.0.1:{kube.api_port}",
        ca_file=kube.folder / "pki" / "ca.crt", token_file=own,
    )  # fmt: skip
    changes = {"node": "n1", "kubernetes": cluster}
    agent.state.settings = agent.state.settings.model_copy(update=changes)
    tls = {"ca_file": str(tmp_path / "ca.crt"), "server_name": scrape["tlsConfig"]["serverName"]}
    async with listeners.serving(agent.state):
        for whose, text, up in (("ours", token, "1"), ("strangers", stranger, "0")):
            secret = tmp_path / f"{whose}.token"
            secret.write_text(text)
            with _scraping(
                tmp_path / whose, {"n1": api.listen}, scheme=scrape["scheme"],
                metrics_path=scrape["path"], tls_config=tls,
                authorization={"type": "Bearer", "credentials_file": str(secret)},
            ) as watcher:  # fmt: skip

                async def ask(query: str, of: Prometheus = watcher) -> list[dict[str, Any]]:
                    return await asyncio.to_thread(of.ask, query)

                (seen,) = await waiting.until_async(functools.partial(ask, "up"), 30, "a scrape")
                assert seen["value"][1] == up, whose
                assert bool(await ask("nodeagent_component_ready")) is (up == "1"), whose


@contextlib.contextmanager
def _scraping(folder: Path, targets: dict[str, str], **more: Any) -> Iterator[Prometheus]:
    watcher = Prometheus(folder, targets, **more)
    try:
        yield watcher
    finally:
        watcher.end()
