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
from volumes.settings import ActionSettings

STEP = actions.ActionPlan("leaked-mount/x", "x", "unmount /x", ("", 1, 2, []))


async def again() -> list[actions.ActionPlan]:
    return [STEP]


@pytest.mark.real
async def test_actions_are_limited(stage: Stage) -> None:
    device = stage.loop()
    target, _ = stage.staged(device)
    stage.chrooted()
    async with watching(stage, settings(stage, actions={"per_hour": 1})) as watch:
        run("umount", target)
        found = await watch.finding(device, "leaked-mount")
        assert watch.audit.runner._within_limit(1)
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
        actions.Runner(tmp_path).run(STEP, ActionSettings(detach_leaked="on"), again)
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
    dry = ActionSettings(detach_leaked="dry-run")
    assert hands.due([STEP], dry) == [STEP]
    await hands.run(STEP, dry, again)
    assert hands.due([STEP], dry) == []  # it was reported a moment ago
