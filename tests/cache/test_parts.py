"""The small parts of the fill: messages, the control page, room, entries, progress."""

import os
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import progress
from cache.fill import batch, control, entry, hintqueue, messages, space
from cache.fill.index import Index

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
names = st.binary(min_size=1, max_size=255).filter(lambda b: b"\0" not in b and b"/" not in b)


# --- messages ---------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(anything, max_size=3), st.data())
def test_messages_come_through_however_the_bytes_are_cut(
    sent: list[Any], data: st.DataObject
) -> None:
    raw = b"".join(messages.pack(message) for message in sent)
    stream, got = messages.Stream(), []
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        got += stream.feed(raw[:cut])
        raw = raw[cut:]
    assert got == sent


@given(names)
def test_names_of_any_bytes_come_through_a_pipe(name: bytes) -> None:
    reading, writing = os.pipe()
    try:
        messages.send(writing, {"name": os.fsdecode(name)})
        got = messages.receive(reading)
        assert got is not None
        assert os.fsencode(got["name"]) == name
    finally:
        os.close(reading)
        os.close(writing)


def test_the_end_of_a_stream_is_told_from_a_broken_one() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, messages.pack([1])[:-1])
        os.close(writing)
        assert messages.receive(reading) is None
    finally:
        os.close(reading)
    with pytest.raises(ValueError, match="broken"):
        messages.Stream().feed(b"\xff\xff\xff\xff")


def test_a_message_larger_than_the_pipe_is_sent_whole() -> None:
    reading, writing = os.pipe()
    sent = ["x" * 300_000]
    thread = threading.Thread(target=messages.send, args=(writing, sent))
    thread.start()
    try:
        assert messages.receive(reading) == sent
    finally:
        thread.join()
        os.close(reading)
        os.close(writing)


# --- control and throttle -----------------------------------------------------------------------


@pytest.fixture
def page() -> control.Control:
    return control.Control.create()


def test_counters_of_all_workers_add_up_and_limits_reach_another_mapping(
    page: control.Control,
) -> None:
    other = control.Control(page.descriptor)
    for worker in range(control.MOST_WORKERS):
        other.count(worker, 1, 10 * worker)
    assert page.counted() == (65, 10 * sum(range(65)))
    page.set_limits(5.5, 7.0)
    assert other.limits() == (5.5, 7.0)
    assert page.counted() == (65, 10 * sum(range(65)))


def test_without_limits_nothing_waits_and_a_cancel_is_raised(page: control.Control) -> None:
    throttle = control.Throttle(page, 0)
    for _ in range(1000):
        throttle.step(1, 2**30)
    page.cancel()
    with pytest.raises(control.Cancelled):
        throttle.step(1, 1)
    with pytest.raises(control.Cancelled):
        throttle.check()


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("rates", "amount"), [((1000.0, 0.0), 100), ((0.0, 10.0), 100)])
def test_a_limit_is_kept_over_time(
    page: control.Control, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float], amount: int
) -> None:
    clock = Clock(monkeypatch)
    page.set_limits(*rates)
    throttle = control.Throttle(page, 0)
    began = clock.now
    for _ in range(100):
        throttle.step(1, amount)
    took = clock.now - began
    expected = 100 * amount / rates[0] if rates[0] else 100 / rates[1]
    assert expected - 0.6 <= took <= expected + 0.1


