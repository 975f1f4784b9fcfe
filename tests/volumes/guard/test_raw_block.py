"""Raw block volumes on the kernel's own program: who may write, with and without an agent.

Loop devices stand for both kinds of drivers: as they are, disks stay and get other media (nbd);
removed and added, and taken for a driver that does so, each attachment has a disk of its own (krbd,
which the guest of test_guest.py has for real).
"""

import asyncio
import contextlib
import math
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, constants, waiting
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.guard import controller, kernel, lease
from volumes.node import raw_block
from volumes.node import watch as node_watch
from volumes.node.watch import RawBlockWatch

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

SIZE = 64 * blockdev.MiB
_LINE = (
    b"%d 2 0:5 /%s /var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pvc/u"
    b" rw - devtmpfs udev rw"
)


def _line(name: str, mount: int = 7) -> bytes:
    return _LINE % (mount, name.encode())


def test_published_finds_kubelets_bind() -> None:
    elsewhere = _line("rbd1").replace(b"/volumeDevices/", b"/devices/")
    table = b"\n".join((elsewhere, _line("rbd0"), b""))
    assert raw_block.published(table) == {"rbd0": {7}}


def test_a_bind_mount_of_an_earlier_medium_permits_nothing_of_the_next() -> None:
    first, second = frozenset({7}), frozenset({8})
    kept = raw_block.PublishedDevice({"nbd0": first})
    assert "nbd0" in kept
    kept.attached_anew("nbd0")
    assert "nbd0" not in kept
    assert kept.update({"nbd0": first | second}) == {"nbd0"} and "nbd0" in kept  # the next pod's
    assert kept.update({"nbd0": first}) == {"nbd0"} and "nbd0" not in kept
    assert kept.update({}) == {"nbd0"} and "nbd0" not in kept
    assert kept.update({"nbd0": first}) == {"nbd0"} and "nbd0" in kept  # its number is used again


@pytest.mark.parametrize("told", ["of the end", "of the next disk alone"])
def test_a_leaked_bind_mount_of_a_node_in_tmpfs_permits_nothing_of_the_next_disk(told: str) -> None:
    """The mount stays when its disk goes: only its number leads to the next disk."""
    leaked, second = frozenset({7}), frozenset({8})
    kept = raw_block.PublishedDevice({"rbd0": leaked})
    if told == "of the end":
        kept.attached_anew("rbd0")
    kept.update({raw_block.NO_DISK: leaked})
    if told != "of the end":
        kept.attached_anew("rbd0")  # what was there is not known under its name any more
    kept.update({"rbd0": leaked})
    assert "rbd0" not in kept
    kept.update({"rbd0": leaked | second})
    assert "rbd0" in kept


# A name that the kernel has cut within a character.
ODD = "日本語日本語".encode()[:15][:14]
POD = "0::/kubepods.slice/kubepods-pod8d2a38a4_b6d2_4e0c_a9a2_5f4a7d2c9c11.slice/cri-x.scope\n"


def _process(proc: Path, pid: int, name: bytes, space: int, cgroup: str = "0::/x\n") -> None:
    (proc / f"{pid}").mkdir()
    (proc / f"{pid}/comm").write_bytes(name + b"\n")
    (proc / f"{pid}/cgroup").write_text(cgroup)
    (proc / f"{pid}/mountinfo").write_text(f"{space} 1 8:1 / / rw - ext4 /dev/sda rw\n")


def test_spaces_are_pid_ones_and_those_of_kubelets(tmp_path: Path) -> None:
    for pid, name, space in (
        (1, b"systemd", 10), (20, b"kubelet", 10), (30, b"kubelet", 11), (31, b"kubelet", 11),
        (40, b"sleep", 12), (50, b"k3s-agent", 13), (60, ODD, 14),
    ):  # fmt: skip
        _process(tmp_path, pid, name, space)
    _process(tmp_path, 70, b"k3s-server", 15, POD)  # a cluster in a pod publishes nothing here
    running, found = raw_block.spaces(str(tmp_path))
    assert running == {20, 30, 31, 50}
    assert found.keys() == {b"10", b"11", b"13"}
    assert found[b"10"] == 1 and found[b"11"] in (30, 31)


