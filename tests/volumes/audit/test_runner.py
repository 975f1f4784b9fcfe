"""Actions of a running audit: what they do, what they refuse, limits and journal."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.files
from tests.volumes.audit.stage import Stage, run, settings, watching
from volumes.audit import actions
from volumes.audit.settings import ActionSettings
from volumes.audit.types import GuardView

ORPHANS = {"actions": {"unmap_orphan": "on", "orphan_after": "1s"}}
SOON = {"rules": {"mapped-unmounted": {"patience": "1s"}}}
STEP = actions.Plan(actions.READ_ONLY, "set-readonly/x", "x", "flag x", ("/dev/x", (7, 0), 1))


def size(device: str) -> int:
    return int(Path(f"/sys/block/{device}/size").read_text())


async def again() -> list[actions.Plan]:
    return [STEP]


@pytest.mark.real
async def test_unmap_orphan_waits_and_acts_only_when_asked(stage: Stage) -> None:
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


@pytest.mark.real
async def test_unmap_orphan_refuses_a_device_with_a_record(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    run("umount", target)
    async with watching(stage, settings(stage, **SOON, **ORPHANS)) as watch:
        found = await watch.finding(device, "mapped-unmounted")
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "refused"
        assert "record" in result["detail"]
        assert size(device) > 0


@pytest.mark.real
async def test_unmap_orphan_spares_an_opened_device(stage: Stage) -> None:
    device = stage.loop()
    pid = stage.holder("fd", f"/dev/{device}")
    async with watching(stage, settings(stage, **SOON, **ORPHANS)) as watch:
        found = await watch.finding(device, "mapped-unmounted")
        result = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] in ("refused", "gone"), result
        assert size(device) > 0
        assert stage.is_alive(pid)


@pytest.mark.real
async def test_set_readonly_flags_an_unreadable_device(stage: Stage) -> None:
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
                    for e in watch.audit.runner.last
                    if e["device"] == device and e["outcome"] != "begun"
                ]
            )
            assert entries[0]["outcome"] == "done"
        finally:
            run("blockdev", "--setrw", f"/dev/{device}")  # it sticks to the minor


@pytest.mark.real
async def test_set_readonly_spares_a_mounted_device(stage: Stage) -> None:
    device = stage.loop()
    stage.staged(device)
    view = GuardView(enforcing=True, unreadable=(device,))
    async with watching(stage, settings(stage), guard=lambda: view) as watch:
        steps = [p for p in watch.audit.plans() if p.device == device]
        assert "mounted" in steps[0].refusal


@pytest.mark.real
async def test_actions_of_a_kind_are_limited(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    stage.chrooted()
    async with watching(stage, settings(stage, actions={"per_hour": 1})) as watch:
        run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert watch.audit.runner._within_limit("detach-leaked", 1)
        result: dict[str, Any] = await watch.audit.act(found["id"], dry_run=False)
        assert result["outcome"] == "limited"


@pytest.mark.real
async def test_act_on_a_finding_without_action_is_not_found(stage: Stage) -> None:
    async with watching(stage, settings(stage)) as watch:
        with pytest.raises(kit.errors.NotFoundError):
            await watch.audit.act("nonsense", dry_run=True)


async def test_interrupted_action_stays_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = asyncio.Event()

    async def for_ever(*_: object, **__: object) -> int:
        under_way.set()
        await asyncio.Event().wait()
        return 1

    monkeypatch.setattr("kit.child.call", for_ever)
    task = asyncio.create_task(
        actions.Runner(tmp_path).run(STEP, ActionSettings(set_readonly="on"), again)
    )
    await under_way.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (line,) = (tmp_path / "volumes/actions.jsonl").read_text().splitlines()
    assert json.loads(line)["outcome"] == "begun"


async def test_journal_is_bounded_on_disk_and_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit.files, "LARGEST_LOG", 2000)
    hands = actions.Runner(tmp_path)
    for _ in range(200):
        await hands.run(STEP, ActionSettings(), again, dry_run=True)
    files = sorted((tmp_path / "volumes").iterdir())
    assert [file.name for file in files] == ["actions.jsonl", "actions.jsonl.1"]
    assert all(file.stat().st_size < 2600 for file in files)
    last = json.loads(files[0].read_text().splitlines()[-1])
    assert (last["outcome"], last["finding"]) == ("dry-run", STEP.finding)
    assert len(hands.last) == 100


async def test_journal_on_a_failing_disk_does_not_stop_the_action(tmp_path: Path) -> None:
    (tmp_path / "volumes").write_text("not a directory")
    result = await actions.Runner(tmp_path).run(STEP, ActionSettings(), again, dry_run=True)
    assert result["outcome"] == "dry-run"


async def test_due_leaves_out_modes_that_are_off_and_repeats(tmp_path: Path) -> None:
    hands = actions.Runner(tmp_path)
    assert hands.due([STEP], ActionSettings()) == []
    dry = ActionSettings(set_readonly="dry-run")
    assert hands.due([STEP], dry) == [STEP]
    await hands.run(STEP, dry, again)
    assert hands.due([STEP], dry) == []  # it was reported a moment ago
