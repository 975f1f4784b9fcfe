"""A FUSE file system of one file, ``disk``, over a backing file, whose reads fail on request.

Run as a process: MOUNTPOINT BACKING CONTROL. CONTROL is JSON, replaced atomically while running: a
list of {"offset", "length", and one of "errno": 5 | "zero": true | "hang": true | "seconds": 0.01}.
One read is served after the other; with "seconds" it takes so long. A hanging read is answered when
the control file no longer says so. Once one hangs, CONTROL.hangs exists.
"""

import ctypes
import errno
import json
import os
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE = 1, 2, 3, 4, 14, 15, 16
_STATFS, _RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _RELEASEDIR = 17, 18, 20, 25, 26, 27, 29
_READDIR = 28
_INTERRUPT, _DESTROY, _BATCH_FORGET, _FALLOCATE = 36, 38, 42, 43
_DISK = 2
_MOST = 131072


class Faults:
    """The control file, read again when it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: tuple[int, int] | None = None
        self._list: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def at(self, offset: int, length: int) -> dict[str, Any] | None:
        with self._lock:
            status = self._path.stat()
            key = (status.st_ino, status.st_mtime_ns)
            if key != self._key:
                self._list = json.loads(self._path.read_text())
                self._key = key
            for fault in self._list:
                if offset < fault["offset"] + fault["length"] and fault["offset"] < offset + length:
                    return fault
        return None


class Server:
    def __init__(self, mountpoint: str, backing: str, control: str) -> None:
        self._file = os.open(backing, os.O_RDWR)
        self._faults = Faults(Path(control))
        self._hangs = Path(f"{control}.hangs")
        self._mount(mountpoint)

    def _mount(self, mountpoint: str, *more: str) -> None:
        self._device = os.open("/dev/fuse", os.O_RDWR)
        self._lock = threading.Lock()
        given = (f"fd={self._device}", "rootmode=40000", "user_id=0", "group_id=0", *more)
        options = ",".join((*given, f"max_read={_MOST}"))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"faultfs", mountpoint.encode(), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount", mountpoint)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MOST + 65536)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                continue
            (code,) = struct.unpack_from("=I", request, 4)
            if code == _DESTROY:
                return
            if code == _READ:  # may hang, and others must go on
                threading.Thread(target=self._answer, args=(request,), daemon=True).start()
            else:
                self._answer(request)

    def _answer(self, request: bytes) -> None:
        """Answer ``request``: one that got none would hold its device for ever."""
        try:
            self._handle(request)
        except Exception:  # says what is wrong with us, and the reader goes on
            self._reply(struct.unpack_from("=Q", request, 8)[0], errno.EREMOTEIO)
            raise

    def _reply(self, unique: int, error: int = 0, data: bytes = b"") -> None:
        with self._lock:
            try:
                os.write(self._device, struct.pack("=IiQ", 16 + len(data), -error, unique) + data)
            except OSError:
                pass  # interrupted, or unmounted meanwhile

    def _attributes(self, node: int) -> bytes:
        size = os.fstat(self._file).st_size if node == _DISK else 0
        mode = 0o100600 if node == _DISK else 0o40700
        times = (0,) * 6
        return struct.pack("=6Q10I", node, size, size // 512, *times[:3], *times[3:], mode, 1,
                           0, 0, 0, 4096, 0)  # fmt: skip

    def _handle(self, request: bytes) -> None:
        length, code, unique, node = struct.unpack_from("=IIQQ", request, 0)
        body = request[40:length]
        if code == _INIT:
            (ahead,) = struct.unpack_from("=I", body, 8)
            answer = struct.pack("=IIIIHHIIHHI28x", 7, 31, ahead, 0, 12, 9, _MOST, 1, 0, 0, 0)
            self._reply(unique, 0, answer)
        elif code == _LOOKUP:
            if body.split(b"\0")[0] != b"disk":
                self._reply(unique, errno.ENOENT)
                return
            entry = struct.pack("=QQQQII", _DISK, 0, 3600, 3600, 0, 0)
            self._reply(unique, 0, entry + self._attributes(_DISK))
        elif code in (_GETATTR, _SETATTR):
            self._reply(unique, 0, struct.pack("=QII", 3600, 0, 0) + self._attributes(node))
        elif code == _READDIR:
            (begin,) = struct.unpack_from("=Q", body, 8)
            entry = struct.pack("=QQII8s", _DISK, 1, 4, 8, b"disk")
            self._reply(unique, 0, b"" if begin else entry)
        elif code in (_OPEN, _OPENDIR):
            direct = 1 if code == _OPEN else 0  # FOPEN_DIRECT_IO: no page cache hides the faults
            self._reply(unique, 0, struct.pack("=QII", 1, direct, 0))
        elif code == _READ:
            self._read(unique, *struct.unpack_from("=QI", body, 8))
        elif code == _WRITE:
            offset, size = struct.unpack_from("=QI", body, 8)
            os.pwrite(self._file, body[40 : 40 + size], offset)
            self._reply(unique, 0, struct.pack("=II", size, 0))
        elif code == _STATFS:
            self._reply(unique, 0, struct.pack("=5Q4I24x", *[2**20] * 3, 9, 9, 4096, 255, 4096, 0))
        elif code in (_RELEASE, _FSYNC, _FLUSH, _RELEASEDIR):
            self._reply(unique)
        elif code not in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            self._reply(unique, errno.ENOSYS)

    def _read(self, unique: int, offset: int, size: int) -> None:
        fault = self._faults.at(offset, size)
        while fault and fault.get("hang"):
            self._hangs.touch()
            time.sleep(0.05)
            fault = self._faults.at(offset, size)
        if fault:
            time.sleep(fault.get("seconds", 0))
        if fault and "errno" in fault:
            self._reply(unique, fault["errno"])
            return
        data = os.pread(self._file, size, offset)
        if fault and fault.get("zero"):
            first = max(0, fault["offset"] - offset)
            last = min(len(data), fault["offset"] + fault["length"] - offset)
            data = data[:first] + bytes(last - first) + data[last:]
        self._reply(unique, 0, data)


if __name__ == "__main__":
    server = Server(*sys.argv[1:4])
    print("ready", flush=True)
    server.serve()
