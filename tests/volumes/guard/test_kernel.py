"""The layouts shared with the BPF program, and the settings in its terms."""

import dataclasses
import errno
import os
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from linux import blockdev, mountinfo, procfs, syscalls
from tests.testbed import waiting
from volumes import settings
from volumes.guard import kernel


def test_event_unpacks_program_layout() -> None:
    raw = struct.pack("=QQ6I16s16s256s", 5_000_000_000, 25, 7, 6, 252, 0, 2, 12,
                      b"mkfs.ext4", b"csi", b"mkfs\0-F\0/dev\0garbage")  # fmt: skip
    event = kernel.Event.unpack(raw + bytes(8))
    assert (event.time, event.number, event.denied) == (5.0, (252, 0), True)
    assert (event.program, event.arguments) == ("mkfs.ext4", ("mkfs", "-F", "/dev"))


def test_layouts_match_program_source() -> None:
    text = kernel.OBJECT.with_name("guard.bpf.c").read_text()
    assert "enum { MODE_OFF, MODE_DRY_RUN, MODE_ENFORCE };" in text
    names = ", ".join(name.upper() for name in kernel.COUNTERS)
    assert f"enum {{ {names}, COUNTERS }};" in text
    kinds = (f"{kind.name} = {kind}" if kind == 1 else kind.name for kind in kernel.Kind)
    assert f"enum {{ {', '.join(kinds)} }};" in text
    assert f"#define NAME {kernel.NAME_BYTES} " in text
    assert f"#define WORD {kernel.WORD_BYTES} " in text
    assert len(text.splitlines()) < 300


def test_wanted_counts_per_device_majors_as_rbd(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n\nBlock devices:\n 43 nbd\n252 rbd0\n253 rbd\n259 blkext\n"
    )
    majors = blockdev.majors(tmp_path)
    assert majors == {43: "nbd", 252: "rbd", 253: "rbd", 259: "blkext"}
    wanted = kernel.wanted(settings.GuardSettings(), kernel.Mode.ENFORCE, majors)
    assert wanted.majors == {43, 252, 253}


class _Map:
    """The part of a kernel map that a copy uses."""

    def __init__(self, value_size: int, **values: bytes) -> None:
        self.info = SimpleNamespace(value_size=value_size)
        self.values = {name.encode(): value for name, value in values.items()}

    def snapshot(self) -> list[bytes]:
        return list(self.values)

    def get(self, key: bytes) -> bytes | None:
        return self.values.get(key)

    def set(self, key: bytes, value: bytes) -> None:
        assert len(value) == self.info.value_size
        self.values[key] = value


def test_leases_of_the_program_before_are_kept_at_an_upgrade() -> None:
    before = _Map(24, a=struct.pack("=QQQ", 5_000_000_000, 2, 7))
    after = _Map(32)
    kernel._copy(before, after)  # type: ignore[arg-type]  # a stand-in for maps of two programs
    assert kernel.KernelLease.unpack(after.values[b"a"]) == kernel.KernelLease(5.0, 2, 7, 0.0)
    older = _Map(16)
    kernel._copy(after, older)  # type: ignore[arg-type]  # a stand-in for maps of two programs
    assert not older.values, "what does not fit is not cut"