def test_a_limit_that_is_lifted_takes_effect_on_the_next_file(
    page: control.Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    page.set_limits(1.0, 0.0)
    throttle = control.Throttle(page, 0)
    throttle.step(1, 5)
    page.set_limits(0.0, 0.0)
    began = clock.now
    throttle.step(1, 10**12)
    assert clock.now == began


def test_a_lifted_limit_ends_a_wait_that_is_under_way(page: control.Control) -> None:
    page.set_limits(1.0, 0.0)
    throttle = control.Throttle(page, 0)
    waiting = threading.Thread(target=throttle.step, args=(1, 10**6), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    page.set_limits(0.0, 0.0)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_cancel_ends_a_wait_that_is_under_way(page: control.Control) -> None:
    page.set_limits(1.0, 0.0)
    throttle = control.Throttle(page, 0)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            throttle.step(1, 10**6)
        except control.Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    page.cancel()
    thread.join(10)
    assert raised


# --- room ----------------------------------------------------------------------------------------


def disk(blocks: int, available: int, files: int, files_available: int) -> os.statvfs_result:
    return os.statvfs_result(
        (4096, 4096, blocks, available, available, files, files_available, files_available, 0, 255)
    )


sizes = st.integers(0, 2**40)


@given(
    blocks=st.integers(1, 2**30), free=st.floats(0, 1), files=st.integers(0, 2**30),
    reserve=st.floats(0, 0.99), budget=sizes, used=sizes,
    pending=st.builds(space.Room, sizes, st.integers(0, 2**20)),
    wanted=sizes, inodes=st.integers(0, 2**20),
)  # fmt: skip
def test_what_fits_never_exceeds_budget_or_reserve(
    blocks: int, free: float, files: int, reserve: float, budget: int, used: int,
    pending: space.Room, wanted: int, inodes: int,
) -> None:  # fmt: skip
    available, files_available = int(blocks * free), int(files * free)
    room = space.room(
        disk(blocks, available, files, files_available),
        reserve=reserve, budget=budget, used=used, pending=pending,
    )  # fmt: skip
    assert room.bytes >= 0
    assert room.inodes >= 0
    if wanted and room.holds(wanted, inodes):
        assert used + pending.bytes + wanted <= budget
        left = available * 4096 - pending.bytes - wanted
        assert left >= int(blocks * 4096 * reserve)
    if inodes and room.holds(0, inodes) and files:
        assert files_available - pending.inodes - inodes >= int(files * reserve)


def test_a_file_system_that_does_not_count_inodes_has_enough_of_them() -> None:
    room = space.room(
        disk(10_000, 10_000, 0, 0), reserve=0.5, budget=2**40, used=0, pending=space.Room(0, 0)
    )
    assert room.inodes > 2**60
    assert room.bytes == 5000 * 4096 - space.HEADROOM_BYTES


# --- entries ------------------------------------------------------------------------------------


@given(size=st.integers(0, 2**45), xattrs=st.booleans())
def test_what_an_entry_is_said_to_take_holds_its_bytes(size: int, xattrs: bool) -> None:
    item = entry.Entry("a", 0o100644, 0, 0, size, 0, 1, 1, xattrs)
    assert item.allocated >= size
    assert (item.allocated - item.name_bytes) % 4096 == 0


# --- progress ------------------------------------------------------------------------------------


def event(done: int, size: int, commits: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "phase": "filling", "files_total": 100, "bytes_total": 10_000, "files_done": done,
        "bytes_done": size, "failed": 0, "skipped": 0, "used": 0, "commits": commits,
        "copied_files": done, "copied_bytes": size, **more,
    }  # fmt: skip


def test_rate_and_time_left_follow_the_slower_of_files_and_bytes() -> None:
    shown = progress.Progress()
    assert shown.eta() is None
    shown.take(event(0, 0), now=0.0)
    assert shown.rates() == (0.0, 0.0)
    shown.take(event(50, 1000), now=10.0)
    assert shown.rates() == (5.0, 100.0)
    assert shown.eta() == pytest.approx(90.0)


def test_a_commit_is_told_once() -> None:
    shown = progress.Progress()
    assert not shown.take(event(1, 1), now=0)
    assert shown.take(event(1, 1, commits=1), now=1)
    assert not shown.take(event(1, 1, commits=1), now=2)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 50)), max_size=200))
def test_memory_of_progress_is_bounded_and_rates_are_never_negative(
    steps: list[tuple[float, int]],
) -> None:
    shown, now, done = progress.Progress(), 0.0, 0
    for wait, files in steps:
        now, done = now + wait, done + files
        shown.take(event(done, done * 10), now=now)
        assert all(rate >= 0 for rate in shown.rates())
        eta = shown.eta()
        assert eta is None or eta >= 0 or done > 100
    assert all(now - at <= 20 for at, _, _ in shown._samples[1:])


def test_another_pass_begins_with_a_rate_of_nothing() -> None:
    shown = progress.Progress()
    shown.take(event(0, 0), now=0)
    shown.take(event(50, 500), now=1)
    shown.restart()
    shown.take(event(0, 0), now=2)
    assert shown.rates() == (0.0, 0.0)


# --- batch and hints ----------------------------------------------------------------------------


def test_a_batch_is_due_by_files_by_bytes_by_age_or_when_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    waiting = batch.Batch()
    assert not waiting.due(more_is_coming=False)
    waiting.add(batch.Staged(None, "a", 1, files=1))
    assert waiting.due(more_is_coming=False)
    assert not waiting.due(more_is_coming=True)
    clock.now += batch.BATCH_SECONDS
    assert waiting.due(more_is_coming=True)
    waiting.begin_commit()
    waiting.add(batch.Staged(None, "b", 1, files=batch.BATCH_FILES))
    assert waiting.due(more_is_coming=True)
    assert [s.folder for s in waiting.all()] == ["b", "a"]
    waiting.end_commit()
    assert [s.folder for s in waiting.all()] == ["b"]


def test_hints_are_bounded_and_the_latest_comes_first(tmp_path: Any) -> None:
    known = Index.open(tmp_path / "index")
    known.add_root(entry.Entry("", 0o40755, 0, 0, 0, 0, 1, 1, True))
    queue = hintqueue.HintQueue()
    queue.take([f"unknown{n}/x" for n in range(1000)] + [f"f{n}" for n in range(100)])
    found = queue.next(known)
    assert found is not None
    assert (found[0], found[1], len(found[2])) == (1, [], hintqueue.MOST_NAMES)
    assert queue.next(known) is None
    known.close()
