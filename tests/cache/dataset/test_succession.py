"""What a starting agent makes of the generations that an earlier one left."""

import asyncio
import dataclasses
import errno
import random
import types
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
from cache import requests
from cache.dataset import choices
from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.dataset.succession import Succession
from cache.dataset.update_step import Step, next_step
from cache.settings import CacheSettings, DatasetSettings, DirSource, FillSettings, at_snapshot
from cache.sources import base, kinds
from cache.store import generations
from cache.views import by_id
from cache.views.view import Stage
from cache.work.jobs import Jobs
from kit.room import End


def started(folder: Path, left: dict[str, dict[str, Any]], chosen: str = "") -> Succession:
    """An agent starts; of each snapshot ``left`` has what generation.json says."""
    settings = DatasetSettings(
        name="a", freshness="follow", source=DirSource(kind="dir", path=folder / "source")
    )
    cache = CacheSettings(store=folder / "store", views=folder / "views")
    dataset = Dataset(settings, cache, folder / "state", lambda: None)
    found: dict[str, dict[str, Any] | None] = {}
    for snapshot, fields in left.items():
        made = dataset.generation_of(at_snapshot(settings.source, snapshot))
        found[made.folder] = dataclasses.asdict(dataclasses.replace(made.record, **fields))
    succession = Succession(dataset, lambda: None)
    fields_now = succession.adopt(found)
    assert fields_now is not None
    dataset.current.adopt(fields_now)
    dataset.chosen = {"snapshot": chosen, "instead": ""} if chosen else {}
    return succession


def names(of: list[Generation]) -> list[str]:
    return [each.record.snapshot for each in of]


COMPLETE = {"state": "complete", "completed": 5.0}
REACHED = base.Reached("/nowhere", "1:1", "1:1", "slow")
PARTIAL = {"state": "partial", "completed": 6.0, "left_files": 3, "skeleton": True}


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that went to the trash; nothing else is done in children."""
    found: list[str] = []

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        if function is generations.discard:
            found.append(arguments[1])
        return None

    monkeypatch.setattr(kit.child, "call", call)
    return found


def test_rollback_from_one_that_serves_in_part_holds_over_a_restart(tmp_path: Path) -> None:
    back = started(
        tmp_path, {"s1": COMPLETE | {"served": 9.0}, "s2": PARTIAL | {"served": 8.0}}, chosen="s1"
    )
    dataset = back.dataset
    assert dataset.current.record.snapshot == "s1"
    assert dataset.next is None
    assert names(dataset.retired) == ["s2"], "jobs may hold it, so it waits for its end"
    back._shown = {dataset.current.id}
    assert next_step(back.facts()) is Step.RETIRE


def test_update_that_an_operator_left_is_given_up_after_a_restart(tmp_path: Path) -> None:
    """Killed between the rollback and the end of the update that was under way."""
    back = started(
        tmp_path,
        {
            "s0": COMPLETE | {"served": 3.0},
            "s1": COMPLETE | {"served": 9.0},
            "s2": COMPLETE | {"completed": 10.0},
        },
        chosen="s0",
    )
    assert back.dataset.next is not None
    assert back.dataset.next.record.snapshot == "s2"
    assert next_step(back.facts()) is Step.DROP
    back.dataset.next = None
    assert next_step(back.facts()) is Step.BACK


@pytest.mark.parametrize("new", [COMPLETE, PARTIAL])
def test_kill_before_the_swap_is_followed_by_one_that_swaps(
    tmp_path: Path, new: dict[str, Any]
) -> None:
    """generation.json says first that it serves."""
    after = started(tmp_path, {"s1": COMPLETE | {"served": 8.0}, "s2": new | {"served": 9.0}})
    assert after.dataset.current.record.snapshot == "s2"
    assert names(after.dataset.earlier) == ["s1"]
    assert after.dataset.next is None
    assert not after.dataset.retired


def test_unserved_one_goes_on_after_a_restart(tmp_path: Path) -> None:
    after = started(tmp_path, {"s1": COMPLETE | {"served": 8.0}, "s2": PARTIAL})
    assert after.dataset.next is not None
    assert after.dataset.next.record.snapshot == "s2"


async def test_one_that_was_left_and_is_wanted_again_goes_on_and_is_not_discarded(
    tmp_path: Path, discarded: list[str]
) -> None:
    """It has the folder of the one that would begin."""
    again = started(
        tmp_path, {"s1": COMPLETE | {"served": 9.0}, "s2": PARTIAL | {"served": 8.0}}, chosen="s2"
    )
    dataset = again.dataset
    assert next_step(again.facts()) is Step.BEGIN
    assert await again._do(Step.BEGIN)
    assert dataset.next is not None
    assert dataset.next.record.snapshot == "s2"
    assert dataset.next.record.left_files == 3
    assert not dataset.retired
    # And back once more: jobs may hold it still.
    dataset.chosen = {"snapshot": "s1", "instead": ""}
    assert next_step(again.facts()) is Step.DROP
    assert await again._do(Step.DROP)
    assert dataset.next is None
    assert names(dataset.retired) == ["s2"]
    assert discarded == []


async def test_generation_that_goes_is_not_taken_for_a_lost_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch of the views sees its unmount before the agent has noted it."""
    back = started(tmp_path, {"s1": COMPLETE | {"served": 5.0}, "s2": COMPLETE | {"served": 9.0}})
    changing: list[bool] = []

    async def call(function: Any, *_: Any, deadline: float) -> Any:
        if function is by_id.hide:
            changing.append(back.dataset.changes % 2 == 1)

    monkeypatch.setattr(kit.child, "call", call)
    await back._retire()
    assert changing == [True]
    assert back.dataset.changes % 2 == 0


