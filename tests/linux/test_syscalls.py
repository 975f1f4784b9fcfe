import errno
import os

import pytest

from linux import syscalls


def test_checked_raises_the_error_of_the_call() -> None:
    assert syscalls.checked(3, "call") == 3
    syscalls.libc.umount2(b"/nowhere/at/all", 0)
    with pytest.raises(OSError) as caught:
        syscalls.checked(syscalls.libc.umount2(b"/nowhere/at/all", 8), "umount")
    assert caught.value.errno in (errno.ENOENT, errno.EPERM) and caught.value.filename == "umount"


def test_syscall_passes_integers_as_longs() -> None:
    number = {"x86_64": 39, "aarch64": 172}[os.uname().machine]
    assert syscalls.syscall(number, "getpid") == os.getpid()
    with pytest.raises(OSError) as caught:
        syscalls.syscall(2**20, "no such call", 1)
    assert caught.value.errno == errno.ENOSYS


def test_clock_state_is_read() -> None:
    found = syscalls.clock_state()
    assert found.max_error_seconds >= 0 and found.synchronised in (True, False)


def test_type_of_a_file_system() -> None:
    with open("/proc/self/status", "rb") as stream:
        assert syscalls.file_system(stream.fileno()) == 0x9FA0  # PROC_SUPER_MAGIC
    with pytest.raises(OSError, match="Bad file descriptor"):
        syscalls.file_system(-1)
