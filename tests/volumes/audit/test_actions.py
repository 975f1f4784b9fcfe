"""Actions on real devices: orphans, panic flags, taints; what they refuse, and their journal."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from kit.findings import Finding, Severity
from tests.volumes.audit.stage import Stage, run, settings, watching
from volumes.actions import hands, journal, plan, runner
from volumes.audit.settings import ActionSettings
from volumes.rules.base import GuardView

pytestmark = pytest.mark.real

ORPHANS = {"actions": {"unmap_orphan": "on", "orphan_after": "1s"}}
SOON = {"rules": {"mapped-unmounted": {"patience": "1s"}}}


def size(device: str) -> int:
    return int(Path(f"/sys/block/{device}/size").read_text())


async def test_an_orphan_is_unmapped_only_when_asked_to(stage: Stage) -> None:
    device = stage.loop()
    async with watching(stage, settings(stage, **SOON)) as watch:
        found = await watch.finding(device, "mapped-unmounted")
        result = await watch.audit.act(found["id"], dry_run=True)
        assert result["outcome"] == "refused"
        assert "orphan_after" in result["detail"]
        assert size(device) > 0
        short = settings(stage, **SOON, actions={"orphan_after": "1s"})
        await watch.audit.reconcile(short)
        assert (await watch.audit.act(found["id"], dry_run=True))["outcome"] == "dry-run"
        assert size(device) > 0
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "done", result
        assert size(device) == 0


async def test_a_mapping_that_kubelet_has_a_record_of_is_no_orphan(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    run("umount", target)
    async with watching(stage, settings(stage, **SOON, **ORPHANS)) as watch:
        found = await watch.finding(device, "mapped-unmounted")
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "refused"
        assert "record" in result["detail"]
        assert size(device) > 0


async def test_a_mapping_that_a_process_has_open_is_not_unmapped(stage: Stage) -> None:
    device = stage.loop()
    pid = stage.holder("fd", f"/dev/{device}")
    async with watching(stage, settings(stage, **SOON, **ORPHANS)) as watch:
        found = await watch.finding(device, "mapped-unmounted")
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] in ("refused", "gone"), result
        assert size(device) > 0
        assert stage.is_alive(pid)


def test_an_nbd_device_is_unmapped_only_when_nobody_claims_it_or_has_it_open(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No nbd in this kernel: a loop device stands in, and a script for rbd-nbd."""
    device = stage.loop(fs=None)
    called = stage.folder / "called"
    tool = stage.folder / "rbd-nbd"
    tool.write_text(f"#!/bin/sh\necho $* >> {called}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(stage.folder), prepend=":")
    home = Path("/sys/block", device)
    major, minor = (home / "dev").read_text().strip().split(":")
    number, sequence = [int(major), int(minor)], int((home / "diskseq").read_text())

    def unmap() -> int:
        return hands.unmap(device, "nbd", number, sequence, "")

    claim = os.open(f"/dev/{device}", os.O_RDONLY | os.O_EXCL)
    with pytest.raises(OSError, match="busy"):
        unmap()
    os.close(claim)
    pid = stage.holder("fd", f"/dev/{device}")
    with pytest.raises(kit.errors.RefusedError, match=rf"pid {pid} .*has it open"):
        unmap()
    assert not called.exists()
    stage.end(pid)
    assert unmap() == 1
    assert called.read_text() == f"unmap /dev/{device}\n"


async def test_an_unreadable_device_is_flagged_read_only(stage: Stage) -> None:
    device = stage.loop()
    view = GuardView(enforcing=True, unreadable=(device,))
    on = settings(stage, actions={"set_readonly": "on"})
    async with watching(stage, on, guard=lambda: view) as watch:
        flag = Path(f"/sys/block/{device}/ro")
        try:
            await watch.until(lambda: flag.read_text().strip() == "1", "flagged")
            entries = await watch.until(
                lambda: [
                    e
                    for e in watch.audit.runner.journal.last
                    if e["device"] == device and e["outcome"] != "begun"
                ]
            )
            assert entries[0]["outcome"] == "done"
        finally:
            run("blockdev", "--setrw", f"/dev/{device}")  # it sticks to the minor


async def test_a_mounted_device_is_not_flagged(stage: Stage) -> None:
    device = stage.loop()
    stage.staged(device)
    view = GuardView(enforcing=True, unreadable=(device,))
    async with watching(stage, settings(stage), guard=lambda: view) as watch:
        steps = [p for p in watch.audit.plans() if p.device == device]
        assert "mounted" in steps[0].refusal


class _Taints:
    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    async def set(self, key: str, wanted: bool, reason: str) -> None:
        self.calls.append((key, wanted))


async def test_the_node_is_tainted_while_a_critical_finding_stands(tmp_path: Path) -> None:
    taints = _Taints()
    hands = runner.Runner(tmp_path, taints)
    on = ActionSettings(taint="on")
    critical = Finding("leaked-mount/x", "leaked-mount", Severity.CRITICAL, "x", "m", "a")
    for found in ([], [critical], [critical], []):
        await hands.taint(found, on)
    # What an earlier agent left is not known: the first round sets it either way.
    assert taints.calls == [(runner.TAINT_KEY, wanted) for wanted in (False, True, False)]
    assert [e["outcome"] for e in hands.journal.last] == ["done", "done"]


async def test_a_taint_of_an_earlier_agent_is_taken_off_and_a_dry_run_is_no_taint(
    tmp_path: Path,
) -> None:
    critical = Finding("leaked-mount/x", "leaked-mount", Severity.CRITICAL, "x", "m", "a")
    taints = _Taints()
    await runner.Runner(tmp_path, taints).taint([], ActionSettings(taint="on"))
    assert taints.calls == [(runner.TAINT_KEY, False)]

    taints = _Taints()
    hands = runner.Runner(tmp_path, taints)
    await hands.taint([critical], ActionSettings(taint="dry-run"))
    assert taints.calls == []
    for mode in ("on", "off"):
        await hands.taint([critical], ActionSettings(taint=mode))
    assert taints.calls == [(runner.TAINT_KEY, True), (runner.TAINT_KEY, False)]


async def test_the_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "LARGEST", 2000)
    book = journal.Journal(tmp_path / "a" / "actions.jsonl")
    for number in range(200):
        await book.write({"number": number, "pad": "x" * 80})
    files = sorted((tmp_path / "a").iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size < 2300 for file in files)
    last = [json.loads(line) for line in (tmp_path / "a/actions.jsonl").read_text().splitlines()]
    assert last[-1]["number"] == 199
    assert len(book.last) == journal.LAST


