"""Pauses grow, end growing, and differ; one that waits for an event ends with it."""

import pytest

from kit import pause


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [(1, 2.0), (2, 4.0), (3, 8.0), (4, 10.0), (10_000, 10.0)],
)
def test_each_failure_doubles_the_pause_up_to_the_longest(failures: int, seconds: float) -> None:
    assert pause.grown(failures, 2.0, 10.0) == seconds


def test_a_pause_is_less_by_a_quarter_at_most() -> None:
    drawn = [pause.jittered(8.0) for _ in range(1000)]

    assert 6.0 <= min(drawn) < max(drawn) <= 8.0


def test_backoff_begins_anew_after_a_reset() -> None:
    backoff = pause.Backoff(1, 10)
    for attempt, seconds in enumerate([backoff.next() for _ in range(8)]):
        full = min(2.0**attempt, 10)
        assert 0.75 * full <= seconds <= full

    backoff.reset()

    assert backoff.next() <= 1
