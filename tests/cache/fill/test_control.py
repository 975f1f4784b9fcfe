"""The control page: counters, limits and cancel between processes."""

import threading
import time

import pytest

from cache.fill.control import MOST_WORKERS, Cancelled, Control, Throttle
from tests.testbed import waiting


@pytest.fixture
def page() -> Control:
    return Control.create()


class Clock:
    """Time that passes only in sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_control_adds_all_counters_and_shares_limits(page: Control) -> None:
    other = Control(page.descriptor)
    for worker in range(MOST_WORKERS):
        other.count(worker, 1, 10 * worker)
    assert page.counted() == (65, 10 * sum(range(65)))
    page.set_limits(5.5, 7.0)
    assert other.limits() == (5.5, 7.0)
    assert page.counted() == (65, 10 * sum(range(65)))


def test_throttle_without_limits_waits_only_for_cancel(page: Control, clock: Clock) -> None:
    throttle = Throttle(page, 0)
    began = clock.now
    for _ in range(1000):
        throttle.step(1, 2**30)
    assert clock.now == began
    page.cancel()
    with pytest.raises(Cancelled):
        throttle.step(1, 1)
    with pytest.raises(Cancelled):
        throttle.check()


@pytest.mark.parametrize(("rates", "amount"), [((1000.0, 0.0), 100), ((0.0, 10.0), 100)])
def test_throttle_keeps_a_limit_over_time(
    page: Control, clock: Clock, rates: tuple[float, float], amount: int
) -> None:
    page.set_limits(*rates)
    throttle = Throttle(page, 0)
    began = clock.now
    for _ in range(100):
        throttle.step(1, amount)
    took = clock.now - began
    expected = 100 * amount / rates[0] if rates[0] else 100 / rates[1]
    assert expected - 0.6 <= took <= expected + 0.1


def test_throttle_obeys_a_lifted_limit_at_the_next_file(page: Control, clock: Clock) -> None:
    page.set_limits(1.0, 0.0)
    throttle = Throttle(page, 0)
    throttle.step(1, 5)
    page.set_limits(0.0, 0.0)
    began = clock.now
    throttle.step(1, 10**12)
    assert clock.now == began


class WaitingStep:
    """A step that waits for a limit in a thread of its own."""

    def __init__(self, page: Control) -> None:
        self.raised: list[BaseException] = []
        self._throttle = Throttle(page, 0)
        self.thread = threading.Thread(target=self._step, daemon=True)
        self.thread.start()
        while page.beats() == 0:  # it waits
            time.sleep(0.001)

    def _step(self) -> None:
        try:
            self._throttle.step(1, 10**6)
        except Cancelled as error:
            self.raised.append(error)


def test_throttle_wait_ends_when_the_limit_is_lifted(page: Control) -> None:
    page.set_limits(1.0, 0.0)
    step = WaitingStep(page)
    assert step.thread.is_alive()
    page.set_limits(0.0, 0.0)
    step.thread.join(waiting.limit(10))
    assert not step.thread.is_alive()


def test_throttle_wait_ends_with_cancel(page: Control) -> None:
    page.set_limits(1.0, 0.0)
    step = WaitingStep(page)
    page.cancel()
    step.thread.join(waiting.limit(10))
    assert step.raised
