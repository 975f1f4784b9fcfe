"""What is shown of a dataset to operators."""

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
from cache import api, status
from cache.dataset.figures import Figures, Verification
from cache.sources import base
from cache.store import index
from cache.views.view import Stage
from kit.findings import Severity
from tests.cache.work import test_jobs


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children's work is done in this process."""

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        return function(*arguments)

    monkeypatch.setattr(kit.child, "call", call)


def generation(folder: Path, state: str, failed: str) -> Any:
    folder.mkdir()
    opened = index.Index.open(folder / index.NAME)
    with opened.transaction():
        opened.fail(index.ROOT, failed, "it changed", lasting=False)
    opened.close()
    record = types.SimpleNamespace(state=state)
    return types.SimpleNamespace(folder=str(folder), record=record)


@pytest.mark.parametrize(
    ("next_state", "named"),
    [(None, "old"), ("filling", "old"), ("complete", "old"), ("partial", "new")],
)
async def test_failures_are_those_that_keep_an_update_from_serving(
    next_state: str | None, named: str, tmp_path: Path, here: None
) -> None:
    current = generation(tmp_path / "a", "partial", "old")
    next_one = None if next_state is None else generation(tmp_path / "b", next_state, "new")
    dataset: Any = types.SimpleNamespace(current=current, next=next_one, folder=current.folder)
    found = await status.failures(dataset, 10, "")
    assert [each["path"] for each in found["failures"]] == [named]


CHECKED = {"checked_files": 89, "bad": 2, "replaced": 0, "not_compared": 0, "withdrawn": 2}


@pytest.mark.parametrize(
    ("state", "result", "severity", "says"),
    [
        ("partial", CHECKED, "critical", "2 files or directories in the store were bad, 0 of them"),
        ("complete", CHECKED, "warning", "2 files or directories in the store were bad, all are"),
        ("complete", CHECKED | {"bad": 0}, "", ""),
    ],
)
def test_bad_files_that_are_replaced_are_a_warning(
    state: str, result: dict[str, int], severity: str, says: str, tmp_path: Path
) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), state)
    shown.stage = Stage.STORE if state == "complete" else Stage.OVERLAY
    shown.verification = Verification("bad", result=result)
    found = {each.rule: each for each in status.findings({"a": shown}, [])}
    told = found.get("store-bad-files")
    assert (told.severity if told else "") == severity
    assert (told.message if told else "").startswith(says)


@pytest.mark.parametrize(
    ("state", "told"), [("new", set()), ("complete", set()), ("partial", {"dataset-partial"})]
)
def test_what_nobody_asked_for_is_well_and_what_lacks_files_is_not(
    state: str, told: set[str], tmp_path: Path
) -> None:
    """Also one of which nothing is stored."""
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), state)
    shown.settings = shown.settings.model_copy(update={"warm": False})
    shown.stage = Stage.STORE if state == "complete" else Stage.SOURCE
    found = status.findings({"a": shown}, [])
    assert {each.rule for each in found if each.severity is not Severity.INFO} == told


@pytest.mark.parametrize(("state", "told"), [("complete", True), ("partial", False)])
def test_complete_dataset_says_that_its_source_is_away(
    state: str, told: bool, tmp_path: Path
) -> None:
    """Jobs are well, so it is no finding; of others it is one."""
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), state)
    shown.stage = Stage.STORE
    shown.trouble = kit.errors.SourceError("directory /s", "it is empty", "mount it")
    note = "its source: directory /s: it is empty; mount it"
    assert (note in status.of_dataset(shown).notes) is told
    assert bool(status.findings({"a": shown}, [])) is not told


def test_update_that_is_stuck_is_a_finding_that_names_the_entry(tmp_path: Path) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), "complete")
    shown.stage = Stage.STORE
    shown.next = shown.generation_of(shown.settings.source, "b")
    why = "1 entry could not be copied: logs/f (it changed)"
    shown.next.record = dataclasses.replace(shown.next.record, state="partial", why=why)
    (told,) = status.findings({"a": shown}, [])
    assert (told.rule, told.severity) == ("dataset-update-stuck", Severity.WARNING)
    assert why in told.message
    assert "'nodeagent dataset show a --failures'" in told.advice


def test_a_view_that_cannot_be_mounted_is_failed_and_not_cold(tmp_path: Path) -> None:
    """Whoever waits for its fill would else never hear why it does not begin."""
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), "new")
    shown.current.reached = base.Reached("/nowhere", "1:1", "1:1", "slow")
    assert shown.state() == "cold"
    shown.trouble = kit.errors.HostError("dataset a: view /v", "Permission denied", "see the log")
    assert (shown.state(), "Permission denied" in shown.why()) == ("failed", True)


def test_an_update_says_why_its_source_is_not_reached(tmp_path: Path) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), "complete")
    shown.next = shown.generation_of(shown.settings.source, "b")
    shown.next_trouble = kit.errors.SourceError("directory /s", "it does not answer", "mount it")
    update = status.of_dataset(shown).update
    assert update is not None
    assert update.why == "directory /s: it does not answer; mount it"


@pytest.mark.parametrize(
    ("state", "figures", "told", "bar"),
    [
        ("new", Figures(), "not listed yet", False),
        ("filling", Figures(files=2, bytes=2048), "0 B of 2.0 KiB", True),
        ("complete", Figures(estimated=False), "0 B of 0 B", True),  # it has no files
    ],
)
def test_what_was_not_listed_is_not_called_empty(
    tmp_path: Path, state: str, figures: Figures, told: str, bar: bool
) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), state)
    shown.stage, shown.figures = Stage.STORE, figures
    stored = api._row(status.of_dataset(shown), ())[4]
    assert (stored.text, stored.progress is not None) == (told, bar)
    assert any("of 0 files" in each.text for each in stored.below) is (state == "complete")
