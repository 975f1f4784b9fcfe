"""A generation beside the current one in which files are bad retires, and is not read wrong."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from cache import status
from cache.dataset import choices, leaving
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Verification
from cache.dataset.generation import Generation
from cache.dataset.succession import Succession
from cache.dataset.update_step import Step, next_step
from cache.fill import protocol
from cache.settings import at_snapshot
from cache.sources import base, kinds
from cache.space import tasks
from cache.store import generations
from cache.store.soundness import Soundness
from cache.work import scrub, scrub_order
from cache.work.jobs import Jobs
from cache.work.running import Pass
from tests.cache.work.test_jobs import Source, complete, dataset, kept_in_memory

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


async def test_generation_in_which_a_scrub_finds_bad_files_retires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> None:
    shown, damaged = earlier
    scrubber = scrub.Scrubber({"a": shown}, Jobs({"a": shown}, lambda: 0), Soundness(tmp_path))
    for end, left in (
        (protocol.End("failed", "killed"), []),
        (protocol.End("good", verify=protocol.VerifyEnd()), []),
        (protocol.End("bad", verify=protocol.VerifyEnd(bad=2, unreplaced=2)), [damaged]),
    ):

        async def run(_: Pass, task: Any, end: protocol.End = end) -> protocol.End:
            return end

        monkeypatch.setattr(Pass, "run", run)
        await scrubber._scrub(shown, damaged, scrub_order.Choice("a", "crash", earlier=damaged.id))
        assert shown.retired == left
    assert not shown.earlier
    assert (damaged.record.damaged, damaged.record.state, damaged.leaves) == (2, "complete", True)
    assert "generation-damaged" in [each.rule for each in status.of_scrubs(shown)]


async def test_verify_retires_those_that_share_what_is_bad(
    earlier: tuple[Dataset, Generation],
) -> None:
    """Also once more in one that retires already, which a pod may hold."""
    shown, damaged = earlier
    found = protocol.VerifyEnd(also={damaged.folder: 1})
    for known in (2, 3):
        damaged.leaves = False
        assert await leaving.found_also(shown, found) == 1
        assert (shown.earlier, shown.retired) == ([], [damaged])
        assert (damaged.record.damaged, damaged.leaves) == (known, True)
    shown.retired.clear()  # it serves again
    damaged.leaves = False
    await leaving.retire(shown, damaged, 7)
    assert (damaged.record.damaged, damaged.leaves) == (3, False)


@pytest.fixture
async def retired(
    monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> tuple[Succession, Generation, list[str]]:
    """It is mounted by its id. The list tells what is done with it."""
    shown, damaged = earlier
    await leaving.retire(shown, damaged, 1)
    jobs, did = Jobs({"a": shown}, lambda: 0), list[str]()

    async def run(of: Dataset, kind: str, task: Any, target: Generation) -> protocol.End:
        did.append(task.part)
        assert (target, task.source) == (damaged, damaged.layer), "no source is needed"
        return protocol.End("withdrawn")

    async def leave(_: Dataset, each: Generation) -> None:
        did.append("leave")
        await each.source.reach(1.0, serve=True)

    monkeypatch.setattr(jobs.withdrawals, "_run", run)
    monkeypatch.setattr(leaving, "leave", leave)
    shown.withdraw = jobs.withdrawals.of
    succession = Succession(shown, lambda: None)
    succession._shown = {damaged.id}
    return succession, damaged, did


async def test_retired_one_shows_its_source_before_bad_files_leave_its_tree(
    retired: tuple[Succession, Generation, list[str]],
) -> None:
    succession, damaged, did = retired
    assert await succession._leave()
    assert succession.shown == set()
    shown = succession.dataset
    shown.verification = Verification("running")
    assert not await succession._leave(), "a pass runs"
    shown.verification = Verification()
    assert await succession._leave()
    assert did == ["leave", "hide"]
    assert not await succession._leave()
    assert damaged.record.damaged == 1, "they stay on its list"
    succession._retire_at = 0.0
    assert next_step(succession.facts()) is Step.RETIRE


async def test_bad_files_are_taken_out_when_the_source_is_silent(
    monkeypatch: pytest.MonkeyPatch, retired: tuple[Succession, Generation, list[str]]
) -> None:
    """Then nobody reads wrong bytes by its id, which shows the tree on."""
    succession, damaged, did = retired

    async def silent(*_: Any, **__: Any) -> base.Reached:
        raise kit.errors.SourceError("the source", "it does not answer", "wait")

    monkeypatch.setattr(damaged.source, "reach", silent)
    with pytest.raises(kit.errors.SourceError):
        await succession._leave()
    assert await succession._leave()
    assert did == ["leave", "hide"]
    assert succession.shown == {damaged.id}
    succession._leave_at = 0.0
    assert not await succession._leave(), "nothing of it is wrong any more"


async def test_rollback_to_a_damaged_one_fills_it_again(
    monkeypatch: pytest.MonkeyPatch, retired: tuple[Succession, Generation, list[str]]
) -> None:
    succession, damaged, _ = retired
    shown = succession.dataset

    async def kept(**_: Any) -> None:
        pass

    monkeypatch.setattr(shown, "save_state", kept)
    with pytest.raises(kit.errors.SourceError):
        await choices.rollback(succession)
    assert shown.chosen == {}, "its source must answer"

    async def answers(*_: Any, **__: Any) -> base.Reached:
        return REACHED

    monkeypatch.setattr(
        type(kinds.source_of(shown.settings, shown.state_dir, shown.claim)), "reach", answers
    )
    await choices.rollback(succession)
    assert shown.chosen["snapshot"] == "s1"
    assert next_step(succession.facts()) is Step.BEGIN
    await succession._do(Step.BEGIN)
    assert (shown.next, shown.retired) == (damaged, [])
    assert next_step(succession.facts()) is Step.SWITCH
    await succession._do(Step.SWITCH)
    assert (shown.next, damaged.record.state) == (damaged, "filling"), "it lacks its bad files"


def test_next_agent_knows_that_it_retires(
    monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> None:
    shown, damaged = earlier
    current = dataclasses.replace(shown.generation, served=2.0, state="complete")
    again = dataset(Path(shown.store).parent, Source(), freshness="follow")
    found = {shown.folder: current, damaged.folder: damaged.record}
    kept: dict[str, Any] = {folder: dataclasses.asdict(each) for folder, each in found.items()}
    Succession(again, lambda: None).adopt(kept)
    (left,) = again.retired
    assert (left.id, left.leaves, again.earlier) == (damaged.id, True, [])


async def test_bad_files_that_an_update_has_linked_are_taken_out_before_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, earlier: tuple[Dataset, Generation]
) -> None:
    shown, damaged = earlier
    next_one = _beside(shown, "s2", state="filling")
    next_one.reached, shown.next = REACHED, next_one
    limits = Jobs({"a": shown}, lambda: 0)._limits(shown, "verify")
    told = tasks.verify(shown, shown.current, limits)
    assert isinstance(told, protocol.VerifyTask)
    assert told.also == [next_one.folder, damaged.folder]

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
    next_one.queued = True
    await jobs._fill(shown, next_one)
    kinds = ["withdraw", "withdraw", "update"]
    assert ran == [(kind, next_one.folder) for kind in kinds]
    assert shown.next.record.state == "complete"

    # Found after the last fill: it is filled once more before it serves.
    generations.write_quarantined(Path(next_one.folder), BAD)
    await Succession(shown, lambda: None)._do(Step.SWITCH)
    assert shown.next is next_one
    assert next_one.record.state == "filling"