def _started(pid: int) -> procfs.StartedProcess:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return procfs.StartedProcess(ticks * 10**9 // os.sysconf("SC_CLK_TCK"), pid)


def test_a_writer_has_ended_when_its_last_thread_has() -> None:
    """Its first thread may end before that, and is a zombie then."""
    script = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "ctypes.CDLL(None).pthread_exit(0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        started = _started(process.pid)
        stat = Path(f"/proc/{process.pid}/stat")
        waiting.until(lambda: ") Z " in stat.read_text(), 20, "the end of the first thread")
        assert not started.has_ended()
        assert started._replace(started=started.started - 10**9).has_ended(), "an earlier one"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started.has_ended(), "a zombie"
    assert started.has_ended()


def test_a_writer_without_a_descriptor_of_the_device_has_closed_it(tmp_path: Path) -> None:
    null = (1, 3)  # no block device
    with subprocess.Popen(["sleep", "infinity"]) as process:
        started = _started(process.pid)
        assert started.has_closed((7, 4000))
        assert started.has_closed(null), "another device with the number"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not started.has_closed((7, 4000)), "its first thread may be the only one to end"


def test_a_file_that_a_writer_closes_meanwhile_is_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    readlink, closed = os.readlink, iter([True, False, True])

    def vanishes(path: str) -> str:
        if next(closed, False):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return readlink(path)

    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            monkeypatch.setattr(os, "readlink", vanishes)
            assert _started(process.pid).has_closed((7, 4000))
        finally:
            process.kill()


def test_the_open_device_of_a_writer_that_closes_other_files_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """At each look it has closed another one."""
    readlink = os.readlink

    def vanishes(path: str) -> str:
        if path.endswith("/0"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return readlink(path)

    with (
        (tmp_path / "node").open("w") as node,
        subprocess.Popen(["sleep", "infinity"], stdout=node) as process,
    ):
        monkeypatch.setattr(os, "readlink", vanishes)
        closed = [
            _started(process.pid).has_closed((7, 4000), doubt=doubt) for doubt in (False, True)
        ]
        process.kill()
    assert closed == [False, False]


def test_a_writer_of_many_files_counts_as_one_that_closed_the_device() -> None:
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (6000, 6000))\n"
        "held = [open('/dev/null', 'w') for _ in range(5000)]\n"
        "print('open', flush=True); sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdout.readline() == b"open\n"
        closed = _started(process.pid).has_closed((7, 4000))
        process.kill()
    assert closed


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that statx was asked for. ``node`` is the block device 7:4000."""
    found, statx = list[str](), syscalls.Statx

    def noted(mask: int) -> Callable[[str], syscalls.FileStatus | None]:
        def place(path: str) -> syscalls.FileStatus | None:
            found.append(os.readlink(path))
            status = statx(mask)(path)
            if status is None or not found[-1].endswith("/node"):
                return status
            return status._replace(mode=stat.S_IFBLK, node=(7, 4000))

        return place

    monkeypatch.setattr(syscalls, "Statx", noted)
    return found


@pytest.mark.parametrize(("mode", "seen", "options", "closed"), [
    ("r", True, "rw", True),  # it cannot write with it
    ("w", True, "rw", False),
    ("w", True, "rw,nodev", True),
    ("r", False, "rw", True),
    ("w", False, "rw", False),
])  # fmt: skip
def test_a_file_whose_server_may_hang_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], mode: str, seen: bool,
    options: str, closed: bool,
) -> None:  # fmt: skip
    """statx of it could wait for the server. Neither is one on a mount that the process does not
    see (``seen``), for nobody knows what that is."""
    file = tmp_path / "node"
    file.touch()
    there = mountinfo.containing(str(file), mountinfo.read())
    assert there is not None
    served = dataclasses.replace(there, fstype="beegfs", options=frozenset(options.split(",")))
    others = [each for each in mountinfo.read() if each.mount_id != there.mount_id]
    monkeypatch.setattr(mountinfo, "of", lambda pid: [*others, *([served] if seen else [])])
    null = subprocess.DEVNULL
    with (
        file.open(mode) as opened,
        subprocess.Popen(["sleep", "infinity"], stdin=null, stdout=opened, stderr=null) as process,
    ):
        said = _started(process.pid).has_closed((7, 4000))
        process.kill()
    assert (said, str(file) in asked) == (closed, False)


def test_a_log_in_a_container_is_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """Or a driver that looked at a device would keep it as long as it lives."""
    file = tmp_path / "log"
    file.touch()
    mounts = [dataclasses.replace(each, fstype="overlay") for each in mountinfo.read()]
    monkeypatch.setattr(mountinfo, "of", lambda pid: mounts)
    with file.open("w") as out, subprocess.Popen(["sleep", "infinity"], stdout=out) as process:
        closed = _started(process.pid).has_closed((7, 4000))
        process.kill()
    assert (closed, str(file) in asked) == (True, True)


def test_streams_that_another_namespace_opened_are_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a service with mounts of its own, or of a shell that entered the host's from a pod."""
    host = mountinfo.read()
    monkeypatch.setattr(mountinfo, "of", lambda pid: host if pid == 1 else [])
    null = subprocess.DEVNULL
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(["sleep", "infinity"], stdin=null, stdout=null, stderr=log) as process,
    ):
        closed = [_started(process.pid).has_closed((7, 4000))]
        process.kill()
    monkeypatch.setattr(mountinfo, "of", lambda pid: [])
    ours, theirs = os.openpty()
    with subprocess.Popen(
        ["sleep", "infinity"], stdin=theirs, stdout=null, stderr=theirs
    ) as process:
        closed.append(_started(process.pid).has_closed((7, 4000)))
        process.kill()
    os.close(ours)
    os.close(theirs)
    assert closed == [True, True]


def test_the_device_of_a_writer_in_a_chroot_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    """Its table counts from its root, /proc/PID/fd from ours: by path the node lies on that."""
    file = tmp_path / "node"
    file.touch()
    there = mountinfo.containing(str(file), mountinfo.read())
    assert there is not None
    root = mountinfo.parse_line(b"1 0 0:1 / / rw - nfs server rw")
    within = dataclasses.replace(there, target="/dev", fstype="devtmpfs")
    monkeypatch.setattr(mountinfo, "of", lambda pid: [root, within])
    with (
        file.open("w") as opened,
        subprocess.Popen(["sleep", "infinity"], stdout=opened) as process,
    ):
        closed = _started(process.pid).has_closed((7, 4000))
        process.kill()
    assert (closed, str(file) in asked) == (False, True)


@pytest.mark.parametrize("device", [False, True])
def test_after_a_lease_a_file_on_an_unmounted_mount_counts_as_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], device: bool
) -> None:
    """A log keeps no blank volume refused for as long as its program lives. The ``device`` that is
    seen open does."""
    node = tmp_path / "node"
    node.touch()
    gone = mountinfo.containing("/dev/shm/log", mountinfo.read())
    mounts = [each for each in mountinfo.read() if each != gone]
    monkeypatch.setattr(mountinfo, "of", lambda pid: mounts)
    with (
        tempfile.NamedTemporaryFile(dir="/dev/shm") as log,
        node.open("w") as other,
        subprocess.Popen(["sleep", "infinity"], stdout=log, stderr=other if device else None)
        as process,
    ):  # fmt: skip
        started = _started(process.pid)
        closed = [started.has_closed((7, 4000), doubt=doubt) for doubt in (False, True)]
        process.kill()
    assert closed == [False, not device]


def test_a_look_at_the_files_of_a_writer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have a million: the look is in doubt then, and others wait for its thread."""
    monkeypatch.setattr(procfs, "_FILES_SECONDS", -1.0)
    with subprocess.Popen(["sleep", "infinity"]) as process:
        started = _started(process.pid)
        closed = [started.has_closed((7, 4000), doubt=doubt) for doubt in (False, True)]
        process.kill()
    assert closed == [False, True]


def test_of_another_pid_namespace_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's numbers are other processes here."""
    gone = procfs.StartedProcess(1, 2**22 - 1)
    assert gone.has_ended()
    monkeypatch.setattr(procfs, "_HOST_PIDS", 1)
    assert not gone.has_ended()
    assert not procfs.StartedProcess(0, os.getpid()).has_closed((7, 4000))
