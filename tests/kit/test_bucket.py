"""A bucket lets so much through, whoever asks and however."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.pause import Bucket


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_full_at_first_and_fills_again() -> None:
    clock = Clock()
    bucket = Bucket(2.0, 4, clock)

    assert [bucket.take() for _ in range(5)] == [True] * 4 + [False]
    clock.now += 0.5
    assert [bucket.take() for _ in range(2)] == [True, False]
    clock.now += 1000
    assert bucket.level == 4


def test_what_is_kept_for_others_is_not_taken() -> None:
    bucket = Bucket(1.0, 4, Clock())

    assert [bucket.take(keep=2) for _ in range(3)] == [True, True, False]
    assert bucket.take()


def test_what_is_given_back_can_be_taken_again_and_never_more() -> None:
    bucket = Bucket(1.0, 1, Clock())

    assert bucket.take()
    bucket.give_back(5)
    assert [bucket.take(), bucket.take()] == [True, False]


def test_a_debt_says_how_long_to_wait() -> None:
    clock = Clock()
    bucket = Bucket(10.0, 5, clock)

    assert [bucket.owe(5), bucket.owe(20), bucket.owe(10)] == [0.0, 2.0, 3.0]
    clock.now += 3
    assert bucket.owe(1) == pytest.approx(0.1)


@given(
    st.floats(0.1, 1000), st.floats(0.1, 1000),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100)), max_size=50),
)  # fmt: skip
def test_never_more_than_the_burst_and_the_rate(
    rate: float, burst: float, asked: list[tuple[float, float]]
) -> None:
    clock = Clock()
    bucket = Bucket(rate, burst, clock)
    taken = 0.0
    for rest, amount in asked:
        clock.now += rest
        if bucket.take(amount):
            taken += amount

    most = burst + rate * (clock.now - 100.0)
    assert taken <= most or math.isclose(taken, most, rel_tol=1e-6)
