"""The worker: commits after a kill at the worst moment, seals, and the source it was given."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cache.fill import control, protocol
from cache.fill.protocol import Commit, Link, Listed, StagedFolder
from cache.fill.worker import Worker
from cache.sources import roots
from cache.store import tree
from ceph import native
from linux import mounts
from tests.testbed import trees

pytestmark = pytest.mark.real  # trusted xattrs need root


def setup(area: Path, stamp: str = "") -> protocol.Setup:
    return protocol.Setup(
        source=str(area / "source"),
        stamp=stamp,
        generation=str(area / "generation"),
        immutable=False,
        native=None,
    )


@pytest.fixture
def worker(area: Path) -> Worker:
    for name in ("source", "generation/tree/d", "generation/staging", "generation/links"):
        (area / name).mkdir(parents=True)
    return Worker(0, control.Control.create().descriptor, setup(area))


@pytest.fixture(autouse=True)
def no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "send", lambda *_: None)


def stage(area: Path, chunk: str, *names: str) -> None:
    folder = area / "generation" / "staging" / chunk
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(b"same bytes")


def commit(folder: str, *links: tuple[str, str], seals: list[Listed] | None = None) -> Commit:
    staged = StagedFolder(
        folder=folder, directory=7, path=["d"], links=[Link(*link) for link in links],
        mtime_ns=5 * 10**17,
    )  # fmt: skip
    return Commit(folders=[staged], seals=seals or [])


LINKS = (("one", "key"), ("two", "key"))


def test_commit_links_names_of_one_file(area: Path, worker: Worker) -> None:
    stage(area, "1", "one", "two")
    worker.do(commit("1", *LINKS))
    one, two = (area / "generation" / "tree" / "d" / n for n in ("one", "two"))
    assert one.stat().st_ino == two.stat().st_ino


def test_commit_can_be_done_again(area: Path, worker: Worker) -> None:
    # rename(2) of one link of a file over another does nothing, and leaves the old name behind.
    stage(area, "1", "one", "two", "plain")
    worker.do(commit("1", *LINKS))
    stage(area, "1", "one", "two", "plain")
    worker.do(commit("1", *LINKS))
    folder = area / "generation" / "tree" / "d"
    assert sorted(os.listdir(folder)) == ["one", "plain", "two"]
    assert (folder / "one").stat().st_ino == (folder / "two").stat().st_ino
    assert os.listdir(area / "generation" / "staging") == []


def test_seal_needs_all_entries(area: Path, worker: Worker) -> None:
    stage(area, "1", "one")
    wrong, right = (
        Listed(directory=7, path=["d"], entries=entries, mtime_ns=10**18) for entries in (2, 1)
    )
    done: Any = worker.do(commit("1", seals=[wrong]))
    assert (done.sealed, done.missing) == ([], [7])
    assert tree.OPAQUE not in os.listxattr(area / "generation" / "tree" / "d")
    done = worker.do(Commit(folders=[], seals=[right]))
    assert (done.sealed, done.missing) == ([7], [])
    assert os.getxattr(area / "generation" / "tree" / "d", tree.OPAQUE) == b"y"
    assert (area / "generation" / "tree" / "d").stat().st_mtime_ns == 10**18


def test_recheck_unseals_every_directory_above(area: Path, worker: Worker) -> None:
    folders = [area / "generation" / "tree" / path for path in ("d", "d/e", "d/e/f", "d/other")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        os.setxattr(folder, tree.OPAQUE, b"y")
    (folders[2] / "one").write_bytes(b"1")
    done: Any = worker.do(
        protocol.Recheck(directories=[Listed(3, ["d", "e", "f"], 2), Listed(4, ["d", "other"], 0)])
    )
    assert done.missing == [3]
    marked = [tree.OPAQUE in os.listxattr(folder) for folder in folders]
    told = [tree.CLOSED in os.listxattr(folder) for folder in folders]
    assert told == [not each for each in marked], "for an eviction: an overlay may remember it"
    assert marked == [False, False, False, True]


def test_a_seal_needs_room_for_one_mark_only(
    area: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 keeps them all in one block, which a directory's own may fill."""
    folder = area / "generation" / "tree" / "d"
    folder.mkdir(exist_ok=True)
    os.setxattr(folder, tree.CLOSED, b"y")
    put = os.setxattr

    def one_mark(directory: int, name: str, value: bytes) -> None:
        if {tree.OPAQUE, tree.CLOSED} & set(os.listxattr(directory)) - {name}:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(directory, name, value)

    monkeypatch.setattr(os, "setxattr", one_mark)
    worker.do(Commit(folders=[], seals=[Listed(3, ["d"], len(os.listdir(folder)))]))
    assert {tree.OPAQUE, tree.CLOSED} & set(os.listxattr(folder)) == {tree.OPAQUE}


