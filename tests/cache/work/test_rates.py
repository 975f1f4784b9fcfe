"""How fast a job works, and how that is kept: bounded, whatever the job takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.work import running


def test_trend_has_a_point_for_equal_times() -> None:
    trend = running.Trend()
    for second in range(21):
        trend.add(float(second), 10 * second if second <= 10 else 100)
    assert trend.points() == (10.0,) * 5 + (0.0,) * 5


def test_a_long_job_keeps_its_whole_shape_in_as_many_points() -> None:
    trend = running.Trend()
    for second in range(100_001):
        trend.add(float(second), 1000 * min(second, 50_000))
    points = trend.points()
    assert running.MOST_POINTS / 2 <= len(points) <= running.MOST_POINTS
    half = len(points) // 2
    assert points[: half - 1] == (1000.0,) * (half - 1)
    assert points[half + 1 :] == (0.0,) * (len(points) - half - 1)


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 2**40)), max_size=200))
def test_trend_is_bounded_and_never_outside_of_what_was(steps: list[tuple[float, int]]) -> None:
    trend, now, size, seen = running.Trend(), 0.0, 0, [0.0]
    trend.add(now, size)
    for seconds, more in steps:
        now, size = now + seconds, size + more
        trend.add(now, size)
        seen.append(more / max(seconds, 1e-9))
        assert len(trend.points()) <= running.MOST_POINTS
    assert all(0 <= each <= max(seen) * (1 + 1e-9) for each in trend.points())


def test_eta_is_the_slower_of_files_and_bytes() -> None:
    assert running.eta(10, 100, (1.0, 100.0)) == pytest.approx(10)
    assert running.eta(10, 10_000, (1.0, 100.0)) == pytest.approx(100)
    assert running.eta(10, 10, (0.0, 1.0)) is None
