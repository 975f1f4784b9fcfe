"""Large files: copied extent by extent, resumed after a kill, checked and repaired by extent."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kit.units
from cache.fill import protocol, verify_worker
from cache.store import extents, large, tree
from tests.cache import passes
from tests.cache.fill.test_fill import Fill, begin, silent_agent
from tests.testbed import trees

__all__ = ["begin", "silent_agent"]
pytestmark = pytest.mark.real  # trusted xattrs need root

EXTENT = extents.EXTENT_BYTES
SIZE = 20 * EXTENT + 12345  # above the limit; the last extent is short


@pytest.fixture
def made(area: Path) -> passes.Generation:
    found = passes.Generation(area)
    found.folder.mkdir()
    return found


def write(path: Path, seed: bytes, size: int = SIZE) -> None:
    """A file whose extents all differ, with a hole of three extents and a smaller one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        for extent in range(extents.count_of(size)):
            offset, length = extents.span_of(size, extent)
            if extent in (5, 6, 7):
                continue
            stream.seek(offset + (2**20 if extent == 9 else 0))
            block = (seed + extent.to_bytes(4, "big")) * 512
            stream.write(
                (block * -(-length // len(block)))[: length - (2**20 if extent == 9 else 0)]
            )
        stream.truncate(size)
    os.utime(path, ns=(10**18 + 5, 10**18 + 5))


def records(generation: Path) -> list[Path]:
    return sorted((generation / large.RECORDS).iterdir())


def parts(generation: Path) -> list[Path]:
    return sorted((generation / large.PARTS).iterdir())


def test_copy_is_whole_sparse_and_known_by_its_extents(made: passes.Generation) -> None:
    write(made.source / "d/big", b"one")
    os.link(made.source / "d/big", made.source / "d/other")
    (made.source / "d/small").write_bytes(b"small")
    os.setxattr(made.source / "d/big", "user.note", b"kept")
    os.chmod(made.source / "d/big", 0o640)
    end = made.fill()
    assert (end.result, end.why) == ("complete", "")
    assert trees.records(made.tree) == trees.records(made.source)
    stored = made.tree / "d/big"
    assert stored.stat().st_blocks * 512 <= SIZE - 3 * EXTENT
    assert os.getxattr(stored, "user.note") == b"kept"
    assert os.getxattr(stored, large.KEY).decode() in {path.name for path in records(made.folder)}
    assert parts(made.folder) == []
    assert made.verify().result == "good"
    wanted = protocol.VerifyEnd(checked_files=3, checked_bytes=2 * SIZE + 5)
    assert made.verify().verify == wanted


@pytest.mark.parametrize(
    ("failure", "ends"),
    [(errno.ENOTCONN, True), (errno.EIO, False), (errno.EACCES, False), (errno.ENOENT, False)],
)
def test_a_source_that_fails_makes_no_stored_file_bad(
    made: passes.Generation, monkeypatch: pytest.MonkeyPatch, failure: int, ends: bool
) -> None:
    """Bad extents would be fetched from it, so its directory is opened beside the stored file."""
    write(made.source / "d/big", b"one")
    assert made.fill().result == "complete"
    folder, stored, source = (
        os.open(path, os.O_RDONLY) for path in (made.folder, made.tree, made.source)
    )
    opened = tree.opened

    def failing(root: int, path: list[str]) -> Any:
        if root == source:
            raise OSError(failure, os.strerror(failure))
        return opened(root, path)

    monkeypatch.setattr(tree, "opened", failing)
    own: Any = SimpleNamespace(generation=folder, tree=stored)
    throttle: Any = SimpleNamespace(step=lambda *_: None)
    verifier = verify_worker.Verifier(own, source, throttle)
    job = protocol.Verify(
        directory=1, path=["d"], entries=None, against_source=False, reachable=True
    )
    if ends:
        with pytest.raises(OSError, match="not connected"):
            verifier.verify(job)
        return
    assert verifier.verify(job).bad == []


def stop_in_the_middle(fill: Fill) -> int:
    """Kill the workers when some extents are durable; how many are."""
    ended = fill.until(lambda: 0 < known(fill.generation) < extents.count_of(SIZE) - 1)
    assert ended is None
    for member in fill.run.pool.members.values():
        os.kill(member.pid, 9)
    fill.stop()
    return known(fill.generation)


def known(generation: Path) -> int:
    states = [
        state
        for path in records(generation)
        for state in path.read_bytes()[extents.HEADER_BYTES :: extents.RECORD_BYTES]
    ]
    return sum(state != extents.State.UNKNOWN for state in states)


def test_killed_fill_copies_only_the_rest(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.fill.large_files.EXTENTS_IN_A_JOB", 4)
    write(area / "source/big", b"one")
    done = stop_in_the_middle(begin())
    assert not (area / "generation/tree/big").exists(), "it has no name before it is whole"
    again = begin()
    assert again.end().result == "complete"
    assert again.run.page.counted() == (1, SIZE - done * EXTENT)
    assert trees.records(area / "generation/tree") == trees.records(area / "source")
    taken = again.run.used()
    assert taken == pytest.approx(trees.allocated(area / "generation/tree"), abs=2**20)


def test_lost_index_costs_no_extent(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.fill.large_files.EXTENTS_IN_A_JOB", 4)
    write(area / "source/big", b"one")
    done = stop_in_the_middle(begin())
    for file in (area / "generation").glob("index.*"):
        file.unlink()
    again = begin()
    assert again.end().result == "complete"
    assert again.run.page.counted() == (1, SIZE - done * EXTENT)


def test_other_version_begins_again(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.fill.large_files.EXTENTS_IN_A_JOB", 4)
    write(area / "source/big", b"one")
    stop_in_the_middle(begin())
    for file in (area / "generation").glob("index.*"):
        file.unlink()
    write(area / "source/big", b"two")
    again = begin()
    assert again.end().result == "complete"
    assert again.run.page.counted() == (1, SIZE)
    assert trees.records(area / "generation/tree") == trees.records(area / "source")
    assert parts(area / "generation") == []


def test_change_between_two_jobs_is_noticed(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.fill.large_files.EXTENTS_IN_A_JOB", 4)
    write(area / "source/big", b"one")
    fill = begin(immutable=False)
    assert fill.until(lambda: known(fill.generation) > 0) is None
    write(area / "source/big", b"two")  # the same size and times: only its ctime tells
    assert fill.end().result == "complete"
    assert trees.records(area / "generation/tree") == trees.records(area / "source")


def test_small_files_take_turns_with_large_ones(
    area: Path, begin: Callable[..., Fill], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.fill.large_files.EXTENTS_IN_A_JOB", 1)
    for number in range(3):
        write(area / f"source/big{number}", bytes([number]))
    trees.plain(area / "source", 60, directories=6)
    fill = begin()
    given: list[str] = []
    give = fill.run.pool.give

    def noted(member: Any, assignment: Any) -> None:
        given.append(type(assignment.job).__name__)
        give(member, assignment)

    monkeypatch.setattr(fill.run.pool, "give", noted)
    assert fill.end().result == "complete"
    last = max(at for at, name in enumerate(given) if name == "Copy")
    copies = [name for name in given[:last] if name in ("Copy", "Extents")]
    assert copies.count("Extents") <= copies.count("Copy") + 2
    assert trees.records(area / "generation/tree") == trees.records(area / "source")


def test_one_that_does_not_fit_keeps_nobody_out(area: Path, begin: Callable[..., Fill]) -> None:
    write(area / "source/big", b"one")
    trees.plain(area / "source", 30, directories=2)
    fill = begin(budget=40 * 2**20)
    ended = fill.end()
    size = kit.units.format_size(SIZE)
    why = f"no room for 1 files, {size}: cache.budget is too small"
    assert (ended.result, ended.why) == ("partial", why)
    assert fill.run.totals.done_files == 30
    assert parts(area / "generation") == []


def spoil(path: Path, *at: int) -> None:
    """Change bytes of a stored file as a bad disk would: its times tell nothing."""
    status = path.stat()
    with path.open("r+b") as stream:
        for offset in at:
            stream.seek(offset)
            byte = stream.read(1)
            stream.seek(offset)
            stream.write(bytes([byte[0] ^ 1]))
        os.fsync(stream.fileno())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_only_bad_extents_are_fetched_again(
    made: passes.Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(made.source / "d/big", b"one")
    assert made.fill().result == "complete"
    stored = made.tree / "d/big"
    inode = stored.stat().st_ino
    spoil(stored, 3 * EXTENT + 7, SIZE - 1, 6 * EXTENT)  # the last one in a hole
    end = made.verify()
    assert (end.result, end.verify and (end.verify.bad, end.verify.replaced)) == ("good", (1, 1))
    assert trees.records(made.tree) == trees.records(made.source)
    assert stored.stat().st_ino == inode, "readers keep the file that they have open"
    assert made.verify().verify == protocol.VerifyEnd(checked_files=1, checked_bytes=SIZE)


@pytest.mark.parametrize("source", ["other", "gone"])
def test_bad_file_without_its_source_is_withdrawn(made: passes.Generation, source: str) -> None:
    write(made.source / "d/big", b"one")
    assert made.fill().result == "complete"
    spoil(made.tree / "d/big", 3 * EXTENT)
    if source == "other":
        write(made.source / "d/big", b"two")
    else:
        (made.source / "d/big").unlink()
    end = made.verify()
    assert (end.result, end.verify and end.verify.unreplaced) == ("bad", 1)
    assert made.withdraw("marks").result == "withdrawn"
    assert made.withdraw("files").result == "withdrawn"
    assert records(made.folder) == []
    assert made.fill().result == "complete"
    assert (made.tree / "d/big").exists() == (source == "other")
    if source == "other":
        assert trees.records(made.tree) == trees.records(made.source)


def test_lost_records_are_made_again(made: passes.Generation) -> None:
    write(made.source / "d/big", b"one")
    assert made.fill().result == "complete"
    (path,) = records(made.folder)
    kept = path.read_bytes()
    path.unlink()
    assert made.verify().result == "good"
    assert path.read_bytes() == kept
    path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))  # of the records, not of the file
    assert made.verify().result == "good"
    assert path.read_bytes() == kept


@pytest.fixture
def copied(area: Path) -> Iterator[extents.Extents]:
    with (area / "data").open("w+b") as data, (area / "records").open("w+b") as known:
        data.truncate(SIZE)
        known.write(extents.header({}))
        known.flush()
        yield extents.Extents(SIZE, data.fileno(), known.fileno())


def test_extent_is_known_only_when_committed(copied: extents.Extents) -> None:
    block = os.urandom(EXTENT)
    copied.put(1, block)
    copied.put(2, bytes(EXTENT))
    assert {state for _, state in copied.states()} == {extents.State.UNKNOWN}
    copied.commit()
    wanted = {1: extents.State.STORED, 2: extents.State.ZEROS}
    assert {n: s for n, s in copied.states() if s is not extents.State.UNKNOWN} == wanted
    assert copied.is_good(1) and copied.is_good(2)


def test_zeros_are_written_over_what_was_there(copied: extents.Extents) -> None:
    copied.put(1, os.urandom(EXTENT))
    half = bytes(EXTENT // 2) + b"x" * (EXTENT // 2)
    copied.put(1, half)
    copied.commit()
    assert extents.read(copied.data, SIZE, 1) == half
    copied.put(1, bytes(EXTENT))
    copied.commit()
    assert extents.read(copied.data, SIZE, 1) == bytes(EXTENT)
    assert copied.is_good(1)


def test_key_tells_versions_apart() -> None:
    item = tree.Entry("big", 0o100644, 0, 0, SIZE, 1, 2, 1, False, 3)
    key = large.key_of(["a", "b"], item)
    versions = [item._replace(size=7), item._replace(mtime_ns=7), item._replace(ctime_ns=7)]
    others = [large.key_of(["a", "b"], other) for other in (*versions, item._replace(name="b"))]
    others += [large.key_of(["ab"], item), large.key_of(["a"], item)]
    assert len({key, *others}) == 7
    assert key == large.key_of(["a", "b"], item._replace(mode=0, uid=5, ino=9, change=4))


def test_a_sparse_file_takes_its_blocks_and_not_its_length(made: passes.Generation) -> None:
    """The budget of the pass holds a 64th of it."""
    write(made.source / "sparse", b"one")
    os.truncate(made.source / "sparse", 2**36)
    (made.source / "small").write_bytes(b"small")
    os.truncate(made.source / "small", large.LARGEST_SMALL)
    end = made.fill()
    assert (end.result, end.why) == ("complete", "")
    stored, source = (folder / "sparse" for folder in (made.tree, made.source))
    assert stored.stat().st_size == 2**36
    assert stored.stat().st_blocks * 512 <= SIZE
    with stored.open("rb") as ours, source.open("rb") as theirs:
        assert ours.read(SIZE + EXTENT) == theirs.read(SIZE + EXTENT)
    assert made.verify().result == "good"
