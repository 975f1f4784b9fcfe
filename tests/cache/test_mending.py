"""What is bad in a generation beside the current one stays known until it is put right."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache import mending, scrub, scrub_order, tasks
from cache.dataset import Dataset
from cache.fill import protocol
from cache.generation import Generation
from cache.jobs import Jobs
from cache.running import Pass
from cache.settings import at_snapshot
from cache.soundness import Soundness
from cache.sources import base
from cache.store import generations
from cache.succession import Succession
from cache.versions import Step, next_step
from tests.cache.test_jobs import Source, complete, dataset, kept_in_memory

BAD = [(["d"], "f")]
REACHED = base.Reached("/nowhere", "1:1", "1:1", "slow")


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Dataset, Generation]:
    """A dataset with a damaged earlier generation, whose bad file is on its list."""
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    shown = dataset(tmp_path, Source(), freshness="follow")
    return shown, _beside(shown, "s1", state="complete", damaged=1, served=1.0)


def _answering() -> Source:
    made = Source()
    made.go.set()
    return made


def _beside(shown: Dataset, snapshot: str, **record: Any) -> Generation:
    made = shown.generation_of(at_snapshot(shown.settings.source, snapshot))
    made.source = _answering()
    made.record = dataclasses.replace(made.record, **record)
    Path(made.folder).mkdir(parents=True)
    generations.write_quarantined(Path(made.folder), BAD)
    if made.record.served:
        shown.earlier.append(made)
    return made


async def test_scrub_that_dies_forgets_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> None:
    shown, damaged = earlier
    damaged.leaves = True
    jobs = Jobs({"a": shown}, lambda: 0)
    scrubber = scrub.Scrubber({"a": shown}, jobs, Soundness(tmp_path))
    for end, left in (
        (protocol.End("failed", "killed"), 1),
        (protocol.End("good", verify=protocol.VerifyEnd()), 0),
    ):

        async def run(_: Pass, task: Any, end: protocol.End = end) -> protocol.End:
            return end

        monkeypatch.setattr(Pass, "run", run)
        chosen = scrub_order.Choice("a", scrub_order.CRASH, earlier=damaged.id)
        await scrubber._scrub(shown, damaged, chosen)
        assert (damaged.record.damaged, damaged.leaves) == (left, bool(left))


async def test_end_of_a_mend_is_not_told_of_what_serves_by_now(
    earlier: tuple[Dataset, Generation],
) -> None:
    shown, damaged = earlier
    end = protocol.End("bad", "no source", verify=protocol.VerifyEnd(unreplaced=1))
    async with mending.source_of(shown, damaged):
        pass
    assert damaged.reached is None
    await mending.ended(shown, damaged, end, "")
    assert damaged.unmended
    assert damaged.leaves
    damaged.unmended = damaged.leaves = False
    shown.earlier.remove(damaged)
    await mending.ended(shown, damaged, end, "")
    assert not damaged.unmended
    assert not damaged.leaves


async def test_rollback_whose_source_is_silent_keeps_the_damage_known(
    monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> None:
    shown, damaged = earlier
    damaged.leaves = True
    succession = Succession(shown, lambda: None)
    shown.chosen = {"snapshot": "s1", "instead": ""}
    assert next_step(succession.facts()) is Step.BACK

    async def silent(*_: Any, **__: Any) -> str:
        raise kit.errors.SourceError("the source", "it does not answer", "wait")

    async def answers(*_: Any, **__: Any) -> str:
        return ""

    async def published(*_: Any) -> None:
        pass

    monkeypatch.setattr(shown, "publish", published)
    monkeypatch.setattr(Generation, "reach", silent)
    with pytest.raises(kit.errors.SourceError):
        await succession._do(Step.BACK)
    assert (damaged.record.damaged, damaged.record.state, damaged.leaves) == (1, "complete", True)
    monkeypatch.setattr(Generation, "reach", answers)
    await succession._do(Step.BACK)
    assert shown.current is damaged
    now = damaged.record
    assert (now.damaged, now.state, now.failed, now.wanted) == (1, "partial", 1, True)
    assert shown.facts().bad, "they leave its tree before it is shown"
    assert not damaged.leaves


async def test_bad_files_that_an_update_has_linked_are_taken_out_before_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> None:
    shown, damaged = earlier
    coming = _beside(shown, "s2", state="filling")
    coming.reached, shown.coming = REACHED, coming
    limits = Jobs({"a": shown}, lambda: 0)._limits(shown, "verify")
    told = tasks.verify(shown, limits, source=False)
    assert isinstance(told, protocol.VerifyTask)
    assert told.also == [damaged.folder, coming.folder]

    ran: list[tuple[str, str]] = []

    async def run(of: Dataset, kind: str, task: Any, target: Generation) -> protocol.End:
        ran.append((kind, task.generation))
        if kind != "withdraw":
            return await complete()
        if task.part == "files":
            generations.write_quarantined(Path(task.generation), [])
        return protocol.End("withdrawn")

    jobs = Jobs({"a": shown}, lambda: 0)
    monkeypatch.setattr(jobs, "_run", run)
    monkeypatch.setattr(jobs.withdrawals, "_run", run)
    shown.update_queued = True
    await jobs._update(shown)
    kinds = ["withdraw", "withdraw", "update"]
    assert ran == [(kind, coming.folder) for kind in kinds]
    assert coming.record.state == "complete"

    # Found after the last fill: it is filled once more before it serves.
    generations.write_quarantined(Path(coming.folder), BAD)
    await Succession(shown, lambda: None)._do(Step.SWITCH)
    assert shown.coming is coming
    assert coming.record.state == "filling"