async def test_a_deed_that_is_cut_off_is_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = asyncio.Event()

    async def for_ever(*_: object, **__: object) -> int:
        under_way.set()
        await asyncio.sleep(3600)
        return 1

    monkeypatch.setattr("kit.child.call", for_ever)
    arguments = {"path": "/dev/x", "device": (7, 0), "diskseq": 1}
    step = plan.Plan(plan.READ_ONLY, "unreadable/x", "x", "set x read-only", arguments)

    async def again() -> list[plan.Plan]:
        return [step]

    hands = runner.Runner(tmp_path)
    task = asyncio.create_task(hands.run(step, ActionSettings(set_readonly="on"), again))
    await under_way.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    (line,) = (tmp_path / "volumes/actions.jsonl").read_text().splitlines()
    assert json.loads(line)["outcome"] == "begun"


async def test_actions_of_one_kind_are_limited(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    empty = stage.folder / "empty"
    empty.mkdir()
    stage.holder("chroot", empty, stage.folder)
    async with watching(stage, settings(stage, actions={"per_hour": 1})) as watch:
        run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert watch.audit.runner._within_limit("detach-leaked", 1)
        result: dict[str, Any] = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "limited"


async def test_a_finding_that_nothing_can_be_done_about_says_so(stage: Stage) -> None:
    async with watching(stage, settings(stage)) as watch:
        with pytest.raises(kit.errors.NotFoundError):
            await watch.audit.act("nonsense", dry_run=True)
