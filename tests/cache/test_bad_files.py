"""Files that a verify found bad while their source was away: never served as good, never forgotten.

The list of bad files on the disk says what is to be done, not what an agent remembers.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
from cache import status
from cache.dataset.action import Action, next_action
from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.dataset.succession import Succession
from cache.fill import protocol, verify
from cache.store import generations
from cache.work.jobs import Jobs
from tests.cache import passes
from tests.cache.work.test_jobs import Source, dataset, kept_in_memory
from tests.testbed import trees
from tests.testbed.agent import Agent
from tests.testbed.damage import flip

NAME = "d3/f00003"
BAD = [(["d3"], "f00003")]


# --- what an agent knows


async def withdrawing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> tuple[Dataset, Jobs, list[str]]:
    """A dataset with a bad file on its list; the parts of withdrawals that ran."""
    monkeypatch.setattr(Generation, "change", kept_in_memory)
    source = Source(answers=answers)
    source.go.set()
    shown = dataset(folder, source)
    Path(shown.folder).mkdir(parents=True)
    generations.write_quarantined(Path(shown.folder), BAD)
    jobs, ran = Jobs({"a": shown}, lambda: 0), []

    async def run(of: Dataset, kind: str, task: Any, target: Any = None) -> protocol.End:
        ran.append(task.part)
        if task.part == "files":
            generations.write_quarantined(Path(task.generation), [])
        return protocol.End("withdrawn", withdrawn=1)

    async def published(*_: Any) -> None:
        pass

    monkeypatch.setattr(jobs.withdrawals, "_run", run)
    monkeypatch.setattr(shown, "publish", published)
    return shown, jobs, ran


async def test_bad_file_is_taken_out_while_the_source_is_away_and_stays_on_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, jobs, ran = await withdrawing(tmp_path, monkeypatch, answers=False)
    end = protocol.End("bad", verify=protocol.VerifyEnd(bad=1, unreplaced=1))
    withdrawn, why = await jobs.withdrawals.take_out_bad(shown, end)
    assert (withdrawn, ran) == (1, ["hide"])
    assert "until the source answers" in why
    now = shown.generation
    assert (now.state, now.damaged, now.failed, now.wanted) == ("partial", 1, 1, True)
    assert not shown.whole()
    assert generations.has_quarantined(shown.folder)
    assert not shown.facts().bad, "nothing more can be done"
    assert [each.rule for each in status.findings({"a": shown}, [])].count("store-bad-files") == 1
    # It answers.
    assert isinstance(shown.source, Source)
    shown.source.answers = True
    await shown.reach()
    assert shown.facts().bad
    assert await jobs.withdrawals.finish(shown)
    assert ran == ["hide", "marks", "files"]
    assert not generations.has_quarantined(shown.folder)
    now = shown.generation
    assert (now.state, now.damaged, now.wanted) == ("partial", 0, True)
    assert shown.facts().fill_wanted


async def test_what_a_killed_verify_had_listed_is_withdrawn_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, jobs, ran = await withdrawing(tmp_path, monkeypatch, answers=True)
    await jobs.withdrawals.take_out_bad(shown, protocol.End("failed", "it hung"))
    assert ran == ["marks", "files"]
    assert (shown.generation.state, shown.generation.damaged) == ("partial", 0)


async def test_source_that_went_since_its_last_look_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the withdrawal fails for as long as it is away, and the bad file is served."""
    shown, jobs, ran = await withdrawing(tmp_path, monkeypatch, answers=True)
    await shown.reach()

    async def run(of: Dataset, kind: str, task: Any, target: Any = None) -> protocol.End:
        ran.append(task.part)
        return protocol.End("withdrawn" if task.part == "hide" else "failed", "it is away")

    monkeypatch.setattr(jobs.withdrawals, "_run", run)
    await jobs.withdrawals.take_out_bad(shown, protocol.End("failed"))
    assert next_action(shown.facts()) is Action.REACH
    assert isinstance(shown.source, Source)
    shown.source.answers = False
    with pytest.raises(kit.errors.SourceError):
        await shown.reach()
    assert next_action(shown.facts()) is Action.WITHDRAW
    assert not await jobs.withdrawals.finish(shown)
    assert ran == ["marks", "hide"]


@pytest.mark.parametrize("state", ["complete", "partial", "filling"])
@pytest.mark.parametrize("readable", [True, False])
def test_starting_agent_reads_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, readable: bool
) -> None:
    left = dataset(tmp_path, Source())
    left.settings.source.path.mkdir()  # type: ignore[union-attr]
    fields = {"state": state, "identity": left.generation.identity, "served": 5.0, "dataset": "a"}
    generations.save(left.folder, fields)
    generations.write_quarantined(Path(left.folder), BAD)
    if not readable:

        def broken(_: Path) -> Any:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(generations, "read_quarantined", broken)
    shown = dataset(tmp_path, Source(), state="new")
    (adopted,) = generations.adopt_all(shown.store, ["a"])
    fields_now = Succession(shown, lambda: None).adopt(adopted)
    assert fields_now is not None
    shown.current.adopt(fields_now)
    assert shown.generation.state == ("partial" if state == "complete" else state)
    assert shown.generation.damaged == 1
    assert shown.facts().bad
    assert not shown.whole()
    assert "store-bad-files" in [each.rule for each in status.findings({"a": shown}, [])]


