"""Files that a generation takes over from the one before it: which ones, and what they count."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cache.fill import protocol, share
from cache.store import index, tree
from tests.cache import passes
from tests.testbed import trees, waiting

NOW = tree.Entry("f", 0o100644, 7, 8, 1000, 5_000_000_000, 42, 1, True, 6_000_000_000, 9)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 1001}, {"mtime_ns": 1}, {"ctime_ns": 1}, {"ino": 43}, {"change": 10},
        {"mode": 0o100600}, {"uid": 1}, {"gid": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_whatever_differs_is_another_version(changes: dict[str, Any]) -> None:
    assert share.same_version(NOW, NOW, 0)
    assert not share.same_version(NOW, NOW._replace(**changes), 0)


def test_version_without_a_change_version_must_be_older_than_the_snapshot() -> None:
    plain = NOW._replace(change=0)
    made = NOW.ctime_ns + share.MARGIN_NS
    assert share.same_version(plain, NOW, made + 1)
    assert not share.same_version(plain, NOW, made)
    assert share.same_version(NOW, NOW, made)
    assert not share.same_version(plain._replace(ctime_ns=0), NOW._replace(ctime_ns=0), 0)


def test_inodes_that_ceph_fuse_numbers_by_snapshot_are_the_same() -> None:
    assert share.same_version(NOW, NOW._replace(ino=42 + (3 << 48)), 0)


def test_directory_whose_entries_cannot_be_read_leaves_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    opened = index.Index.open(tmp_path / index.NAME)
    opened.add_root(NOW)
    with opened.transaction() as db:
        db.execute("INSERT INTO manifest (directory, entries) VALUES (?, ?)", (index.ROOT, b"x"))
    opened.close()
    before = share.Shared(str(tmp_path), 0)
    with contextlib.ExitStack() as stack:
        assert before.directory(["none"], stack) is None  # sqlite has its files open from here on
        held = len(os.listdir("/proc/self/fd"))
        assert before.directory([], stack) is None
    assert len(os.listdir("/proc/self/fd")) == held


class Two:
    """Two versions of a tree that share unchanged inodes, as two snapshots do."""

    def __init__(self, area: Path) -> None:
        area.joinpath("new").mkdir()
        self.old, self.new = passes.Generation(area / "old"), passes.Generation(area / "new")
        trees.plain(self.old.source, 60, directories=4)
        os.symlink("d0", self.old.source / "link")
        subprocess.run(
            ["cp", "-al", self.old.source, self.new.source], check=True, timeout=waiting.limit(60)
        )

    def replace(self, name: str, data: bytes, *, like_before: bool = False) -> None:
        """As ``cp -p`` does with ``like_before``: size and mtime stay."""
        path = self.new.source / name
        status = path.stat()
        fresh = path.with_name("fresh")
        fresh.write_bytes(data)
        if like_before:
            os.utime(fresh, ns=(status.st_mtime_ns, status.st_mtime_ns))
        fresh.rename(path)

    def fill(self, **more: object) -> protocol.End:
        before = {"before": str(self.old.folder), **more}
        return passes.run("fill", protocol.FillTask(**self.new.common, **before))  # type: ignore[arg-type]


@pytest.fixture
def two(tmp_path: Path) -> Two:
    made = Two(tmp_path)
    for each in (made.old, made.new):
        each.folder.mkdir(parents=True)
    return made


def same(two: Two, name: str) -> bool:
    a, b = (os.lstat(each.tree / name) for each in (two.old, two.new))
    return a.st_ino == b.st_ino


def test_unchanged_files_are_links_and_others_are_copied(two: Two) -> None:
    size = (two.old.source / "d1/f00001").stat().st_size
    two.replace("d1/f00001", b"x" * size, like_before=True)
    two.replace("d2/f00002", b"another")
    (two.new.source / "d3/f00003").unlink()
    (two.new.source / "d3/added").write_bytes(b"new")
    assert two.old.fill().result == "complete"
    end = two.fill()
    assert end.result == "complete"
    trees.assert_equal(two.new.source, two.new.tree)
    trees.assert_equal(two.old.source, two.old.tree)
    assert same(two, "d0/f00000")
    assert same(two, "link")
    assert not same(two, "d1/f00001"), "cp -p is seen by its ctime"
    assert end.fill is not None
    assert end.fill.shared_files == 58
    shared = [os.lstat(p) for p in two.old.tree.rglob("*") if not p.is_dir() or p.is_symlink()]
    both = {s.st_ino: s for s in shared if any(s.st_ino == os.lstat(p).st_ino for p in
            two.new.tree.rglob("*"))}  # fmt: skip
    assert end.fill.shared == sum(each.st_blocks * 512 for each in both.values())


def test_changed_metadata_are_not_shared(two: Two) -> None:
    """A chmod in the source changes the inode that both versions had: the stored one stays."""
    path = two.new.source / "d0/f00000"
    shutil.copy2(path, path.with_name("own"))
    path.with_name("own").rename(path)
    assert two.old.fill().result == "complete"
    path.chmod(0o600)
    os.chown(path, 3, 4)
    assert two.fill().result == "complete"
    stored = (two.new.tree / "d0/f00000").stat()
    assert (stored.st_mode & 0o777, stored.st_uid, stored.st_gid) == (0o600, 3, 4)
    trees.assert_equal(two.old.source, two.old.tree)


def test_pass_that_goes_on_counts_what_is_shared_once(two: Two) -> None:
    assert two.old.fill().result == "complete"
    first = two.fill()
    index.Index.discard(two.new.folder / index.NAME)  # all is listed again
    again = two.fill()
    assert first.fill is not None
    assert again.fill is not None
    assert (again.fill.shared, again.fill.shared_files) == (
        first.fill.shared, first.fill.shared_files,
    )  # fmt: skip
    assert first.fill.shared > 0


def test_generation_before_without_manifest_is_not_shared(two: Two) -> None:
    assert two.old.fill().result == "complete"
    index.Index.discard(two.old.folder / index.NAME)
    end = two.fill()
    assert end.result == "complete"
    assert end.fill is not None
    assert end.fill.shared_files == 0
    trees.assert_equal(two.new.source, two.new.tree)


def test_room_is_needed_only_for_what_is_not_shared(two: Two) -> None:
    assert two.old.fill().result == "complete"
    used = sum(p.lstat().st_blocks * 512 for p in two.old.tree.rglob("*"))
    limits = {**passes.LIMITS.__dict__, "budget": used // 2 + 200_000}
    task = protocol.FillTask(
        **{**two.new.common, "limits": protocol.Limits(**limits)}, before=str(two.old.folder)
    )
    assert passes.run("fill", task).result == "complete"
