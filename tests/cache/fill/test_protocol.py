"""Messages between a coordinator and its workers."""

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.fill import protocol
from cache.store.tree import Entry
from tests.testbed import examples

raw_names = st.binary(min_size=1, max_size=255).filter(lambda b: b"\0" not in b and b"/" not in b)
names = raw_names.map(os.fsdecode)
entries = st.builds(
    Entry, names, *[st.integers(0, 2**63 - 1)] * 7, st.booleans()
)  # name, the numbers, xattrs
failures = st.builds(protocol.Failure, names, st.text(max_size=20), st.booleans())
locations = st.none() | st.tuples(st.text(max_size=9), st.integers(0, 2**62))
answers = st.one_of(
    st.just(protocol.Done()),
    st.builds(protocol.NotDone, error=st.text(), errno=st.none() | st.integers(0, 200)),
    st.builds(
        protocol.ScanPart,
        directory=st.integers(0, 2**60),
        chunk=st.lists(entries, max_size=4),
        folders=st.lists(entries, max_size=4),
        failed=st.lists(failures, max_size=3),
        made=st.integers(0, 2**60),
        location=locations,
    ),
    st.builds(
        protocol.Verified,
        checked_files=st.integers(0, 9),
        checked_bytes=st.integers(0, 9),
        bad=st.lists(st.tuples(entries, st.text(max_size=9)), max_size=3),
        uncompared=st.integers(0, 9),
        named=st.lists(st.tuples(names, st.text(max_size=9)), max_size=3),
    ),
)
jobs = st.one_of(
    st.just(protocol.Finish()),
    st.builds(
        protocol.Copy,
        folder=st.text(max_size=9),
        path=st.lists(names, max_size=4),
        entries=st.lists(entries, max_size=4),
        location=locations,
    ),
)


@settings(max_examples=examples.number(20))
@given(st.lists(answers, max_size=3), st.data())
def test_stream_yields_equal_messages_for_any_cut(
    sent: list[protocol.Answer], data: st.DataObject
) -> None:
    raw = b"".join(protocol.pack(message) for message in sent)
    stream, got = protocol.answers(), []
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        got += stream.feed(raw[:cut])
        raw = raw[cut:]
    assert got == sent


@given(jobs)
def test_job_keeps_names_of_any_bytes_through_a_pipe(job: protocol.Job) -> None:
    reading, writing = os.pipe()
    kept = os.dup(protocol.JOBS)
    os.dup2(reading, protocol.JOBS)
    try:
        protocol.send(writing, job)
        assert protocol.next_job() == job
    finally:
        os.dup2(kept, protocol.JOBS)
        for each in (kept, reading, writing):
            os.close(each)


@given(raw_names)
def test_lone_surrogates_are_the_same_bytes_again(raw: bytes) -> None:
    packed = protocol.pack(protocol.Copied(left=[os.fsdecode(raw)]))
    (got,) = protocol.answers().feed(packed)
    assert isinstance(got, protocol.Copied)
    assert [os.fsencode(name) for name in got.left] == [raw]


def test_receive_tells_the_end_of_a_stream_from_a_broken_one() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, protocol.pack(protocol.Done())[:-1])
        os.close(writing)
        assert protocol.receive(reading, protocol.Done) is None
    finally:
        os.close(reading)
    with pytest.raises(ValueError, match="broken"):
        protocol.answers().feed(b"\xff\xff\xff\xff")


def test_send_writes_a_message_larger_than_the_pipe() -> None:
    reading, writing = os.pipe()
    sent = protocol.NotDone(error="x" * 300_000)
    thread = threading.Thread(target=protocol.send, args=(writing, sent))
    thread.start()
    try:
        assert protocol.receive(reading, protocol.NotDone) == sent
    finally:
        thread.join()
        os.close(reading)
        os.close(writing)
