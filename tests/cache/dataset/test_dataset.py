"""A dataset: its next action over every combination of facts."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

import kit.child
import kit.errors
from cache.dataset.action import Action, Facts, next_action
from cache.settings import ViewAccessSettings
from cache.views import view
from cache.views.view import Stage
from tests.cache.work import test_jobs

FLAGS = [name for name in Facts.__dataclass_fields__ if name != "stage"]


@functools.cache
def every() -> list[Facts]:
    """Made by the first test that wants it: every worker reads this module, and few run it."""
    return [
        facts
        for stage in Stage
        for flags in itertools.product((False, True), repeat=len(FLAGS))
        if (facts := Facts(stage, **dict(zip(FLAGS, flags, strict=True)))).servable
        # A block image has neither directories nor an overlay.
        or not (facts.skeleton or facts.stage is Stage.OVERLAY)
    ]


def trusted(facts: Facts) -> bool:
    """The store may be shown."""
    usable = facts.store_usable and not facts.stale and not facts.bad
    return usable and (facts.complete or not facts.unfit)


def test_store_is_published_only_when_complete_and_trusted() -> None:
    for facts in every():
        if next_action(facts) is Action.PUBLISH_STORE:
            assert facts.complete
            assert facts.store_usable
            assert not facts.stale


def test_bad_files_leave_the_store_before_anything_of_it_is_published() -> None:
    for facts in every():
        served = facts.store_usable and not facts.stale and (facts.complete or not facts.unfit)
        if facts.bad and served:
            wanted = Action.REACH if facts.reach_due else Action.WITHDRAW
            assert next_action(facts) is wanted
        else:
            assert next_action(facts) is not Action.WITHDRAW


def test_complete_dataset_needs_and_keeps_no_source() -> None:
    for facts in filter(trusted, every()):
        if facts.complete:
            wanted = Action.NOTHING if facts.stage is Stage.STORE else Action.PUBLISH_STORE
            if facts.stage is Stage.STORE:
                if facts.reach_due:
                    wanted = Action.REACH  # a look whether it is still the same
                elif facts.source_mounted and not facts.source_needed:
                    wanted = Action.RELEASE
            assert next_action(facts) is wanted


def test_source_is_released_only_when_not_needed() -> None:
    for facts in every():
        if next_action(facts) is Action.RELEASE:
            assert trusted(facts)
            assert facts.complete
            assert facts.stage is Stage.STORE
            assert not facts.source_needed


def test_files_that_an_overlay_would_lose_are_read_from_the_source_alone() -> None:
    for facts in every():
        if facts.unfit and not facts.complete:
            assert next_action(facts) not in (Action.PUBLISH_OVERLAY, Action.PUBLISH_STORE)
            if facts.reached and facts.servable and facts.stage is not Stage.SOURCE:
                assert next_action(facts) is Action.PUBLISH_SOURCE


def test_overlay_needs_skeleton_or_overlay() -> None:
    for facts in every():
        if next_action(facts) is Action.PUBLISH_OVERLAY:
            assert trusted(facts)
            assert facts.skeleton or facts.stage is Stage.OVERLAY


def test_overlay_becomes_source_only_when_the_store_is_not_trusted() -> None:
    for facts in filter(trusted, every()):
        if facts.stage is Stage.OVERLAY:
            assert next_action(facts) is not Action.PUBLISH_SOURCE


def test_unreachable_source_is_only_reached() -> None:
    for facts in every():
        if not facts.reached and not trusted(facts) and next_action(facts) is Action.WITHDRAW:
            assert not facts.reach_due, "the source has the right bytes"
        elif not facts.reached and (not trusted(facts) or not facts.complete):
            wanted = Action.REACH if facts.reach_due else Action.NOTHING
            assert next_action(facts) is wanted


def test_unknown_mount_is_replaced_as_soon_as_there_is_something_to_show() -> None:
    publishes = {Action.PUBLISH_SOURCE, Action.PUBLISH_OVERLAY, Action.PUBLISH_STORE}
    for facts in every():
        source = facts.reached and facts.servable
        withdraws = facts.bad and facts.store_usable and not facts.stale  # and shows the source
        shows = source or (facts.complete and trusted(facts))
        if facts.stage is Stage.UNKNOWN and shows and not withdraws:
            assert next_action(facts) in publishes


def test_generation_is_discarded_only_behind_a_view_of_the_source() -> None:
    for facts in every():
        if next_action(facts) is Action.RENEW:
            assert facts.stale
            assert facts.reached
            if facts.servable:
                assert facts.stage is Stage.SOURCE
                assert not facts.moved
            assert not facts.job_there
            assert not facts.volumes
            assert facts.store_usable


def test_fill_is_queued_only_behind_a_view() -> None:
    for facts in every():
        if next_action(facts) is Action.QUEUE:
            assert facts.store_usable and not facts.stale
            if facts.servable:
                assert facts.stage in (Stage.SOURCE, Stage.OVERLAY)
                assert not facts.moved
            assert facts.fill_wanted
            assert not facts.job_there


def test_only_overlay_is_refreshed() -> None:
    for facts in every():
        if next_action(facts) is Action.REFRESH:
            assert facts.stage is Stage.OVERLAY
            assert facts.refresh_due


def done(facts: Facts, action: Action) -> Facts:
    """The facts after ``action`` succeeded."""
    match action:
        case Action.REACH:
            return replace(facts, reached=True, reach_due=False)
        case Action.PUBLISH_SOURCE:
            return replace(facts, stage=Stage.SOURCE, moved=False)
        case Action.PUBLISH_OVERLAY:
            return replace(facts, stage=Stage.OVERLAY, moved=False)
        case Action.PUBLISH_STORE:
            return replace(facts, stage=Stage.STORE)
        case Action.QUEUE:
            return replace(facts, job_there=True)
        case Action.WITHDRAW:
            return replace(facts, bad=False, complete=False)
        case Action.RENEW:
            return replace(facts, stale=False, complete=False, skeleton=False, bad=False)
        case Action.REFRESH:
            return replace(facts, refresh_due=False)
        case Action.RELEASE:
            return replace(facts, source_mounted=False, reached=False)
    return facts


def test_actions_converge_on_the_best_view() -> None:
    for facts in every():
        now = facts
        for _ in range(10):
            action = next_action(now)
            if action is Action.NOTHING:
                break
            assert done(now, action) != now, f"{action} again and again from {facts}"
            now = done(now, action)
        assert next_action(now) is Action.NOTHING
        if not trusted(now):
            assert not now.reached or not now.servable or now.stage is Stage.SOURCE
        elif now.complete:
            assert now.stage is Stage.STORE
        elif now.reached and now.servable:
            overlay = now.skeleton or (facts.stage is Stage.OVERLAY and not facts.stale)
            assert now.stage is (Stage.OVERLAY if overlay else Stage.SOURCE)


async def test_a_view_that_only_root_enters_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source())
    shown.notes = ["of the kernel"]
    for shut in ("/root", "/home/a", ""):

        async def call(*_: Any, deadline: float, shut: str = shut) -> str:
            return shut

        monkeypatch.setattr(kit.child, "call", call)
        monkeypatch.setattr(view, "is_allowed", lambda *_: False)
        shown._allowed = None
        await shown._set_access()
        why = f"only root may enter the view, as {shut} keeps users out: set access.mode"
        assert shown.notes == ["of the kernel", *([why] if shut else [])]


@pytest.mark.parametrize(("mode", "told"), [("0640", True), ("600", True), ("0750", False)])
async def test_a_mode_that_lets_only_root_in_says_so(
    mode: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source())
    access = ViewAccessSettings(mode=mode)
    shown.settings = shown.settings.model_copy(update={"access": access})
    monkeypatch.setattr(view, "is_allowed", lambda *_: True)
    await shown._set_access()
    why = f"only root may enter the view, as access.mode '{mode}' has no x bit: set access.mode"
    assert shown.notes == ([why] if told else [])


async def test_nobody_hears_of_a_view_before_jobs_may_enter_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = test_jobs.dataset(tmp_path, test_jobs.Source(), "new")
    did: list[tuple[str, Stage]] = []

    async def call(function: Any, *_: Any, deadline: float) -> Any:
        did.append((function.__name__, shown.stage))
        done = {"device": "1:2", "mount": 5, "root": "/", "layer": "", "clean": True}
        return done if function is view.publish else None

    async def save() -> None:
        """Nothing is kept."""

    monkeypatch.setattr(kit.child, "call", call)
    monkeypatch.setattr(view, "is_allowed", lambda *_: False)
    monkeypatch.setattr(shown, "save_state", save)
    await shown.publish(Stage.SOURCE)
    assert did == [("publish", Stage.NONE), ("allow", Stage.NONE)]
    assert shown.stage is Stage.SOURCE


@pytest.mark.parametrize(
    ("state", "failed", "was_away", "again"),
    [
        ("partial", 3, True, True),
        ("partial", 0, True, False),  # what has no room has none now
        ("partial", 3, False, False),  # it answered all the time: what fails, fails
        ("complete", 0, True, False),
    ],
)
async def test_what_failed_is_tried_again_when_the_source_answers_again(
    state: str, failed: int, was_away: bool, again: bool, tmp_path: Path
) -> None:
    source = test_jobs.Source(answers=not was_away)
    source.go.set()
    shown = test_jobs.dataset(tmp_path, source, state)
    shown.generation = replace(shown.generation, failed=failed)
    shown.due.fill_later(900.0)
    if was_away:
        with pytest.raises(kit.errors.SourceError) as error:
            await shown.reach()
        shown._note_trouble(error.value)
        source.answers = True
    await shown.reach()
    assert shown.due.fill() is again


@pytest.mark.parametrize(("state", "lines"), [("filling", ["two"]), ("complete", ["one", "two"])])
def test_a_trouble_that_is_a_finding_is_not_logged_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, lines: list[str]
) -> None:
    """Of a complete dataset there is no finding; another trouble changes a finding's text alone."""
    made = test_jobs.dataset(tmp_path, test_jobs.Source())
    monkeypatch.setattr(made, "state", lambda: state)
    with structlog.testing.capture_logs() as logged:
        for why in ("one", "one", "two"):
            made._note_trouble(kit.errors.SourceError("x", why, ""))
    assert [entry["why"].removeprefix("x: ") for entry in logged] == lines
