"""Namespaces with a private copy of a mount, made by real processes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kit.child
from linux import mount_namespaces, mountinfo
from tests.linux import scripts
from tests.testbed import waiting

pytestmark = pytest.mark.real


@pytest.fixture
def pid(tmpfs: Path) -> Iterator[int]:
    with scripts.running("pass", within=scripts.apart(tmpfs)) as pid:
        yield pid


def inode(pid: int | str) -> int:
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def identity(number: int) -> int:
    return next(each.id for each in mount_namespaces.walk() if each.inode == number)


def shown(pid: int, target: Path) -> list[mountinfo.Mount]:
    return mountinfo.at(str(target), mountinfo.read(Path(f"/proc/{pid}/mountinfo")))


def test_walk_lists_each_namespace_once_and_closes_it(pid: int) -> None:
    before = os.listdir("/proc/self/fd")
    found = list(mount_namespaces.walk())
    assert len({each.id for each in found}) == len(found)
    # Others end meanwhile: they have no mounts any more, and the kernel uses their inodes again.
    ours = [each for each in found if each.inode in (inode("self"), inode(pid))]
    assert len(ours) == 2 and all(each.id and each.mounts for each in ours)
    assert os.listdir("/proc/self/fd") == before


def read_table(path: str) -> list[str]:
    """For a child process, as the Visitor requires."""
    visitor = mount_namespaces.Visitor()
    with mount_namespaces.opened(path) as descriptor:
        table = visitor.table(descriptor)
    visitor.close()
    return [table.decode("latin-1"), os.readlink("/proc/self/ns/mnt"), os.getcwd()]


async def test_visitor_reads_the_table_inside_and_returns(pid: int) -> None:
    inside, own, folder = await kit.child.call(
        read_table, f"/proc/{pid}/ns/mnt", deadline=waiting.limit(20)
    )
    assert inside.encode("latin-1") == Path(f"/proc/{pid}/mountinfo").read_bytes()
    assert (own, folder) == (os.readlink("/proc/self/ns/mnt"), "/")


def test_mounts_by_id_agree_with_mountinfo(pid: int, tmpfs: Path) -> None:
    def targets(process: int) -> list[str]:
        return sorted(each.target for each in mountinfo.read(Path(f"/proc/{process}/mountinfo")))

    def agree(process: int) -> bool:
        before = targets(process)
        by_id = sorted(each.target for each in mount_namespaces.mounts(identity(inode(process))))
        return by_id == before == targets(process)

    assert agree(pid)
    # In the tests' own namespace others mount and unmount meanwhile.
    waiting.until(lambda: agree(os.getpid()), 10, "a listing that agrees with the table")
    (copy,) = [m for m in mount_namespaces.mounts(identity(inode(pid))) if m.target == str(tmpfs)]
    assert (copy.fstype, copy.propagation, copy.read_only) == ("tmpfs", "private", False)
    assert copy.device == shown(pid, tmpfs)[0].device


def detach(path: str, number: int, device: list[int], target: str) -> int:
    """For a child process, which moves into the namespace."""
    copies = [mount_namespaces.MountCopy((device[0], device[1]), target)]
    if path:
        return mount_namespaces.detach(path, number, copies)
    by_inode = next(each.id for each in mount_namespaces.walk() if each.inode == number)
    return mount_namespaces.detach_by_id(by_inode, number, copies)


@pytest.mark.parametrize("by_id", [False, True])
async def test_detach_takes_the_private_copy_and_no_other_mount(
    pid: int, tmpfs: Path, by_id: bool
) -> None:
    path = "" if by_id else f"/proc/{pid}/ns/mnt"
    (copy,) = shown(pid, tmpfs)
    other = [copy.device[0], copy.device[1] + 1]

    async def detached(number: int, device: list[int]) -> int:
        arguments = (path, number, device, str(tmpfs))
        return int(await kit.child.call(detach, *arguments, deadline=waiting.limit(20)))

    assert await detached(inode(pid), other) == 0  # another device is mounted there
    if not by_id:
        assert await detached(inode("self"), list(copy.device)) == 0  # another namespace
    assert shown(pid, tmpfs)
    assert await detached(inode(pid), list(copy.device)) == 1
    assert shown(pid, tmpfs) == [] and len(shown(os.getpid(), tmpfs)) == 1


async def test_detach_leaves_a_shared_mount_alone(tmpfs: Path) -> None:
    subprocess.run(["mount", "--make-shared", str(tmpfs)], check=True)
    unshare = ("unshare", "-m", "--propagation", "unchanged")
    with scripts.running("pass", within=unshare) as pid:
        (copy,) = shown(pid, tmpfs)
        arguments = (inode(pid), list(copy.device), str(tmpfs))
        path = f"/proc/{pid}/ns/mnt"
        assert await kit.child.call(detach, path, *arguments, deadline=waiting.limit(20)) == 0
        assert shown(pid, tmpfs) and shown(os.getpid(), tmpfs)
