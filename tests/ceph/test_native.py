"""Listings and reads past the mount, of a real snapshot."""

import os
import stat
import time
from collections.abc import Iterator

import pytest

from ceph import native, objects
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

CONTENT = {f"file{number}": os.urandom(1 + number * 997) for number in range(40)}


@pytest.fixture(scope="module")
def access(
    cluster: CephCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[native.Access]:
    with cluster.mounted(tmp_path_factory.mktemp("fs")) as fs:
        top = fs / "native"
        top.mkdir()
        for name, data in CONTENT.items():
            (top / name).write_bytes(data)
        (top / "large").write_bytes(b"x" * (native.OBJECT_BYTES + 1))
        (top / "hole").touch()
        os.truncate(top / "hole", 100)
        (top / "empty").touch()
        (top / "linked").write_bytes(b"l")
        os.link(top / "linked", top / "linked too")
        (top / "marked").write_bytes(b"m")
        os.setxattr(top / "marked", "user.a", b"b")
        os.mkdir(os.fsencode(top) + b"/odd \xff")
        cluster.wait_until_not_recent()
        (top / "recent").write_bytes(b"written just before the snapshot")
        (top / ".snap/v1").mkdir()
        (top / "file0").write_bytes(b"changed afterwards")
        yield native.Access(str(cluster.conf), "admin", "cephfs", "/native/.snap/v1")


@pytest.fixture
def listing(access: native.Access) -> Iterator[native.Listing]:
    assert native.available()
    made = native.Listing(access)
    yield made
    made.close()


def test_entries_are_as_stat_gives_them(listing: native.Listing) -> None:
    found = {entry.name: entry for entry in listing.entries(())}
    assert found.keys() == {
        *CONTENT,
        *("large", "hole", "empty", "linked", "linked too", "marked", "recent"),
        os.fsdecode(b"odd \xff"),
    }
    for name, data in CONTENT.items():
        assert (found[name].size, found[name].nlink, found[name].xattrs) == (len(data), 1, False)
        assert stat.S_ISREG(found[name].mode) and found[name].mtime_ns > 10**18
    assert found["linked"].nlink == 2 and found["linked"].ino == found["linked too"].ino
    assert found["marked"].xattrs
    directory = found[os.fsdecode(b"odd \xff")]
    assert stat.S_ISDIR(directory.mode) and (directory.size, directory.nlink) == (0, 1)
    plain = {name for name, entry in found.items() if native.is_plain(entry)}
    assert plain == {*CONTENT, "hole"}


def test_a_missing_directory_is_an_error(listing: native.Listing) -> None:
    with pytest.raises(FileNotFoundError):
        list(listing.entries(("none",)))


def test_read_gives_the_snapshots_content_and_none_for_a_hole(
    access: native.Access, listing: native.Listing
) -> None:
    items = [entry for entry in listing.entries(()) if native.is_plain(entry)]
    got: dict[str, bytes | None] = {}
    rest = objects.Reader(access).read(
        listing.location((), "file1"),
        items,
        lambda item, data: got.update({item.name: data}),
        time.monotonic() + 60,
    )
    assert rest == ([], [], [])
    assert got == {**CONTENT, "hole": None}


def test_read_raises_what_the_caller_raises_and_stops_at_the_deadline(
    access: native.Access, listing: native.Listing
) -> None:
    items = [entry for entry in listing.entries(()) if entry.name in CONTENT]
    location, reader = listing.location((), "file1"), objects.Reader(access)
    assert reader.read(location, items, lambda *_: None, time.monotonic()).left == items

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        reader.read(location, items, fail, time.monotonic() + 60)


def test_a_cluster_that_refuses_the_user_is_an_error(access: native.Access) -> None:
    stranger = native.Access(access.conf, "stranger", access.filesystem, access.root)
    with pytest.raises(OSError):
        native.Listing(stranger)
    with pytest.raises(OSError):
        objects.Reader(stranger)
