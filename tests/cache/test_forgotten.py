"""What a starting agent makes of a dataset whose files were damaged."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import kit.child
from cache.dataset import kept
from cache.dataset.dataset import Dataset
from cache.dataset.succession import Succession
from cache.dataset.update_step import Step, next_step
from cache.settings import CacheSettings, DatasetSettings, DirSource, at_snapshot
from cache.store import generations
from cache.views.view import Stage

COMPLETE = {"state": "complete", "completed": 5.0}
LOST = {"lost": "generation.json is damaged", "tree": 7, "used": 10}


def started(
    folder: Path, freshness: str, left: dict[str, dict[str, Any]], damaged: bool = False
) -> Dataset:
    """An agent starts; ``left``: what generation.json says, by snapshot ('' of a frozen one)."""
    source = DirSource(kind="dir", path=folder / "source")
    more = {"snapshots": "*"} if freshness == "follow" else {}
    settings = DatasetSettings(
        name="a",
        warm=True,
        freshness=freshness,
        source=source,
        **more,
    )
    cache = CacheSettings(store=folder / "store", views=folder / "views")
    dataset = Dataset(settings, cache, folder / "state", lambda: None)
    found: dict[str, dict[str, Any] | None] = {}
    for snapshot, fields in left.items():
        made = dataset.generation_of(at_snapshot(source, snapshot) if snapshot else source)
        record = dataclasses.asdict(made.record)
        found[made.folder] = fields if "lost" in fields else record | fields
    file = kept.file_of(folder / "state", "a")
    if damaged:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    dataset.adopt(Succession(dataset, lambda: None).adopt(found))
    return dataset


def test_a_lost_record_leaves_nothing_of_its_generation_in_use(tmp_path: Path) -> None:
    dataset = started(tmp_path, "frozen", {"": LOST})
    now = dataset.generation
    assert now.state == "stale" and now.wanted and dataset.current.leaves
    assert now.replaced == LOST["lost"], "the finding names it at once"
    assert dataset.facts().stale, "the view shows the source, and another one begins"
    assert not dataset.whole()


def test_a_lost_one_beside_another_that_serves_goes_when_nobody_uses_it(tmp_path: Path) -> None:
    dataset = started(tmp_path, "follow", {"s1": COMPLETE | {"served": 9.0}, "s2": LOST})
    assert dataset.current.record.snapshot == "s1"
    (lost,) = dataset.retired
    assert lost.record.state == "stale" and lost.record.used == 10
    succession = Succession(dataset, lambda: None)
    succession.found = {"s2": 99.0}
    wanted = dataset.generation_of(at_snapshot(dataset.settings.source, "s2"))
    assert wanted.id == lost.id
    assert next_step(succession.facts()) is not Step.BEGIN, "both have one folder"


def test_what_may_have_been_removed_is_not_filled_until_somebody_says_so(tmp_path: Path) -> None:
    dataset = started(tmp_path, "frozen", {}, damaged=True)
    dataset.stage = Stage.SOURCE
    assert dataset.state() == "paused"
    assert "not known whether it was removed" in dataset.why()
    assert not dataset.facts().fill_wanted
    again = started(tmp_path, "frozen", {}, damaged=False)  # before anything was written
    assert again.unsure
    assert started(tmp_path / "other", "frozen", {}).facts().fill_wanted, "the control"


async def test_an_operators_word_ends_that(tmp_path: Path) -> None:
    dataset = started(tmp_path, "frozen", {}, damaged=True)
    await dataset.save_state()
    assert started(tmp_path, "frozen", {}).unsure, "it holds over restarts"
    await dataset.put_back()
    assert dataset.facts().fill_wanted
    assert not started(tmp_path, "frozen", {}).unsure


def test_what_is_stored_was_not_removed(tmp_path: Path) -> None:
    dataset = started(tmp_path, "frozen", {"": COMPLETE}, damaged=True)
    assert not dataset.unsure and not dataset.removed


@pytest.mark.parametrize(("first", "chosen"), [(9.0, "s1"), (3.0, "")])
def test_a_rollback_stays_when_the_choice_is_lost(
    tmp_path: Path, first: float, chosen: str
) -> None:
    left = {
        "s1": COMPLETE | {"completed": 1.0, "served": first},
        "s2": COMPLETE | {"completed": 2.0, "served": 5.0},
    }
    dataset = started(tmp_path, "follow", left, damaged=True)
    assert dataset.chosen.get("snapshot", "") == chosen


async def test_a_removal_is_written_before_the_view_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = started(tmp_path, "frozen", {"": COMPLETE})
    done: list[str] = []

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        done.append(function.__name__)
        if function is kit.formats.save:
            raise OSError(28, "No space left on device", arguments[0])

    monkeypatch.setattr(kit.child, "call", call)
    with pytest.raises(OSError, match="No space left"):
        await dataset.remove()
    assert done == ["refuse_used", "save"]
    assert not dataset.removed
    assert generations.discard.__name__ not in done
