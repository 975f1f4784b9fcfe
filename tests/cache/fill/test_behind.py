"""Chunks that are stored behind their reading: what is known when, and what an error leaves."""

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.fill import blocks
from cache.store import image_copy
from ceph.protocol import SnapshotFacts
from tests.testbed import waiting

CHUNK = image_copy.CHUNK_BYTES
COUNT = 7
SIZE = COUNT * CHUNK - 1000  # the last chunk ends within a block
STORED, UNKNOWN = image_copy.State.STORED, image_copy.State.UNKNOWN


def data_of(chunk: int) -> bytes:
    """With zeros at its begin and in its middle."""
    length = min(CHUNK, SIZE - chunk * CHUNK)
    half = random.Random(chunk).randbytes(length // 4)
    return (bytes(length // 4) + half + bytes(length // 4) + half).ljust(length, b"x")


@pytest.fixture
def held(area: Path) -> Iterator[image_copy.Chunks]:
    with image_copy.opened(area, SnapshotFacts("f", 1, "i", 4, SIZE)) as copy:
        yield copy


def known(held: image_copy.Chunks) -> list[int]:
    return [chunk for chunk, state in held.states() if state is not UNKNOWN]


@pytest.mark.parametrize("direct", [True, False])
def test_copy_has_every_byte_past_the_page_cache_or_through_it(
    area: Path, held: image_copy.Chunks, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        held._direct = -1  # as on a file system without direct writes
    wanted = b"".join(map(data_of, range(COUNT)))
    for _ in range(2):  # the second time there are no holes
        with blocks.Behind(held) as storing:
            for chunk in reversed(range(COUNT)):
                storing.put(chunk, data_of(chunk))
            storing.commit()
        assert (area / image_copy.IMAGE).read_bytes() == wanted
    assert known(held) == list(range(COUNT))
    assert all(map(held.is_good, range(COUNT)))
    assert (held._direct >= 0) == direct


def test_more_is_stored_while_a_batch_becomes_durable(
    held: image_copy.Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, syncing = threading.Event(), threading.Event()
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        syncing.set()
        assert disk.wait(waiting.limit(60))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with blocks.Behind(held) as storing:
        storing.put(1, data_of(1))
        storing.put(2, data_of(2))
        storing.commit()
        assert syncing.wait(waiting.limit(60))
        storing.put(3, data_of(3))
        storing.put(4, data_of(4))
        assert storing.waiting == 2
        assert known(held) == []
        disk.set()
    assert known(held) == [1, 2]  # the sync began before the others were put
    held.commit()
    assert known(held) == [1, 2, 3, 4]


def test_chunk_that_cannot_be_written_ends_the_storing(
    held: image_copy.Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = image_copy.Chunks._write

    def write(self: image_copy.Chunks, data: bytes, offset: int, *, sparse: bool) -> None:
        if offset == 2 * CHUNK:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data, offset, sparse=sparse)

    monkeypatch.setattr(image_copy.Chunks, "_write", write)
    with pytest.raises(OSError, match="No space"), blocks.Behind(held) as storing:
        for chunk in range(4):
            storing.put(chunk, data_of(chunk))
        storing.commit()
    held.commit()
    assert 2 not in known(held)
    assert known(held)


def test_what_a_failed_sync_took_is_never_known(
    held: image_copy.Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a lost write once: the next sync succeeds, and says nothing of it."""
    failing = [True]
    real = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        if failing.pop() if failing else False:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(OSError, match="Input/output"), blocks.Behind(held) as storing:
        storing.put(1, data_of(1))
        storing.commit()
    held.put(2, data_of(2))
    held.commit()
    assert known(held) == [2]