@pytest.mark.parametrize(
    ("ordered", "folders", "syncs"), [(True, 0, 0), (False, 0, 1), (True, 1, 1)]
)
def test_seal_syncs_unless_a_journal_keeps_order(
    area: Path,
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
    ordered: bool,
    folders: int,
    syncs: int,
) -> None:
    seen: list[int] = []

    def syncfs(descriptor: int) -> int:
        seen.append(descriptor)
        return 0

    monkeypatch.setattr("linux.syscalls.libc.syncfs", syncfs)
    worker.committer.ordered = ordered
    stage(area, "1", "one")
    worker.do(Commit(folders=commit("1").folders[:folders], seals=[]))
    assert len(seen) == syncs


def test_worker_refuses_another_source(area: Path, worker: Worker) -> None:
    behind, source = area / "behind", area / "source"
    trees.plain(behind, 3)
    mounts.mount(str(behind), source, None, mounts.MS_BIND)
    try:
        stamp = roots.look(str(source))["stamp"]
        Worker(0, control.Control.create().descriptor, setup(area, stamp))
    finally:
        mounts.detach(source)
    with pytest.raises(OSError, match="not the one") as raised:
        Worker(0, control.Control.create().descriptor, setup(area, stamp))
    assert raised.value.errno == errno.ESHUTDOWN


def test_refused_listing_is_read_through_the_mount(area: Path, worker: Worker) -> None:
    (area / "source" / "file").write_bytes(b"x")
    worker.access = native.Access(str(area / "no ceph.conf"), "nobody", "cephfs", "/a/.snap/v1")
    worker.no_listing = worker.no_objects = False
    job = protocol.Scan(directory=1, path=[], mounted=[], again=False, extras=False)
    found = worker.scan(job)
    assert found.files == 1
    assert "listed through the mount" in found.note
    assert worker.scan(job).note == "", "said once, not tried again"


def test_source_that_mounts_another_file_system_when_it_is_opened(area: Path) -> None:
    """As autofs and the crossmnt of NFS do; here debugfs, which mounts tracefs."""
    for name in ("source", "generation/tree/tracing", "generation/staging", "generation/links"):
        (area / name).mkdir(parents=True)
    tree_of_it = mounts.new_filesystem("debugfs", {})
    mounts.attach(tree_of_it, area / "source")
    os.close(tree_of_it)
    worker = Worker(0, control.Control.create().descriptor, setup(area))
    job = protocol.Scan(directory=2, path=["tracing"], mounted=[], again=False, extras=False)
    try:
        with pytest.raises(OSError, match="when it is opened") as raised:
            worker.scan(job)
        assert raised.value.errno == errno.EXDEV
    finally:
        # A worker ends with its process. This one goes on, and would seem to read a view that went:
        # by the device nobody can tell a mount of debugfs from an overlay.
        os.close(worker.source)
        os.close(worker._keeps_mount)


def test_mount_that_comes_during_a_fill_is_not_seen(area: Path, worker: Worker) -> None:
    (area / "source" / "d").mkdir()
    (area / "source" / "d" / "below").touch()
    mounts.mount("none", area / "source" / "d", "tmpfs", 0)
    with worker._of_source(["d"]) as directory:
        assert os.listdir(directory) == ["below"]


def used_long_ago(path: Path) -> int:
    """Have any reader move its access time: it is older than its last change."""
    os.utime(path, ns=(10**18, path.stat().st_mtime_ns))
    return 10**18


def test_a_look_at_a_source_moves_no_access_time(area: Path) -> None:
    trees.plain(area / "source", 3)
    at = used_long_ago(area / "source")
    assert not roots.look(str(area / "source"))["empty"]
    assert (area / "source").stat().st_atime_ns == at


def test_reads_of_a_worker_move_no_access_time(area: Path, worker: Worker) -> None:
    """What is purged by access times must not seem to be used, or unused, because of us."""
    names = ("copied", "read")
    for name in names:
        (area / "source" / name).write_bytes(b"bytes")
    times = [used_long_ago(area / "source" / name) for name in names]
    (area / "source" / "read").read_bytes()  # by another
    item = tree.entry_of("copied", (area / "source" / "copied").stat())
    worker.copy(protocol.Copy(folder="1", path=[], entries=[item], location=None, patient=False))
    now = [(area / "source" / name).stat().st_atime_ns for name in names]
    assert now[0] == times[0]
    assert now[1] > times[1], "this file system keeps no access times: the test says nothing"
