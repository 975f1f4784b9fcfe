"""The dashboards: they are whole, and each of their queries shows something of a real agent."""

import functools
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml

from nodeagent.api import figures
from tests.testbed import agent, census, ports, trees, waiting
from tests.testbed.prometheus import SCRAPE_SECONDS, Prometheus

FOLDER = Path(__file__).parents[2] / "deploy" / "dashboards"
BOARDS = {file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))}
# What a node that is well does not show; the census shows all of these.
NEEDS = {
    "Volumes of pods": "the kubelet has mounted a volume of ours",
    "Oldest scrub": "a scrub of a whole dataset has ended",
    "Oldest snapshot": "a dataset's source is a snapshot",
    "API server": "the settings have a cluster",
    "API server and registries": "the settings have a cluster",
    "Components that are not ready": "a component is not ready",
    "Findings": "something is found",
    "Nodes with findings": "something is found",
    "What guard and audit find": "a volume is in trouble",
    "Rules of the audit that are blind": "a rule cannot be evaluated",
    "Slowest nodes": "a dataset is not complete",
    "Do the GPUs wait for data?": "the node has a GPU",
}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in board["panels"] if each["type"] != "row"]


def queries(node: str) -> list[tuple[str, str]]:
    """Title and query of every panel and variable, with Grafana's variables replaced."""
    found = [
        (panel["title"], target["expr"])
        for board in BOARDS.values()
        for panel in panels(board)
        for target in panel["targets"]
    ]
    found += [
        (
            f"variable {each['name']}",
            re.sub(r"label_values\((\w+), \w+\)", r"\1", each["definition"]),
        )
        for board in BOARDS.values()
        for each in board["templating"]["list"]
        if each["type"] == "query"
    ]
    wide = f"{10 * SCRAPE_SECONDS}s"
    return [
        (title, text.replace("$node", node).replace("$__rate_interval", wide))
        for title, text in found
    ]


def test_there_are_two() -> None:
    assert list(BOARDS) == ["fleet", "node"]
    assert len({board["uid"] for board in BOARDS.values()}) == 2
    for board in BOARDS.values():
        for link in board["links"]:
            assert link["url"].removeprefix("/d/") in {each["uid"] for each in BOARDS.values()}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_whole_and_do_not_overlap(name: str) -> None:
    every = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in panels(BOARDS[name]):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    taken: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]),
                                      range(at["y"], at["y"] + at["h"])))  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", BOARDS)
def test_a_node_is_shown_and_chosen_by_its_name(name: str) -> None:
    """Not by its address. Series of one target are joined by what makes it one."""
    for part in (*panels(BOARDS[name]), *BOARDS[name]["templating"]["list"]):
        text = json.dumps(part).replace("on(instance, job)", "")
        assert "instance" not in text, part.get("title", part.get("name"))


def test_promtool_takes_every_query(tmp_path: Path) -> None:
    rules = [
        {"record": f"q:{number}", "expr": text} for number, (_, text) in enumerate(queries("n1"))
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_queries_ask_for_series_that_the_agent_has(tmp_path: Path) -> None:
    families = figures.registry(census.agent(tmp_path, with_gpus=True).state).collect()
    there = {sample.name: set(sample.labels) for f in families for sample in f.samples}
    for title, text in queries("n1"):
        names = set(re.findall(r"\b(?:nodeagent|process)_\w+", text))
        assert names, title
        assert names <= there.keys(), title


@pytest.mark.real
@pytest.mark.timeout(180)
def test_every_query_returns_series_of_a_running_agent(area: Path, node: agent.Agent) -> None:
    """Of one with every room and a complete dataset; what needs a fault, of the census."""
    trees.plain(area / "source", 20)
    node.settings |= {
        "preheat": {"socket": str(area / "no.sock"), "images": [{"ref": "r.invalid/a:v1"}]},
        "volumes": {"guard": {"mode": "off"}},
    }
    node.add_dir("a", area / "source")
    node.start()
    node.wait_state("a", "complete")
    registry = figures.registry(census.agent(area / "census", with_gpus=True).state)
    port = ports.free(1)[0]
    server, _ = prometheus_client.start_http_server(port, "127.0.0.1", registry=registry)
    targets = {"node": f"127.0.0.1:{node.port}", "busy": f"127.0.0.1:{port}"}
    watcher = Prometheus(area / "prometheus", targets)
    try:
        for title, query in queries("node"):
            if title not in NEEDS:
                waiting.until(
                    functools.partial(watcher.ask, query), 30, f"series for {title}: {query}"
                )
        for title, query in queries("busy"):
            waiting.until(functools.partial(watcher.ask, query), 30, f"series for {title}: {query}")
    finally:
        watcher.end()
        server.shutdown()
        server.server_close()
    assert NEEDS.keys() <= {title for title, _ in queries("node")}