def test_a_dataset_that_is_removed_is_not_taken_for_a_lost_view(tmp_path: Path) -> None:
    """The watch of the views looks before the succession has noted it."""
    back = started(tmp_path, {"s1": COMPLETE | {"served": 9.0}})
    back._shown = {back.dataset.current.id}
    assert back.shown
    back.dataset.removed = True
    assert not back.shown
    # Filled again before the succession has noted it: each time counted as a loss, after which the
    # view is mounted later each time.
    back.dataset.current.begin_anew()
    back.dataset.removed = False
    assert not back.shown


async def test_what_is_to_go_is_gone_before_another_one_takes_its_folder(tmp_path: Path) -> None:
    stale = {"state": "stale", "served": 8.0}
    after = started(tmp_path, {"s1": COMPLETE | {"served": 9.0}, "s2": stale}, chosen="s2")
    after._shown = {after.dataset.current.id}
    assert next_step(after.facts()) is Step.RETIRE


def test_new_snapshot_waits_a_part_of_the_jitter_before_it_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known one, and whatever an operator asks for, does not wait."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    settings = DatasetSettings(
        name="a", freshness="frozen", source=DirSource(kind="dir", path=tmp_path / "source")
    )
    for jitter, known, waits in ((0, False, False), (900, False, True), (900, True, False)):
        cache = CacheSettings(
            store=tmp_path / "store", views=tmp_path / "views", fill=FillSettings(jitter=jitter)
        )
        dataset = Dataset(settings, cache, tmp_path / "state", lambda: None)
        fields = dataclasses.asdict(dataclasses.replace(dataset.generation, state="filling"))
        Succession(dataset, lambda: None).adopt({dataset.folder: fields} if known else {})
        assert dataset.due.fill() != waits
        dataset.retry_now()
        assert dataset.due.fill()