def test_a_kubelet_that_is_a_zombie_hides_no_other(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    waiting.until(
        lambda: ") Z " in Path(f"/proc/{ended.pid}/stat").read_text(), 20, "it to be a zombie"
    )
    try:
        _process(tmp_path, 1, b"systemd", 10)
        _process(tmp_path, 20, b"kubelet", 11)
        _process(tmp_path, ended.pid, b"kubelet", 12)
        (tmp_path / f"{ended.pid}/mountinfo").unlink()
        (tmp_path / f"{ended.pid}/mountinfo").symlink_to(f"/proc/{ended.pid}/mountinfo")
        with pytest.raises(OSError):
            (tmp_path / f"{ended.pid}/mountinfo").read_bytes()
        running, found = raw_block.spaces(str(tmp_path))
        assert running == {20} and found == {b"10": 1, b"11": 20}
    finally:
        ended.wait()


async def test_a_look_that_fails_ends_no_guard_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[raw_block.Table] = []
    failed = asyncio.Event()

    def fail() -> Any:
        failed.set()
        raise ValueError("whatever it is")

    with monkeypatch.context() as broken:
        broken.setattr(raw_block, "spaces", fail)
        broken.setattr(node_watch, "SEARCH_SECONDS", 0.05)
        watch = RawBlockWatch(lambda table, _: seen.append(table))
        try:
            await watch.start()  # and so does the guard
            failed.clear()
            await asyncio.wait_for(failed.wait(), waiting.limit(60))
            assert not seen
            broken.setattr(raw_block, "spaces", lambda: (frozenset(), {b"1": 1}))
            await waiting.until_async(lambda: seen, 60, "the look after it")
        finally:
            await watch.close()


async def test_a_table_that_cannot_be_read_counts_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw_block, "spaces", lambda: (frozenset(), {b"1": 1}))
    watch = RawBlockWatch(lambda *_: None)
    try:
        mounted = watch._spaces[1].watch
        assert mounted is not None
        rows = _line("rbd0")

        async def read() -> bytes:
            return rows

        async def fail() -> bytes:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(mounted, "read", read)
        assert (await watch._look())["rbd0"] == {7}
        monkeypatch.setattr(mounted, "read", fail)
        assert (await watch._look())["rbd0"] == {7}
        monkeypatch.setattr(mounted, "read", read)
        rows = b""
        assert not await watch._look()
    finally:
        await watch.close()


@contextlib.contextmanager
def _published(device: str, folder: Path) -> Iterator[None]:
    """kubelet's bind mount of the device node."""
    target = folder / "plugins/kubernetes.io/csi/volumeDevices/publish/pvc/pod"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()
    blockdev.run("mount", "--bind", device, str(target))
    try:
        yield
    finally:
        blockdev.run("umount", str(target))


def _content(path: Path) -> Path:
    """What a pod may have there: nothing that anybody recognises."""
    blockdev.blank(path, SIZE)
    with path.open("r+b") as stream:
        stream.write(os.urandom(2**20))
    return path


def _writes(where: cell.Cell, device: str) -> bool:
    return where.run("dd", "if=/dev/zero", f"of={device}", "count=1").returncode == 0


