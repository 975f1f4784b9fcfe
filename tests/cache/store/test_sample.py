"""The sample of a frozen dataset: its order, what counts as a difference, several rounds."""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.sources import roots
from cache.store import sample, tree
from tests.cache import passes
from tests.testbed import trees


@given(of=st.integers(1, 3000), start=st.integers(0, 10**9))
def test_any_run_of_as_many_places_as_there_are_has_each_once(of: int, start: int) -> None:
    assert sorted(sample.place(start + each, of) for each in range(of)) == list(range(of))


@given(of=st.integers(100, 100_000), start=st.integers(0, 10**6))
def test_ten_rounds_are_spread_over_the_whole(of: int, start: int) -> None:
    found = sorted(sample.place(start + each, of) for each in range(10))
    gaps = [b - a for a, b in zip(found, [*found[1:], found[0] + of], strict=True)]
    assert max(gaps) <= of * 0.4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_what_stayed_does_not_differ(file: Path) -> None:
    status = file.lstat()
    kept = tree.entry_of("file", status)
    assert sample.difference(kept, status) == ""
    # Neither do inode numbers, which not every file system keeps, nor what an agent did not note.
    assert sample.difference(kept._replace(ino=1), status) == ""


@pytest.mark.parametrize(
    ("field", "says"),
    [("mode", "type"), ("size", "bytes"), ("mtime_ns", "modified"), ("ctime_ns", "ctime")],
)
def test_each_field_tells(file: Path, field: str, says: str) -> None:
    kept = tree.entry_of("file", file.lstat())
    values: dict[str, Any] = kept._asdict()
    values[field] = 0o040755 if field == "mode" else values[field] + 1
    assert says in sample.difference(tree.Entry(**values), file.lstat())


def test_a_name_that_went_differs(file: Path) -> None:
    assert "gone" in sample.difference(tree.entry_of("file", file.lstat()), None)


@pytest.mark.parametrize("fields", [{}, {"units": [{"odd": 1}]}, {"at": 1.0, "later": 2}])
def test_what_another_version_wrote_is_no_trouble(fields: dict[str, Any]) -> None:
    assert sample.seen_of(fields).units == ()


# --- rounds


@pytest.fixture
def made(area: Path) -> passes.Generation:
    made = passes.Generation(area)
    trees.plain(made.source, 700, directories=7)
    os.symlink("d0/f00000", made.source / "link")
    made.folder.mkdir()
    assert made.fill().result == "complete"
    return made


def look(made: passes.Generation, entries: int = 100) -> sample.Seen:
    stamp = str(roots.look(str(made.source))["stamp"])
    return sample.seen_of(sample.look(str(made.folder), str(made.source), stamp, entries))


def rewrite(path: Path) -> None:
    """As ``cp -p`` of a file of the same size: size and time stay."""
    status = path.stat()
    path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


@pytest.mark.real
def test_rounds_find_one_changed_file_and_forget_it_when_it_is_put_right(
    made: passes.Generation,
) -> None:
    rounds = [look(made) for _ in range(8)]
    assert [each.units for each in rounds] == [()] * 8
    assert all(100 <= each.entries < 100 + 256 for each in rounds)
    victim = made.source / "d3" / "f00003"
    status = victim.stat()
    victim.write_bytes(victim.read_bytes() + b"more")
    os.utime(victim, ns=(status.st_mtime_ns, status.st_mtime_ns))
    found = [look(made) for _ in range(8)]  # all of it was looked at
    (unit,) = found[-1].units
    assert (unit.path, unit.entries) == ("d3/f00003", 1)
    assert "bytes" in unit.what
    # Its bytes are as they were, and its ctime cannot be: a rescan takes that over.
    os.truncate(victim, status.st_size)
    os.utime(victim, ns=(status.st_mtime_ns, status.st_mtime_ns))
    (unit,) = look(made).units
    assert "ctime" in unit.what


@pytest.mark.real
def test_names_that_come_go_and_change_their_type_are_found(made: passes.Generation) -> None:
    (made.source / "d0" / "new").write_bytes(b"new")
    (made.source / "d1" / "f00001").unlink()
    (made.source / "d1" / "f00001").mkdir()
    rewrite(made.source / "d2" / "f00002")
    (made.source / "d4").rename(made.source / "moved")
    for _ in range(8):
        found = look(made)
    said = {unit.path: unit.what for unit in found.units}
    assert "come or gone" in said["d0"]
    assert "type" in said["d1/f00001"]
    assert "ctime" in said["d2/f00002"]
    assert "gone" in said["d4"]
    assert "come or gone" in said["."]
    assert found.differing >= 100 + 2


@pytest.mark.real
def test_what_was_put_right_is_no_longer_accused(made: passes.Generation) -> None:
    (made.source / "d5").rename(made.source / "aside")
    for _ in range(8):
        found = look(made)
    assert "d5" in {unit.path.split("/")[0] for unit in found.units}
    status = (made.tree).stat()
    (made.source / "aside").rename(made.source / "d5")
    os.utime(made.source, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert look(made).units == ()


@pytest.mark.real
def test_a_source_that_fails_is_no_difference_and_the_next_round_goes_on_behind_it(
    made: passes.Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = look(made)

    def dead(directory: int, name: str) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "its daemon has died", name)

    with monkeypatch.context() as patched:
        patched.setattr("cache.store.sample.tree.status", dead)
        with pytest.raises(OSError, match="daemon has died"):
            look(made)
    kept = sample.seen_of(sample.load_all([str(made.folder)])[0])
    assert kept.parts > before.parts
    assert dataclasses.replace(kept, parts=0, directories=0) == dataclasses.replace(
        before, parts=0, directories=0
    )
    with pytest.raises(OSError, match="not the one that was reached"):
        sample.look(str(made.folder), str(made.source), "0:0", 100)
