"""Repair by a running audit on real devices: what it takes away, what it leaves, what it writes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import kit.child
from tests.testbed import constants, waiting
from tests.volumes.audit import stage as stages
from tests.volumes.audit.stage import Stage, run, settings, watching
from tests.volumes.audit.world import Cluster
from volumes.audit import executors, status
from volumes.audit.logs import matcher
from volumes.audit.types import GuardView
from volumes.guard import explain
from volumes.settings import RepairSettings

pytestmark = pytest.mark.real


def hit(device: str) -> matcher.Hit:
    line = f"rbd: {device}: encountered watch error: -107"
    return matcher.Hit("rbd-watch-lost", "kernel", line, {"device": device})


@contextlib.asynccontextmanager
async def broken(
    stage: Stage, device: str, cluster: Cluster | None = None, **repair: Any
) -> AsyncIterator[stages.Watching]:
    """An audit to which the device's session is broken: a line says so, and nobody can read it."""
    cluster = cluster or Cluster()
    view = GuardView(enforcing=True, unreadable=(device,))
    wanted = constants.made(RepairSettings, **{"mode": "on", "settle": "300ms", **repair})
    async with watching(
        stage, settings(stage), hits=[hit(device)], guard=lambda: view, repair=wanted,
        cluster=cluster,
    ) as watch:  # fmt: skip
        await watch.finding(device, "log-rbd-watch-lost")
        yield watch


def size(device: str) -> int:
    return int(Path(f"/sys/block/{device}/size").read_text())


def journal(stage: Stage) -> list[tuple[str, str]]:
    file = stage.folder / "state/volumes/actions.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(e["step"], e["outcome"]) for e in lines if e["action"] == "repair"]


def shown(watch: stages.Watching, device: str) -> dict[str, Any]:
    found = [e for e in status.overview(watch.audit)["repairs"] if e["device"] == device]
    return found[0] if found else {"next": "", "why": ""}


async def test_broken_mapping_goes_when_nothing_holds_it_and_the_taint_with_it(
    stage: Stage,
) -> None:
    device = stage.loop()
    target = stage.mount(device, stage.folder / "mnt")
    cluster = Cluster()
    async with broken(stage, device, cluster, taint=True, follow="1s") as watch:
        await watch.until(lambda: "in use" in shown(watch, device)["why"], "it waits")
        assert journal(stage) == [("taint", "begun"), ("taint", "done")]
        assert size(device) > 0
        run("umount", target)
        await watch.until(lambda: size(device) == 0, "it is unmapped")
        await watch.until(lambda: cluster.taints == [True, False], "the taint is gone")
        await watch.until(lambda: ("release", "done") in journal(stage), "the case is closed")
    assert journal(stage)[2:] == [
        ("unmap", "begun"), ("unmap", "done"), ("release", "begun"), ("release", "done"),
    ]  # fmt: skip


@pytest.mark.parametrize("what", ["fd", "mount elsewhere", "record", "claim", "silence"])
async def test_mapping_that_anything_holds_or_may_hold_stays(stage: Stage, what: str) -> None:
    device = stage.loop()
    cluster = Cluster()
    if what == "fd":
        stage.holder("fd", f"/dev/{device}")
    elif what == "mount elsewhere":
        target = stage.mount(device, stage.folder / "mnt")
        stage.chrooted()
        run("umount", target)
    elif what == "record":
        target, _ = stage.staged(device)
        run("umount", target)
    elif what == "claim":
        cluster.claim = "the cluster has pvc-1 attached to this node"
    else:
        cluster.silent = True
    async with broken(stage, device, cluster, settle="0s") as watch:
        words = {"fd": "has it open", "mount elsewhere": "in use", "record": "record",
                 "claim": "pvc-1 attached", "silence": "no answer"}  # fmt: skip
        await watch.until(lambda: words[what] in shown(watch, device)["why"], "why it waits")
        await watch.audit.round(full=True)
        await watch.audit.round(full=True)
        assert journal(stage) == []
        assert size(device) > 0


async def test_dry_run_says_it_once_and_off_says_what_it_would_do(stage: Stage) -> None:
    device = stage.loop()
    async with broken(stage, device, mode="dry-run") as watch:
        await watch.until(lambda: journal(stage), "the journal")
        for _ in range(3):
            await watch.audit.round(full=True)
        assert journal(stage) == [("unmap", "dry-run")]
        assert shown(watch, device)["next"] == "unmap"
    async with broken(stage, device, mode="off") as watch:
        await watch.audit.round(full=True)
        case = shown(watch, device)
        assert (case["mode"], case["next"]) == ("off", "wait")
        row: dict[str, Any] = {
            "device": f"/dev/{device}", "driver": "loop", "title": "t", "volume": "v",
            "verdict": None, "looked_seconds_ago": 1.0, "raw_block": False,
            "may_be_formatted": False, "reasons": [],
        }  # fmt: skip
        page = "\n".join(explain.page(row, None, [], "enforce", case))
        assert "repair     would do (it is off): wait" in page
        assert "Next: The mapping is broken and does not heal. Stop its pod" in page
    assert size(device) > 0


async def test_agent_killed_while_it_unmaps_goes_on_and_its_attempt_counts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = stage.loop()
    under_way = asyncio.Event()

    call = kit.child.call

    async def for_ever(function: Callable[..., Any], *words: Any, deadline: float) -> Any:
        if function is not executors.unmap:
            return await call(function, *words, deadline=deadline)
        under_way.set()
        await asyncio.Event().wait()
        return 1

    with monkeypatch.context() as patched:
        patched.setattr("volumes.audit.repairer.kit.child.call", for_ever)
        view = GuardView(enforcing=True, unreadable=(device,))
        wanted = constants.made(RepairSettings, mode="on", settle=0)
        async with watching(stage, settings(stage), guard=lambda: view, repair=wanted) as watch:
            watch.audit._log_hits([hit(device)])
            await asyncio.wait_for(under_way.wait(), waiting.limit(30))
    assert journal(stage) == [("unmap", "begun")]
    assert size(device) > 0
    async with broken(stage, device, per_volume=1) as watch:
        await watch.until(lambda: "attempts for this volume" in shown(watch, device)["why"])
        assert size(device) > 0
    async with broken(stage, device, per_volume=2) as watch:
        await watch.until(lambda: ("unmap", "done") in journal(stage), "the second attempt")
        assert size(device) == 0
    assert journal(stage)[:3] == [("unmap", "begun"), ("unmap", "begun"), ("unmap", "done")]
