"""A FUSE file system that shows a directory as an NFS server with root_squash does.

Run as a process: MOUNTPOINT BELOW CONTROL. Every user opens what modes let it open; root opens what
everybody may, and lists and stats all, while CONTROL exists. Without it root opens all.
"""

import errno
import os
import stat
import struct
import sys
from pathlib import Path

from tests.testbed import faultfs

_LOOKUP, _GETATTR, _OPEN, _READ, _OPENDIR, _READDIR, _ACCESS = 1, 3, 14, 15, 27, 28, 34
_NAMES = struct.Struct("=QQII")


class Server(faultfs.Server):
    def __init__(self, mountpoint: str, below: str, control: str) -> None:
        self._paths = {1: below}
        self._numbers = {below: 1}
        self._control = Path(control)
        self._control.parent.mkdir(exist_ok=True)
        self._mount(mountpoint, "allow_other")

    def _number(self, path: str) -> int:
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        return number

    def _status(self, path: str) -> bytes:
        status = os.lstat(path)
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        return struct.pack(
            "=6Q10I", status.st_ino, status.st_size, status.st_blocks,
            *(each // 10**9 for each in times), *(each % 10**9 for each in times), status.st_mode,
            status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _may(self, path: str, user: int, wanted: int) -> bool:
        """``wanted``: the bits for others."""
        status = os.lstat(path)
        if user == 0 and not self._control.exists():
            return True
        bits = status.st_mode >> 6 if status.st_uid == user else status.st_mode
        return bits & wanted == wanted

    def _handle(self, request: bytes) -> None:
        length, code, unique, node = struct.unpack_from("=IIQQ", request, 0)
        (user,) = struct.unpack_from("=I", request, 24)
        body = request[40:length]
        path = self._paths.get(node, "")
        if code == _LOOKUP:
            below = os.path.join(path, os.fsdecode(body.split(b"\0")[0]))
            if not os.path.lexists(below):
                self._reply(unique, errno.ENOENT)
                return
            entry = struct.pack("=QQQQII", self._number(below), 0, 0, 0, 0, 0)
            self._reply(unique, 0, entry + self._status(below))
        elif code == _GETATTR:
            self._reply(unique, 0, struct.pack("=QII", 0, 0, 0) + self._status(path))
        elif code in (_OPEN, _OPENDIR):
            if code == _OPEN and not self._may(path, user, stat.S_IROTH):
                self._reply(unique, errno.EACCES)
                return
            self._reply(unique, 0, struct.pack("=QII", 1, 0, 0))
        elif code == _READ:
            offset, size = struct.unpack_from("=QI", body, 8)
            with open(path, "rb") as file:
                self._reply(unique, 0, os.pread(file.fileno(), size, offset))
        elif code == _READDIR:
            offset, size = struct.unpack_from("=QI", body, 8)
            self._reply(unique, 0, self._names(path, offset, size))
        elif code == _ACCESS:
            self._reply(unique, errno.ENOSYS)
        else:
            super()._handle(request)

    def _names(self, path: str, offset: int, size: int) -> bytes:
        data = b""
        for at, name in enumerate(sorted(os.listdir(path))[offset:], offset + 1):
            raw = os.fsencode(name)
            status = os.lstat(os.path.join(path, name))
            entry = _NAMES.pack(status.st_ino, at, len(raw), stat.S_IFMT(status.st_mode) >> 12)
            entry += raw + bytes(-len(raw) % 8)
            if len(data) + len(entry) > size:
                break
            data += entry
        return data


if __name__ == "__main__":
    server = Server(*sys.argv[1:4])
    print("ready", flush=True)
    server.serve()
