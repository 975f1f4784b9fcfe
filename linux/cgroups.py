"""cgroup v2: from an id, as BPF programs give it, to a path."""

import ctypes
import errno
import os
import struct
from pathlib import Path

_FILEID_KERNFS = 0xFE


def path_of(mount: int, number: int) -> str:
    """The path of the cgroup with that id, below the hierarchy's mount that is open as ``mount``.

    Empty when it has gone meanwhile. Needs CAP_DAC_READ_SEARCH. Raises OSError for anything else.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer(struct.pack("=IiQ", 8, _FILEID_KERNFS, number), 16)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = libc.open_by_handle_at(mount, handle, flags)
    if fd < 0:
        code = ctypes.get_errno()
        if code in (errno.ESTALE, errno.ENOENT):
            return ""
        raise OSError(code, os.strerror(code), f"cgroup {number}")
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)
