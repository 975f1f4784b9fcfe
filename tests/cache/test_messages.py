"""Messages between a coordinator and its workers, and the control page."""

import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.fill import messages
from cache.store.tree import Entry

raw_names = st.binary(min_size=1, max_size=255).filter(lambda b: b"\0" not in b and b"/" not in b)
names = raw_names.map(os.fsdecode)
entries = st.builds(
    Entry, names, *[st.integers(0, 2**63 - 1)] * 7, st.booleans()
)  # name, the numbers, xattrs
failures = st.builds(messages.Failure, names, st.text(max_size=20), st.booleans())
locations = st.none() | st.tuples(st.text(max_size=9), st.integers(0, 2**62))
answers = st.one_of(
    st.just(messages.Done()),
    st.builds(messages.NotDone, error=st.text(), errno=st.none() | st.integers(0, 200)),
    st.builds(
        messages.ScanPart,
        directory=st.integers(0, 2**60),
        chunk=st.lists(entries, max_size=4),
        folders=st.lists(entries, max_size=4),
        failed=st.lists(failures, max_size=3),
        made=st.integers(0, 2**60),
        location=locations,
    ),
    st.builds(messages.Hinted, taken=st.dictionaries(names, st.integers(0, 2**60), max_size=4)),
    st.builds(
        messages.Verified,
        checked_files=st.integers(0, 9),
        checked_bytes=st.integers(0, 9),
        bad=st.lists(st.tuples(entries, st.text(max_size=9)), max_size=3),
        uncompared=st.integers(0, 9),
        named=st.lists(st.tuples(names, st.text(max_size=9)), max_size=3),
    ),
)
jobs = st.one_of(
    st.just(messages.Finish()),
    st.builds(
        messages.Copy,
        folder=st.text(max_size=9),
        path=st.lists(names, max_size=4),
        entries=st.lists(entries, max_size=4),
        location=locations,
        hinted=st.booleans(),
    ),
    st.builds(
        messages.Hint,
        folder=st.text(max_size=9),
        path=st.lists(names, max_size=3),
        names=st.lists(names, max_size=4),
        allowance=st.integers(0, 2**60),
    ),
    st.builds(
        messages.Prune, directory=st.none() | st.integers(), path=st.just([]), names=st.just([])
    ),
)


@settings(max_examples=60)
@given(st.lists(answers, max_size=3), st.data())
def test_stream_yields_equal_messages_for_any_cut(
    sent: list[messages.Answer], data: st.DataObject
) -> None:
    raw = b"".join(messages.pack(message) for message in sent)
    stream, got = messages.answers(), []
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        got += stream.feed(raw[:cut])
        raw = raw[cut:]
    assert got == sent


@given(jobs)
def test_job_keeps_names_of_any_bytes_through_a_pipe(job: messages.Job) -> None:
    reading, writing = os.pipe()
    kept = os.dup(messages.JOBS)
    os.dup2(reading, messages.JOBS)
    try:
        messages.send(writing, job)
        assert messages.next_job() == job
    finally:
        os.dup2(kept, messages.JOBS)
        for each in (kept, reading, writing):
            os.close(each)


@given(raw_names)
def test_lone_surrogates_are_the_same_bytes_again(raw: bytes) -> None:
    packed = messages.pack(messages.Hinted(taken={os.fsdecode(raw): 1}))
    (got,) = messages.answers().feed(packed)
    assert isinstance(got, messages.Hinted)
    assert [os.fsencode(name) for name in got.taken] == [raw]


def test_receive_tells_the_end_of_a_stream_from_a_broken_one() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, messages.pack(messages.Done())[:-1])
        os.close(writing)
        assert messages.receive(reading, messages.Done) is None
    finally:
        os.close(reading)
    with pytest.raises(ValueError, match="broken"):
        messages.answers().feed(b"\xff\xff\xff\xff")


def test_send_writes_a_message_larger_than_the_pipe() -> None:
    reading, writing = os.pipe()
    sent = messages.NotDone(error="x" * 300_000)
    thread = threading.Thread(target=messages.send, args=(writing, sent))
    thread.start()
    try:
        assert messages.receive(reading, messages.NotDone) == sent
    finally:
        thread.join()
        os.close(reading)
        os.close(writing)


# --- the control page


@pytest.fixture
def page() -> messages.Control:
    return messages.Control.create()


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


def test_control_adds_all_counters_and_shares_limits(page: messages.Control) -> None:
    other = messages.Control(page.descriptor)
    for worker in range(messages.MOST_WORKERS):
        other.count(worker, 1, 10 * worker)
    assert page.counted() == (65, 10 * sum(range(65)))
    page.set_limits(5.5, 7.0)
    assert other.limits() == (5.5, 7.0)
    assert page.counted() == (65, 10 * sum(range(65)))


def test_throttle_without_limits_waits_only_for_cancel(
    page: messages.Control, clock: Clock
) -> None:
    throttle = messages.Throttle(page, 0)
    began = clock.now
    for _ in range(1000):
        throttle.step(1, 2**30)
    assert clock.now == began
    page.cancel()
    with pytest.raises(messages.Cancelled):
        throttle.step(1, 1)
    with pytest.raises(messages.Cancelled):
        throttle.check()


@pytest.mark.parametrize(("rates", "amount"), [((1000.0, 0.0), 100), ((0.0, 10.0), 100)])
def test_throttle_keeps_a_limit_over_time(
    page: messages.Control, clock: Clock, rates: tuple[float, float], amount: int
) -> None:
    page.set_limits(*rates)
    throttle = messages.Throttle(page, 0)
    began = clock.now
    for _ in range(100):
        throttle.step(1, amount)
    took = clock.now - began
    expected = 100 * amount / rates[0] if rates[0] else 100 / rates[1]
    assert expected - 0.6 <= took <= expected + 0.1


def test_throttle_obeys_a_lifted_limit_at_the_next_file(
    page: messages.Control, clock: Clock
) -> None:
    page.set_limits(1.0, 0.0)
    throttle = messages.Throttle(page, 0)
    throttle.step(1, 5)
    page.set_limits(0.0, 0.0)
    began = clock.now
    throttle.step(1, 10**12)
    assert clock.now == began


class WaitingStep:
    """A step that waits for a limit in a thread of its own."""

    def __init__(self, page: messages.Control) -> None:
        self.raised: list[BaseException] = []
        self._throttle = messages.Throttle(page, 0)
        self.thread = threading.Thread(target=self._step, daemon=True)
        self.thread.start()
        while page.beats() == 0:  # it waits
            time.sleep(0.001)

    def _step(self) -> None:
        try:
            self._throttle.step(1, 10**6)
        except messages.Cancelled as error:
            self.raised.append(error)


def test_throttle_wait_ends_when_the_limit_is_lifted(page: messages.Control) -> None:
    page.set_limits(1.0, 0.0)
    step = WaitingStep(page)
    assert step.thread.is_alive()
    page.set_limits(0.0, 0.0)
    step.thread.join(10)
    assert not step.thread.is_alive()


def test_throttle_wait_ends_with_cancel(page: messages.Control) -> None:
    page.set_limits(1.0, 0.0)
    step = WaitingStep(page)
    page.cancel()
    step.thread.join(10)
    assert step.raised
