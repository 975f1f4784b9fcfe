"""Copying a large file without a coordinator: what is read of it."""

import os
from pathlib import Path

import pytest

from cache.fill import control, large_copy, protocol
from cache.store import extents, large, tree
from linux import syscalls

EXTENT = extents.EXTENT_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("source", "generation/parts", "generation/extents"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def copied(folder: Path, wanted: list[int]) -> list[int]:
    """Copy extents of the source's file; those that its part knows then."""
    page = control.Control(control.Control.create().descriptor)
    throttle = control.Throttle(page, 0)
    with (
        tree.opened_root(folder / "source") as source,
        tree.opened_root(folder / "generation") as generation,
    ):
        (item,) = tree.listing(source)
        assert isinstance(item, tree.Entry)
        copier = large_copy.LargeCopier(generation, throttle, immutable=True)
        job = protocol.Extents(key="key", path=[], entry=item, extents=wanted)
        answer = copier.copy(job, source, None, None)
        assert answer.failed is None
        assert answer.left == []
        with large.part(generation, "key", item) as part:
            return [each for each, state in part.states() if state is not extents.State.UNKNOWN]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the source is read."""
    found: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        found.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return found


def test_holes_of_a_source_are_not_read(folder: Path, reads: list[int]) -> None:
    with (folder / "source" / "file").open("wb") as stream:
        stream.seek(5 * EXTENT + 7)
        stream.write(b"data")
        stream.truncate(2**40)
    wanted = [0, 5, 2**40 // EXTENT - 1]
    assert copied(folder, wanted) == wanted
    assert reads == [5 * EXTENT]
    with (folder / "generation" / "parts" / "key").open("rb") as stream:
        stream.seek(5 * EXTENT + 7)
        assert stream.read(5) == b"data\0"
        assert os.fstat(stream.fileno()).st_blocks * 512 <= 2**17


def test_holes_that_zfs_tells_are_read(
    folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenZFS before 2.2.2 told holes where bytes waited to be written."""
    with (folder / "source" / "file").open("wb") as stream:
        stream.truncate(2 * EXTENT)
    monkeypatch.setattr(syscalls, "file_system", lambda _: 0x2FC12FC1)
    assert copied(folder, [0, 1]) == [0, 1]
    assert reads == [0, EXTENT]


def test_hole_over_bytes_that_an_earlier_pass_wrote(folder: Path, reads: list[int]) -> None:
    """A pass was killed before it knew them: they are not what the source has."""
    with (folder / "source" / "file").open("wb") as stream:
        stream.truncate(2**30)
    copied(folder, [0])
    with (folder / "generation" / "parts" / "key").open("r+b") as stream:
        stream.seek(3 * EXTENT)
        stream.write(b"other")
    assert copied(folder, [3]) == [0, 3]
    with (folder / "generation" / "parts" / "key").open("rb") as stream:
        stream.seek(3 * EXTENT)
        assert stream.read(5) == bytes(5)
    assert reads == []


def test_a_source_that_cannot_tell_holes_is_read(
    folder: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "source" / "file").open("wb") as stream:
        stream.truncate(2**30)
    lseek = os.lseek
    calls: list[int] = []

    def cannot(descriptor: int, offset: int, whence: int) -> int:
        calls.append(offset)
        if len(calls) > 1 and os.readlink(f"/proc/self/fd/{descriptor}").endswith("/source/file"):
            raise OSError(22, "Invalid argument")
        return lseek(descriptor, offset, whence)

    monkeypatch.setattr(os, "lseek", cannot)
    assert copied(folder, [1]) == [1]
    assert reads == [EXTENT]


def test_good_holes_are_not_read_by_a_verify(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "data"
    path.touch()
    with path.open("r+b") as data, (folder / "records").open("w+b") as records:
        data.truncate(2 * EXTENT)
        made = extents.Extents(2 * EXTENT, data.fileno(), records.fileno())
        made.put_zeros(0)
        made.put_zeros(1)
        made.commit()
        monkeypatch.setattr(extents, "read", lambda *_: pytest.fail("it was read"))
        assert made.is_good(0)
        monkeypatch.undo()
        os.pwrite(data.fileno(), b"rot", EXTENT)
        assert [made.is_good(each) for each in (0, 1)] == [True, False]
