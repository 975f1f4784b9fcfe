"""The layouts shared with the BPF program, and the settings in its terms."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from linux import blockdev, procfs
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
    assert len(text.splitlines()) < 350


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


def test_of_another_pid_namespace_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's numbers are other processes here."""
    gone = procfs.StartedProcess(1, 2**22 - 1)
    assert gone.has_ended()
    monkeypatch.setattr(procfs, "_HOST_PIDS", 1)
    assert not gone.has_ended()
