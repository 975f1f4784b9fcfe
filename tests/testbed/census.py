"""An agent with as much to say as docs/metrics.md counts: every room and the cluster, ten datasets,
20 images, 20 volumes, findings of each room, and each counter that can have counted something.

Nothing is started and nothing is asked: the objects that metrics are read from are given what a
busy node gives them. So a family without a sample here is one that nobody can ever see.
"""

import functools
import itertools
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

import cache.component
import cache.csi.server
import kit.findings
import preheat.component
import volumes.component
from cache.csi import records
from cache.dataset import dataset, figures
from cache.store import identity
from cache.views.view import Stage
from linux import blockdev
from nodeagent import app, configfile, gpus
from nodeagent.cluster import service
from nodeagent.settings import ClusterSettings
from preheat.planning.desired import Request
from preheat.pulling.reconciler import Snapshot
from volumes.audit import actions, evaluate, repair
from volumes.audit.inventory import model
from volumes.audit.logs import follower, matcher
from volumes.guard import steps

DATASETS, IMAGES, VOLUMES = 10, 20, 20
# Of what a node that is in trouble reports: origin and severities.
_FINDINGS = {
    "cache": ("critical", "warning"),
    "preheat": ("critical", "warning"),
    "volumes.guard": ("critical", "warning"),
    "volume-audit": ("critical", "warning", "info"),
    "agent.cluster": ("warning",),
}
_GUARD_RULES = ("format-denied", "content-missing", "guard-not-in-force", "witness-silent")


def _names(word: str, count: int) -> list[str]:
    return [f"{word}-{number:02}" for number in range(count)]


def agent(folder: Path, *, with_gpus: bool = False) -> app.Agent:
    """Everything of it lies in ``folder``. ``with_gpus``: the node has some, which is counted
    apart. ImportError where gRPC is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.yaml").write_text(_settings(folder))
    made = app.Agent(folder / "agent.yaml", configfile.load_or_last(folder / "agent.yaml", None))
    rooms: dict[str, Any] = {each.room.name: each.component for each in made.state.running}
    _fill_cache(rooms["cache"], folder)
    _fill_preheat(rooms["preheat"])
    _fill_volumes(rooms["volumes"])
    for origin, severities in _FINDINGS.items():
        made.state.findings.report(origin, [_finding("rule", each) for each in severities])
    cluster = service.Cluster(ClusterSettings(namespace="n"), made.state.settings)
    made.state.metrics.append(cluster.metrics)
    made.state.metrics.append(functools.partial(gpus.stalls, lambda: 1.0))
    if with_gpus:
        found = gpus.Gpus()
        found._looks.append(0.5)
        found._count = 8
        made.state.metrics.append(found.metrics)
    return made


def _settings(folder: Path) -> str:
    datasets = "".join(
        f"    - {{name: {name}, freshness: frozen, source: {{kind: dir, path: {folder}/source}}}}\n"
        for name in _names("dataset", DATASETS)
    )
    images = "".join(f"    - {{ref: 'r.e/{name}:v1'}}\n" for name in _names("image", IMAGES))
    return (
        f"admin: {{socket: {folder}/admin.sock, metrics: '127.0.0.1:0'}}\n"
        f"state_dir: {folder}/state\n"
        f"cache:\n  store: {folder}/store\n  views: {folder}/views\n  csi: {{enabled: true}}\n"
        f"  datasets:\n{datasets}"
        f"preheat:\n  images:\n{images}"
        "volumes:\n  guard: {mode: 'off'}\n"
        "  clusters: [{name: ceph, monitors: ['192.0.2.1:6789'], user: a, secret_file: /no/such}]\n"
    )


def _finding(rule: str, severity: str) -> kit.findings.Finding:
    at = kit.findings.Severity(severity)
    return kit.findings.Finding(f"{rule}/{severity}", rule, at, "disk", "is gone", "look")


def _fill_cache(room: cache.component.Cache, folder: Path) -> None:
    room.csi._server = cache.csi.server.Server(room.csi.node)
    kubelet = room.csi._server._handlers()["csi.v1.Node"]
    for method in kubelet:
        room.csi._server.requests[method, "ok"] += 1
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION):
        room.csi._server.requests["publish", code.name.lower()] += 1
    for wanted in room.settings.datasets:
        made = dataset.Dataset(wanted, room.settings, folder / "state", lambda: None)
        made.stage = Stage.STORE
        then = time.time() - 6 * 86400
        marks = {identity.MADE: str(then)}
        record = made.generation
        made.figures = figures.Figures(files=2, bytes=2000, done_files=1, done_bytes=1000)
        made.current.record = replace(record, state="complete", scrubbed=then, marks=marks)
        room.datasets[made.name] = made
        room.csi.node.volumes[made.name] = records.DatasetVolume("id", made.view, made.name, "data")


def _fill_preheat(room: preheat.component.Preheat) -> None:
    refs = [f"r.e/{name}:v1" for name in _names("image", IMAGES)]
    requests = {ref: Request(ref, "policy", present=True) for ref in refs}
    room.reconciler.snapshot = Snapshot(requests=requests, at=1.0)


def _fill_volumes(room: volumes.component.Volumes) -> None:
    room._found = [_finding(rule, "critical") for rule in _GUARD_RULES]
    every = [
        blockdev.BlockDevice(f"rbd{number}", (250, number), "rbd", 2**30, False)
        for number in range(VOLUMES)
    ]
    room.guard.manager.known = {each.name: steps.Known(each) for each in every}
    audit = room.audit
    audit.inventory = model.Inventory(1.0, 0.1, deep=True, devices=tuple(every))
    states = itertools.cycle(evaluate.STATES)
    audit.states = [evaluate.RuleState(rule.name, next(states)) for rule in evaluate.RULES]
    audit.findings = [_finding(r.name, str(r.severity)) for r in evaluate.RULES[:5]]
    settings = follower.configuration(audit.settings.logs, (), audit.wanted.guard.drivers)
    audit.follower = follower.LogFollower(settings, lambda _: None)
    sources = [*(["kernel"] if settings.kernel else []), *(each.name for each in settings.sources)]
    audit.follower._past = {name: matcher.Counters() for name in sources}
    ends = ("done", "failed", "dry-run")
    audit.runner.counts = Counter((actions.DETACH, end) for end in ends)
    audit.repairer.counts = Counter((str(step), end) for step in repair.Step for end in ends)
