import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linux import mountinfo
from tests.cache.test_space import disk
from tests.testbed import blockdev, waiting

LINE = b"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext4 /dev/root rw,errors=continue"


def test_a_line_is_read_as_the_manual_describes_it() -> None:
    mount = mountinfo.parse_line(LINE)
    assert (mount.mount_id, mount.parent_id, mount.device) == (36, 35, (98, 0))
    assert (mount.root, mount.target) == ("/mnt1", "/mnt2")
    assert mount.options == {"rw", "noatime"}
    assert (mount.shared, mount.master) == (7, 1)
    assert (mount.fstype, mount.source) == ("ext4", "/dev/root")
    assert not mount.read_only
    assert not mount.is_private


def test_optional_fields_may_be_missing_or_unknown() -> None:
    mount = mountinfo.parse_line(b"1 0 0:1 / / ro propagate_from:2 unbindable - tmpfs  rw")
    assert (mount.shared, mount.master, mount.source) == (None, None, "")
    assert mount.read_only
    assert mount.is_private


def test_what_is_mounted_inside_a_directory() -> None:
    table = mountinfo.parse(
        b"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        b"2 1 0:5 / /data rw - tmpfs x rw\n"
        b"3 2 0:6 / /data/set/hidden rw - tmpfs x rw\n"
        b"4 2 0:7 / /data rw - nfs4 server:/ rw\n"  # over the one before, with all in it
        b"5 4 0:8 / /data/set/a\\040b rw - tmpfs x rw\n"
        b"6 5 0:9 / /data/set/a\\040b/c rw - tmpfs x rw\n"
        b"7 4 8:1 /f /data/set/file rw - ext4 /dev/sda1 rw\n"
        b"8 4 0:9 / /data/settled rw - tmpfs x rw\n"
    )
    assert mountinfo.inside("/data/set", table) == ["a b", "a b/c", "file"]
    assert mountinfo.inside("/data/set/none", table) == []
    assert mountinfo.inside("/", table[:2]) == ["data"]


@pytest.mark.parametrize("line", [b"", b"garbage", LINE.replace(b" - ", b" "), LINE[:30], b" - "])
def test_what_is_no_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"line of mountinfo|unpack|invalid literal"):
        mountinfo.parse_line(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_line_or_refused(line: bytes) -> None:
    try:
        mountinfo.parse_line(line)
    except ValueError:
        pass


def escaped(path: bytes) -> bytes:
    """As the kernel's seq_path writes it."""
    for byte in b"\\ \t\n":
        path = path.replace(bytes([byte]), b"\\%03o" % byte) if byte == 0x5C else path
    for byte in b" \t\n":
        path = path.replace(bytes([byte]), b"\\%03o" % byte)
    return path


paths = st.binary(min_size=1, max_size=60).filter(lambda b: b"\0" not in b).map(lambda b: b"/" + b)


@given(paths, paths)
def test_any_path_comes_through_with_its_octal_escapes(root: bytes, target: bytes) -> None:
    line = b"1 2 3:4 %s %s rw - fuse.x src rw" % (escaped(root), escaped(target))
    mount = mountinfo.parse_line(line)
    assert os.fsencode(mount.root) == root
    assert os.fsencode(mount.target) == target


def mount(number: int, parent: int, target: str) -> mountinfo.Mount:
    return mountinfo.parse_line(
        b"%d %d 0:1 / %s rw - tmpfs x rw" % (number, parent, target.encode())
    )


@given(st.permutations([mount(2, 1, "/"), mount(5, 2, "/a"), mount(9, 5, "/a"), mount(7, 9, "/a")]))
def test_mounts_on_one_target_are_stacked_by_their_parents(
    mounts: list[mountinfo.Mount],
) -> None:
    assert [m.mount_id for m in mountinfo.at("/a", mounts)] == [5, 9, 7]
    assert mountinfo.at("/b", mounts) == []


def test_the_mount_of_a_path_is_the_longest_that_holds_it() -> None:
    mounts = [mount(1, 0, "/"), mount(2, 1, "/a"), mount(3, 2, "/a/b"), mount(4, 3, "/a/b")]
    for path, number in (("/", 1), ("/x", 1), ("/a", 2), ("/ab", 1), ("/a/b/c", 4), ("/a/bc", 2)):
        found = mountinfo.containing(path, mounts)
        assert found is not None
        assert found.mount_id == number


def test_our_own_mounts_are_read() -> None:
    found = mountinfo.read()
    assert mountinfo.containing(str(Path("/proc/self")), found) is not None
    assert len({m.mount_id for m in found}) == len(found)


@pytest.mark.real
def test_table_follows_each_change_and_parses_lines_of_one_target_alone(area: Path) -> None:
    target = area / "a b\\c\udcff"
    target.mkdir()
    table = mountinfo.Table()
    tmpfs = ["mount", "-t", "tmpfs", "tmpfs"]
    try:
        for command, there in (
            *(([*tmpfs, str(target)], 1), ([*tmpfs, str(target)], 2)),
            *((["mount", "-o", "remount,bind,ro", str(target)], 2), (["umount", str(target)], 1)),
            (["umount", str(target)], 0),
        ):
            table.now()
            subprocess.run(command, check=True)
            expected = mountinfo.at(str(target), mountinfo.read())
            assert len(expected) == there
            assert mountinfo.at(str(target), table.now()) == expected
            assert mountinfo.stacked(target) == expected
            assert mountinfo.top(target) == (expected[-1] if there else None)
    finally:
        table.close()


def test_table_that_did_not_change_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "mountinfo"
    written.write_bytes(LINE)
    monkeypatch.setattr(mountinfo, "OWN", written)  # a file of a disk never polls as changed
    table = mountinfo.Table()
    try:
        assert [each.target for each in table.now()] == ["/mnt2"]
        written.write_bytes(b"")
        assert [each.target for each in table.now()] == ["/mnt2"]
    finally:
        table.close()


@pytest.mark.real
async def test_watch_reports_mounts_and_unmounts_of_the_namespace(area: Path) -> None:
    changed = asyncio.Event()
    watch = mountinfo.Watch("/proc/self/mountinfo", changed.set)
    try:
        for command in (["mount", "-t", "tmpfs", "tmpfs", str(area)], ["umount", str(area)]):
            changed.clear()
            subprocess.run(command, check=True)
            await asyncio.wait_for(changed.wait(), waiting.limit(60))
    finally:
        watch.close()
    with pytest.raises(OSError):
        mountinfo.Watch("/proc/0/mountinfo", changed.set)


def asked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return mountinfo.keeps_order(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.real
@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_a_journal_keeps_the_order(area: Path, fstype: str) -> None:
    with disk(area, fstype, 400 * 2**20) as ssd:
        assert asked(ssd)


@pytest.mark.real
def test_ext4_without_a_journal_and_what_is_no_disk_do_not(area: Path) -> None:
    image, target = area / "bare.img", area / "bare"
    with image.open("wb") as stream:
        stream.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    target.mkdir()
    blockdev.mount_image(image, target)
    try:
        assert not asked(target)
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert not asked(Path("/proc"))
