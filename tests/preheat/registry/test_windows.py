"""Time windows, and turns that count in them."""

import calendar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from preheat.registry import schedule

NIGHT = ("22:00-06:00",)
HOUR, DAY = 3600.0, 86400.0
NOON = float(calendar.timegm((2026, 11, 20, 12, 0, 0)))
OPENING = NOON + 10 * HOUR


def test_windows_cross_midnight_and_join() -> None:
    found = schedule.window_intervals(("22:00-00:00", "00:00-06:00", "05:00-05:30"), NOON)
    assert next(found) == (OPENING, OPENING + 8 * HOUR)
    assert next(found) == (OPENING + DAY, OPENING + DAY + 8 * HOUR)
    (inside, _) = next(schedule.window_intervals(NIGHT, OPENING + 3 * HOUR))
    assert inside == OPENING


@pytest.mark.parametrize("always", [(), ("00:00-00:00",), ("06:00-22:00", "22:00-06:00")])
def test_always_open_counts_from_the_beginning(always: tuple[str, ...]) -> None:
    assert schedule.turn_in_windows(always, NOON, 500.0, NOON) == NOON + 500
    assert schedule.turn_in_windows(always, NOON, 500.0, NOON + 600) == NOON + 600


def test_turn_counts_from_the_opening() -> None:
    """An image that was named at noon is not pulled by everybody at 22:00:00."""
    assert schedule.turn_in_windows(NIGHT, NOON, 500.0, NOON + HOUR) == OPENING + 500


def test_turn_in_an_open_window_counts_from_its_own_beginning() -> None:
    since = OPENING + HOUR
    assert schedule.turn_in_windows(NIGHT, since, 500.0, since) == since + 500


def test_missed_turn_counts_from_the_next_opening() -> None:
    """All pulls of the window failed: at the next opening they do not start together."""
    next_day = OPENING + DAY - HOUR
    assert schedule.turn_in_windows(NIGHT, NOON, 500.0, next_day) == OPENING + DAY + 500


def test_turn_longer_than_a_window_comes_in_a_later_one() -> None:
    assert schedule.turn_in_windows(NIGHT, NOON, 20 * HOUR, NOON) == OPENING + 2 * DAY + 4 * HOUR


@given(
    offset=st.floats(0, 5 * DAY),
    waited=st.floats(0, 20 * DAY),
    start=st.integers(0, 1439),
    length=st.integers(60, 1439),
)
@example(offset=53999.99999999994, waited=0.0, start=661, length=60)
@example(offset=53999.99999999994, waited=0.0, start=0, length=60)
def test_turn_is_in_a_window_and_stays(
    offset: float, waited: float, start: int, length: int
) -> None:
    end = (start + length) % 1440
    window = (f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}",)
    now = NOON + waited
    at = schedule.turn_in_windows(window, NOON, offset, now)
    begin, stop = next(schedule.window_intervals(window, at))

    assert at >= max(now, NOON + round(offset, 3))
    assert begin <= at < stop
    assert schedule.turn_in_windows(window, NOON, offset, at) == pytest.approx(at, abs=0.001)