@pytest.mark.parametrize("restarted", [False, True])
async def test_bad_chunks_of_an_image_are_filled_again_by_whoever_finds_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    shown, jobs, ran = await withdrawing(tmp_path, monkeypatch, answers=False)
    shown.source.block = True  # type: ignore[misc]
    if restarted:  # killed before it could note what its verify had found
        shown.generation = dataclasses.replace(shown.generation, state="partial", damaged=1)
        assert shown.facts().bad
        assert await jobs.withdrawals.finish(shown)
    else:
        end = protocol.End("bad", verify=protocol.VerifyEnd(bad=1, unreplaced=1))
        _, why = await jobs.withdrawals.take_out_bad(shown, end)
        assert "read again" in why
    assert (shown.generation.state, shown.generation.wanted, ran) == ("filling", True, [])
    assert not shown.whole()
    assert not shown.facts().bad, "its chunks are forgotten: they are filled when it answers"
    assert not generations.has_quarantined(shown.folder)


async def test_withdrawal_that_cannot_be_done_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, jobs, _ = await withdrawing(tmp_path, monkeypatch, answers=True)
    shown.withdraw = jobs.withdrawals.of
    tries = []

    async def fails(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(kit.child, "call", fails)
    with pytest.raises(OSError, match="Input"):
        await shown._withdraw()
    assert not await shown._withdraw()
    assert len(tries) == 1
    shown.retry_now()
    with pytest.raises(OSError, match="Input"):
        await shown._withdraw()


# --- the real store


@pytest.mark.real
@pytest.mark.timeout(120)
def test_verify_notes_what_is_bad_before_its_end(area: Path, monkeypatch: Any) -> None:
    """One that is killed has told what it had found."""
    complete = passes.complete(area, 40)
    task = protocol.VerifyTask(**complete.common, against_source=False, reachable=False)
    _, decides = verify.begin(task)
    monkeypatch.setattr(verify, "CURSOR_SECONDS", 0.0)
    decides._quarantine(["d3"], "f00003")
    decides._keep_cursor()
    assert generations.read_quarantined(complete.folder) == BAD


def without_bad_file(node: Agent) -> bool:
    """Wrong bytes were taken out."""
    try:
        (node.view("a") / NAME).read_bytes()
    except FileNotFoundError:
        return True
    return False


@pytest.fixture
def away(area: Path, node: Agent) -> Path:
    """Complete, warmed by a request; a stored file is bad; where the source has gone to."""
    trees.plain(area / "source", 80)
    node.add_dir("a", area / "source", warm=False)
    node.start()
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    flip(node.tree("a") / NAME)
    return (area / "source").rename(area / "away")


def bad_files(node: Agent) -> bool:
    return "store-bad-files" in [each["rule"] for each in node.findings()]


@pytest.mark.real
@pytest.mark.timeout(180)
@pytest.mark.parametrize("lost", [False, True])
def test_bad_file_is_not_served_and_comes_back_with_its_source(
    area: Path, node: Agent, away: Path, lost: bool
) -> None:
    if lost:
        (node.tree("a") / NAME).unlink()
    assert node.cli("dataset", "verify", "a", "--wait").returncode != 0
    shown = node.dataset("a")
    assert (shown["state"], shown["served_by"]) == ("partial", "store")
    assert shown["verify"]["bad"] == 1
    assert without_bad_file(node), "a job reads bytes that are known to be wrong"
    assert (node.view("a") / "d3" / "f00011").read_bytes() == (away / "d3/f00011").read_bytes()
    node.wait_for(lambda: bad_files(node), 30, "the finding")
    node.kill()
    node.start()
    node.wait_for(lambda: bad_files(node), 30, "the finding after a restart")
    assert node.dataset("a")["state"] == "partial"
    assert without_bad_file(node)
    away.rename(area / "source")
    node.wait_state("a", "complete")
    trees.assert_equal(area / "source", node.view("a"))
    node.wait_for(lambda: not bad_files(node), 30, "the finding to go")


@pytest.mark.real
@pytest.mark.timeout(180)
def test_list_of_a_killed_agent_counts_before_the_view_is_shown(
    area: Path, node: Agent, away: Path
) -> None:
    """It was killed when its verify had written the list, and nothing else had been done."""
    node.kill()
    (generation,) = node.generations("a")
    assert json.loads((generation / "generation.json").read_bytes())["state"] == "complete"
    generations.write_quarantined(generation, BAD)
    node.start()
    node.wait_for(lambda: without_bad_file(node), 30, "the bad file to be taken out")
    node.wait_state("a", "partial")
    node.kill()
    away.rename(area / "source")
    node.start()
    node.wait_state("a", "complete")
    trees.assert_equal(area / "source", node.view("a"))
    assert not generations.has_quarantined(str(generation))
