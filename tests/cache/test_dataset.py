"""A dataset: its next action over every combination of facts, and how it reaches its source."""

import itertools
from dataclasses import replace

from cache.dataset import Action, Facts, next_action
from cache.view import Stage

FLAGS = [name for name in Facts.__dataclass_fields__ if name != "stage"]
EVERY = [
    Facts(stage, **dict(zip(FLAGS, flags, strict=True)))
    for stage in Stage
    for flags in itertools.product((False, True), repeat=len(FLAGS))
]


def test_store_is_published_only_when_complete() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.PUBLISH_STORE:
            assert facts.complete


def test_complete_dataset_needs_and_keeps_no_source() -> None:
    for facts in EVERY:
        if facts.complete:
            wanted = Action.NOTHING if facts.stage is Stage.STORE else Action.PUBLISH_STORE
            if facts.stage is Stage.STORE and facts.source_held and not facts.source_needed:
                wanted = Action.RELEASE
            assert next_action(facts) is wanted


def test_source_is_released_only_when_not_needed() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.RELEASE:
            assert facts.complete
            assert facts.stage is Stage.STORE
            assert not facts.source_needed


def test_overlay_needs_skeleton_or_overlay() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.PUBLISH_OVERLAY:
            assert facts.skeleton or facts.stage is Stage.OVERLAY


def test_overlay_never_becomes_source() -> None:
    for facts in EVERY:
        if facts.stage is Stage.OVERLAY:
            assert next_action(facts) is not Action.PUBLISH_SOURCE


def test_unreachable_source_is_only_reached() -> None:
    for facts in EVERY:
        if not facts.reached and not facts.complete:
            wanted = Action.REACH if facts.reach_due else Action.NOTHING
            assert next_action(facts) is wanted


def test_fill_is_queued_only_behind_a_view() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.QUEUE:
            assert facts.stage in (Stage.SOURCE, Stage.OVERLAY)
            assert not facts.moved
            assert facts.fill_wanted
            assert not facts.job_there


def test_only_overlay_is_refreshed() -> None:
    for facts in EVERY:
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
        case Action.REFRESH:
            return replace(facts, refresh_due=False)
        case Action.RELEASE:
            return replace(facts, source_held=False, reached=False)
    return facts


def test_actions_converge_on_the_best_view() -> None:
    for facts in EVERY:
        now = facts
        for _ in range(8):
            action = next_action(now)
            if action is Action.NOTHING:
                break
            assert done(now, action) != now, f"{action} again and again from {facts}"
            now = done(now, action)
        assert next_action(now) is Action.NOTHING
        if now.complete:
            assert now.stage is Stage.STORE
        elif now.reached:
            overlay = now.skeleton or facts.stage is Stage.OVERLAY
            assert now.stage is (Stage.OVERLAY if overlay else Stage.SOURCE)