@contextlib.contextmanager
def _named_kubelet(folder: Path) -> Iterator[None]:
    """A process of that name in our own mount namespace."""
    program = shutil.copy(os.path.realpath("/bin/sleep"), folder / "kubelet")
    process = subprocess.Popen([program, "1000"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_the_permission_follows_the_publication(where: cell.Cell, tmp_path: Path) -> None:
    """Where disks stay: granted, kept by a killed agent, renewed by the next one, ended."""
    images = [_content(tmp_path / name) for name in ("first", "second")]
    with cell.agent(tmp_path / "agent", where) as agent, blockdev.loop(images[0]) as device:

        def may(yes: bool, what: str) -> Any:
            return waiting.until(lambda: _writes(where, device) is yes, 20, what)

        def until() -> float:
            held = agent.get("/v1/volumes/guard")["leases"]
            return max((each["until_monotonic"] for each in held), default=0.0)

        may(False, "a refusal before anything is published")
        with _published(device, tmp_path):
            may(True, "the permission")
            before = until()
            agent.kill()
            assert _writes(where, device)
            agent.start()
            waiting.until(lambda: until() > before, 20, "the renewal by the next agent")
            assert _writes(where, device)
        may(False, "a refusal after the unpublish")

        with _published(device, tmp_path):
            may(True, "the permission again")
            agent.kill()
        with _named_kubelet(tmp_path):  # else nobody can have unpublished it
            agent.start()  # the pod ended while no agent was there
            may(False, "a refusal by the next agent")

        with _published(device, tmp_path):
            may(True, "the permission a third time")
            blockdev.run("losetup", "-d", device)
            blockdev.run("losetup", device, str(images[1]))
            # The first pod's bind mount is still there, and is none of the second volume.
            may(False, "a refusal for the next volume on this number")
            with _published(device, tmp_path / "next pod"):
                may(True, "the permission of the next pod")
            may(False, "its end")


@contextlib.asynccontextmanager
async def _controller(folder: Path, where: cell.Cell) -> AsyncIterator[controller.Controller]:
    """An agent's guard in this process; at the end it is gone like a killed one: nothing is taken
    back."""
    wanted = constants.made(settings.GuardSettings, **cell.settings(where, lease="2s"))
    made = controller.Controller(wanted, (), witness(), state_dir=folder)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def _held(guard: controller.Controller, device: str) -> kernel.KernelLease:
    """Its lease, once there is one."""
    status = os.stat(device)
    number = os.major(status.st_rdev), os.minor(status.st_rdev)
    assert guard.in_force.guard is not None
    kernels = guard.in_force.guard

    async with asyncio.timeout(waiting.limit(60)):
        while (held := kernels.leases().get(number)) is None or not held.until:  # reserved
            guard.manager.mounts_changed(raw_block.published(raw_block.host_table()))
            await asyncio.sleep(0.05)
    return held


@pytest.mark.parametrize("disks", ["stay", "are new"])
async def test_an_agent_dead_for_longer_than_any_lease(
    where: cell.Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disks: str
) -> None:
    monkeypatch.setattr(lease, "RAW_SECONDS", 2.0)
    if disks == "are new":
        monkeypatch.setattr(lease, "NEW_DISKS", frozenset({"loop"}))
    blank = blockdev.blank(tmp_path / "blank", SIZE)
    with (
        blockdev.loop(_content(tmp_path / "raw")) as device,
        blockdev.loop(blank) as other,
        _published(device, tmp_path),
    ):
        async with _controller(tmp_path / "state", where) as guard:
            held = await _held(guard, device)
            assert (held.until == math.inf) is (disks == "are new")
            await _held(guard, other)
        # No agent: a lease beside it ends, and so does the permission where disks stay.
        await waiting.until_async(lambda: not _writes(where, other), 10, "the lease to end")
        if disks == "are new":
            await asyncio.sleep(lease.RAW_SECONDS)
            assert _writes(where, device)
        else:
            await waiting.until_async(lambda: not _writes(where, device), 10, "its end")
        async with _controller(tmp_path / "state", where) as guard:
            await _held(guard, device)
            # In a thread: the agent, which renews it all the time, is this loop.
            await waiting.until_async(
                lambda: asyncio.to_thread(_writes, where, device), 10, "the renewal"
            )
    if disks == "are new":  # the disk of that number is gone; the next pod's gets its number
        with blockdev.loop(_content(tmp_path / "next"), number=_number(device)) as again:
            assert again == device
            assert not _writes(where, again)


def _number(device: str) -> int:
    return int(device.removeprefix("/dev/loop"))


# A kubelet with mounts that nobody else sees. Its /dev is devtmpfs, or a tmpfs with its own nodes.
_KUBELET = """
mount --make-rprivate /
node=$DEVICE
if [ "$1" = tmpfs ]; then
    mount -t tmpfs none "$FOLDER/dev"
    node=$FOLDER/dev/some-name
    mknod "$node" b $NUMBER
fi
target=$FOLDER/volumeDevices/publish/pvc/pod
echo ready; read -r _
mount --bind "$node" "$target"
echo published; read -r _
umount "$target"
echo unpublished; read -r _
mount --bind "$node" "$target"
echo published; read -r _
"""


class _Kubelet:
    def __init__(self, folder: Path, device: str, dev: str) -> None:
        number = os.stat(device).st_rdev
        (folder / "dev").mkdir()
        (folder / "volumeDevices/publish/pvc").mkdir(parents=True)
        (folder / "volumeDevices/publish/pvc/pod").touch()
        shutil.copy(os.path.realpath("/bin/sh"), folder / "kubelet")
        numbers = f"{os.major(number)} {os.minor(number)}"
        self.process = subprocess.Popen(
            [
                *("unshare", "--mount", str(blockdev.APART), str(folder), "--"),
                *(str(folder / "kubelet"), "-ec", _KUBELET, "kubelet", dev),
            ],
            env={**os.environ, "FOLDER": str(folder), "DEVICE": device, "NUMBER": numbers},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self.says() == "ready"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def goes_on(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        return self.says()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("dev", ["devtmpfs", "tmpfs"])
def test_the_publication_is_seen_in_kubelets_own_mount_namespace(
    where: cell.Cell, tmp_path: Path, dev: str
) -> None:
    with blockdev.loop(_content(tmp_path / "raw")) as device:
        (tmp_path / "kubelet").mkdir()
        kubelet = _Kubelet(tmp_path / "kubelet", device, dev)
        try:
            with cell.agent(tmp_path / "agent", where) as agent:

                def may(yes: bool, what: str) -> Any:
                    return waiting.until(lambda: _writes(where, device) is yes, 20, what)

                may(False, "a refusal before anything is published")
                assert kubelet.goes_on() == "published"
                may(True, "the permission")
                assert kubelet.goes_on() == "unpublished"
                may(False, "a refusal after the unpublish")
                agent.kill()
                assert kubelet.goes_on() == "published"
                agent.start()
                may(True, "the permission by the next agent")
        finally:
            kubelet.end()


@pytest.mark.parametrize("at_start", [True, False])
async def test_a_kubelet_has_been_seen_once_it_had_time_to_publish(
    monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    there = [os.getpid()] if at_start else []
    monkeypatch.setattr(raw_block, "kubelets", lambda _: list(there))
    told = list[bool]()
    watch = RawBlockWatch(lambda _, whole: told.append(whole))
    try:
        for _ in range(3):
            await watch._tell()
            watch._searched = 0.0
            there[:] = [os.getpid()]
    finally:
        await watch.close()
    assert told == ([True] * 3 if at_start else [False, False, True])


async def test_a_kubelet_that_starts_again_keeps_its_publications(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a kubelet can unpublish, so nothing ends while none runs."""
    there: list[int] = []  # beside others of this machine, whose kubelets are not asked
    monkeypatch.setattr(raw_block, "kubelets", lambda _: list(there))
    with blockdev.loop(_content(tmp_path / "raw")) as device, contextlib.ExitStack() as stack:
        made = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            made.append(_Kubelet(tmp_path / name, device, "tmpfs"))
            stack.callback(made[-1].end)
        first, second = made
        name = device.removeprefix("/dev/")
        there.append(first.process.pid)
        assert first.goes_on() == "published"
        watch = RawBlockWatch(lambda *_: None)
        try:
            assert name in await watch._look()
            first.end()
            there.clear()
            for _ in range(3):
                await watch._search()
                assert name in await watch._look()
            # Who holds the namespace keeps its mounts.
            assert all(space.watch is None for pid, space in watch._spaces.items() if pid != 1)
            there.append(second.process.pid)
            await watch._search()
            assert name in await watch._look(), "it has had no time to publish anything"
            await watch._search()
            assert name not in await watch._look(), "it was not published again"
        finally:
            await watch.close()
