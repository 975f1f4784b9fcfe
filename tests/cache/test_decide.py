"""What is decided, over every combination of facts."""

import itertools
from dataclasses import replace

from cache.decide import Action, Facts, next_action
from cache.view import Stage

FLAGS = [name for name in Facts.__dataclass_fields__ if name != "stage"]
EVERY = [
    Facts(stage, **dict(zip(FLAGS, flags, strict=True)))
    for stage in Stage
    for flags in itertools.product((False, True), repeat=len(FLAGS))
]


def test_the_store_is_published_only_when_it_is_complete() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.PUBLISH_STORE:
            assert facts.complete


def test_a_complete_dataset_is_published_without_its_source_and_lets_it_go() -> None:
    for facts in EVERY:
        if facts.complete:
            wanted = Action.NOTHING if facts.stage is Stage.STORE else Action.PUBLISH_STORE
            if facts.stage is Stage.STORE and facts.source_held and not facts.source_needed:
                wanted = Action.RELEASE
            assert next_action(facts) is wanted


def test_a_source_is_let_go_only_when_nothing_needs_it() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.RELEASE:
            assert facts.complete
            assert facts.stage is Stage.STORE
            assert not facts.source_needed


def test_an_overlay_comes_only_with_the_skeleton_or_over_an_overlay() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.PUBLISH_OVERLAY:
            assert facts.skeleton or facts.stage is Stage.OVERLAY


def test_an_overlay_never_goes_back_to_the_source() -> None:
    for facts in EVERY:
        if facts.stage is Stage.OVERLAY:
            assert next_action(facts) is not Action.PUBLISH_SOURCE


def test_nothing_is_published_or_copied_from_a_source_that_does_not_answer() -> None:
    for facts in EVERY:
        if not facts.reached and not facts.complete:
            wanted = Action.REACH if facts.reach_due else Action.NOTHING
            assert next_action(facts) is wanted


def test_jobs_can_read_before_anything_is_copied() -> None:
    for facts in EVERY:
        if next_action(facts) is Action.QUEUE:
            assert facts.stage in (Stage.SOURCE, Stage.OVERLAY)
            assert not facts.moved
            assert facts.pass_wanted
            assert not facts.pass_there


def test_only_an_overlay_is_refreshed() -> None:
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
            return replace(facts, pass_there=True)
        case Action.REFRESH:
            return replace(facts, refresh_due=False)
        case Action.RELEASE:
            return replace(facts, source_held=False, reached=False)
    return facts


def test_from_any_facts_a_few_actions_lead_to_rest_with_the_best_view() -> None:
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