async def test_update_waits_a_part_of_the_jitter_unless_an_operator_asks(
    tmp_path: Path, discarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    for asked in (False, True):
        succession = started(tmp_path, {"s1": COMPLETE | {"served": 5.0}})
        dataset = succession.dataset
        dataset.cache = dataset.cache.model_copy(update={"fill": FillSettings(jitter=900)})
        if asked:
            succession.insist()
        await succession._begin(dataset.generation_of(at_snapshot(dataset.settings.source, "s2")))
        assert dataset.next is not None
        assert dataset.next.due.fill() == asked
        succession.insist()
        assert dataset.next.due.fill(), "it is asked for while it waits"


async def test_one_whose_source_is_made_anew_waits_a_part_of_the_jitter(
    tmp_path: Path, discarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    for jitter, waits in ((0, False), (900, True)):
        dataset = started(tmp_path, {"s1": COMPLETE | {"served": 5.0}}).dataset
        dataset.cache = dataset.cache.model_copy(update={"fill": FillSettings(jitter=jitter)})
        dataset.due.fill_later(9e9)
        await dataset._renew()
        assert dataset.due.fill() != waits
        assert dataset.due.patience(complete=False) <= 900


@pytest.mark.parametrize(
    ("gone", "now", "comes", "switches"),
    [
        (True, PARTIAL, {"state": "new"}, True),
        (True, PARTIAL, {"state": "filling"}, True),
        (True, {"state": "filling"}, {"state": "partial"}, True),
        (True, COMPLETE, {"state": "filling"}, False),  # jobs read all of it, and it may fit
        (True, COMPLETE, {"state": "partial"}, True),  # no room for its directories
        (True, COMPLETE, {"state": "partial", "failed": 1}, False),
        (False, PARTIAL, {"state": "partial"}, False),  # it gives room while its source answers
    ],
)
def test_one_whose_snapshot_is_gone_is_followed_at_once(
    tmp_path: Path, gone: bool, now: dict[str, Any], comes: dict[str, Any], switches: bool
) -> None:
    """It has no source for what it lacks, and gives no room: the other one waits for that."""
    after = started(tmp_path, {"s1": now | {"served": 8.0}, "s2": comes}, chosen="s2")
    dataset = after.dataset
    assert dataset.next is not None
    dataset.current.gone = gone
    dataset.next.reached = REACHED
    dataset.next.due.fill_later(900.0)
    after._shown = {dataset.current.id}
    assert (next_step(after.facts()) is Step.SWITCH) == switches


async def test_it_serves_its_source_until_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = started(tmp_path, {"s1": PARTIAL | {"served": 8.0}, "s2": {"state": "new"}})
    dataset, new = after.dataset, after.dataset.next
    assert new is not None
    dataset.current.gone, new.reached = True, REACHED
    shown: list[Stage] = []

    async def reach(*_: Any, **__: Any) -> str:
        return ""

    async def published(stage: Stage) -> None:
        shown.append(stage)

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(kit.child, "call", nothing)
    monkeypatch.setattr(Generation, "reach", reach)
    monkeypatch.setattr(dataset, "publish", published)
    await after._do(Step.SWITCH)
    assert shown == [Stage.SOURCE]
    assert (dataset.current, names(dataset.retired)) == (new, ["s1"])
    assert dataset.facts().fill_wanted
    # It is to be listed, and has no room while the other one is there: that goes.
    new.record = dataclasses.replace(new.record, state="partial", left_files=0, wanted=True)
    after._retire_at, after._shown = 0.0, {new.id}
    assert next_step(after.facts()) is Step.RETIRE
    dataset.due.fill_later(900.0)
    dataset.retired.clear()
    Jobs({"a": dataset}, lambda: 0).room_came([dataset])
    assert dataset.facts().fill_wanted, "its room has come"


# --- scans of a frozen source


def frozen(folder: Path, left: dict[str, dict[str, Any]], chosen: str | None = None) -> Succession:
    """As ``started``; ``left`` and ``chosen``: by scan, '' the first one."""
    settings = DatasetSettings(
        name="a", freshness="frozen", source=DirSource(kind="dir", path=folder / "source")
    )
    cache = CacheSettings(store=folder / "store", views=folder / "views")
    dataset = Dataset(settings, cache, folder / "state", lambda: None)
    found: dict[str, dict[str, Any] | None] = {}
    for scan, fields in left.items():
        made = dataset.generation_of(settings.source, scan)
        found[made.folder] = dataclasses.asdict(dataclasses.replace(made.record, **fields))
    succession = Succession(dataset, lambda: None)
    fields_now = succession.adopt(found) or {}
    dataset.current.adopt(fields_now)  # another one since
    dataset.chosen = {} if chosen is None else {"scan": chosen}
    return succession


def test_rescan_goes_on_after_a_restart(tmp_path: Path) -> None:
    left: dict[str, dict[str, Any]] = {
        "": COMPLETE | {"served": 5.0},
        "b": {"state": "filling"},
    }
    back = frozen(tmp_path, left, chosen="b")
    assert back.dataset.current.scan == ""
    assert back.dataset.next is not None
    assert back.dataset.next.scan == "b"
    assert choices.pending(back.dataset) == back.dataset.next.id
    assert next_step(back.facts()) is not Step.DROP


def test_rescan_that_was_cancelled_is_given_up_after_a_restart(tmp_path: Path) -> None:
    left: dict[str, dict[str, Any]] = {
        "": COMPLETE | {"served": 5.0},
        "b": {"state": "filling"},
    }
    back = frozen(tmp_path, left, chosen="")
    assert choices.pending(back.dataset) is None
    assert next_step(back.facts()) is Step.DROP


def test_rescan_that_served_is_the_current_one_after_a_restart(tmp_path: Path) -> None:
    """Also one whose choice was lost with the state directory."""
    left = {"": COMPLETE | {"served": 5.0}, "b": COMPLETE | {"served": 9.0}}
    for chosen in ("b", None):
        back = frozen(tmp_path, left, chosen)
        assert (back.dataset.current.scan, names_of_scans(back.dataset.earlier)) == ("b", [""])
        assert choices.pending(back.dataset) is None
        assert back.facts().wanted == back.facts().current


def test_rollback_of_a_rescan_goes_to_the_scan_before(tmp_path: Path) -> None:
    left = {"": COMPLETE | {"served": 5.0}, "b": COMPLETE | {"served": 9.0}}
    back = frozen(tmp_path, left, chosen="")
    assert next_step(back.facts()) is Step.BACK


def names_of_scans(of: list[Generation]) -> list[str]:
    return [each.scan for each in of]


def test_rescan_by_annotation_is_done_when_its_listing_serves(tmp_path: Path) -> None:
    left: dict[str, dict[str, Any]] = {
        "": COMPLETE | {"served": 5.0},
        "b": {"state": "filling"},
    }
    back = frozen(tmp_path, left, chosen="b")

    cache: Any = types.SimpleNamespace(successions={"a": back}, get=lambda _: back.dataset)
    asyncio.run(requests.rescan(cache, "a"))  # an agent that has ended began it
    assert back.dataset.chosen == {"scan": "b"}
    assert requests.rescanned(cache, "a") is None
    assert back.dataset.next is not None
    back.dataset.succeed(back.dataset.next)
    assert requests.rescanned(cache, "a") == End(True, "")


@pytest.mark.parametrize("ask", ["rescan", "update", "verify"])
async def test_what_an_operator_asks_of_a_source_that_is_away_is_not_tried_again(
    ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: Any, **__: Any) -> None:
        raise base.explain("directory /s", FileNotFoundError(errno.ENOENT, "no such"))

    monkeypatch.setattr(Dataset, "reach", away)
    monkeypatch.setattr(kinds.Directory, "reach", away)
    done: dict[str, dict[str, Any]] = {"": COMPLETE | {"served": 5.0}}
    back = started(tmp_path, {"v1": done[""]}) if ask == "update" else frozen(tmp_path, done)
    if ask == "rescan":
        call = choices.rescan(back)
    elif ask == "update":
        call = choices.update(back, "v2")
    else:
        call = Jobs({"a": back.dataset}, lambda: 0).verify(back.dataset, source=True)
    with pytest.raises(kit.errors.SourceError) as error:
        await call
    assert error.value.remedy == "create or mount it; ask again once it answers"


async def answers(_: Dataset) -> None:
    pass


STUCK: dict[str, dict[str, Any]] = {
    "": COMPLETE | {"served": 5.0},
    "b": {"state": "partial", "why": "1 entry", "failed": 1},
}


async def test_update_that_is_stuck_is_tried_again_when_it_is_asked_for_again(
    tmp_path: Path, discarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dataset, "reach", answers)
    back = started(tmp_path, {"v1": STUCK[""], "v2": STUCK["b"]}, chosen="v2")
    dataset, next_one = back.dataset, back.dataset.next
    assert next_one is not None
    next_one.due.fill_later(900.0)
    chosen = dict(dataset.chosen)
    await choices.update(back, "v2")
    assert (next_one.record.state, next_one.record.why) == ("filling", "")
    assert next_one.due.fill()
    assert (dataset.next, dataset.chosen) == (next_one, chosen), "it is the same one"


async def test_choice_that_is_kept_is_insisted_on_whatever_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: dict[str, dict[str, Any]] = {
        "v1": COMPLETE | {"served": 5.0},
        "v2": {"state": "partial", "why": "1 entry"},
    }
    back = started(tmp_path, left, chosen="v2")

    async def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Generation, "change", full)
    with pytest.raises(OSError, match="no space"):
        await choices.update(back, "v1")
    assert back.dataset.chosen["snapshot"] == "v1"
    assert back._insists


@pytest.mark.parametrize("asked", ["by a command", "by an annotation"])
async def test_rescan_that_is_stuck_and_is_asked_for_again_lists_all_again(
    asked: str, tmp_path: Path, discarded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that the stuck one has listed may have changed since."""
    monkeypatch.setattr(Dataset, "reach", answers)
    back = frozen(tmp_path, STUCK, chosen="b")
    dataset, stuck = back.dataset, back.dataset.next
    assert stuck is not None
    if asked == "by a command":
        await choices.rescan(back)
    else:
        cache: Any = types.SimpleNamespace(successions={"a": back}, get=lambda _: dataset)
        await requests.rescan(cache, "a")
        assert requests.rescanned(cache, "a") is None
    assert dataset.chosen["scan"] not in ("", "b")
    assert next_step(back.facts()) is Step.DROP
    await back._do(Step.DROP)
    assert discarded == [stuck.folder]
    assert next_step(back.facts()) is Step.BEGIN
    await back._do(Step.BEGIN)
    assert dataset.next is not None
    assert (dataset.next.scan, dataset.next.record.state) == (dataset.chosen["scan"], "new")


@pytest.mark.parametrize("snapshot", ["a b", "a\n", "ns pool image -", "a/b", "a,b"])
async def test_a_snapshot_of_an_image_is_one_word(tmp_path: Path, snapshot: str) -> None:
    """The kernel's RBD client takes a line of words."""
    source = {"kind": "rbd", "monitors": ["10.0.0.1:6789"], "pool": "p", "image": "i"}
    settings = DatasetSettings.model_validate(
        {
            "name": "a", "freshness": "snapshot",
            "source": {**source, "snapshot": "s", "secret_file": "/k"},
        }
    )  # fmt: skip
    cache = CacheSettings(store=tmp_path / "store", views=tmp_path / "views")
    succession = Succession(Dataset(settings, cache, tmp_path, lambda: None), lambda: None)
    with pytest.raises(kit.errors.SettingsError, match="snapshot"):
        await choices.update(succession, snapshot)
    assert succession.dataset.chosen == {}
