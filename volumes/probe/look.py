"""Look at one device. Runs in a child that may be abandoned; standard library only, few imports.

The answer is a plain dictionary, the JSON form of ``verdict.Verdict``.
"""

import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from typing import Any

from linux import blkid
from volumes.probe import places

_BLKGETSIZE64 = 0x80081272
_BLKGETDISKSEQ = 0x80081280
_CHUNK = 2**20
_READERS = 8  # a network device answers many small reads at once
_GONE = (errno.ENOMEDIUM, errno.ENXIO, errno.ENODEV, errno.ENOENT)


def _long(descriptor: int, request: int) -> int:
    return int(struct.unpack("=Q", fcntl.ioctl(descriptor, request, bytes(8)))[0])


def examine(path: str, seed: int) -> dict[str, Any]:
    """The verdict on the block device at ``path``. Never raises OSError: not being able to look is
    a verdict too."""
    began = time.monotonic()
    answer: dict[str, Any] = {"device": path, "seed": seed}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        kind = "no_media" if error.errno in _GONE else "unreadable"
        return answer | {"verdict": kind, "where": "open", "errno": error.errno}
    try:
        answer |= {"size": _long(descriptor, _BLKGETSIZE64)}
        try:
            answer["diskseq"] = _long(descriptor, _BLKGETDISKSEQ)
        except OSError:  # before Linux 5.15
            answer["diskseq"] = None
        if answer["size"] == 0:
            return answer | {"verdict": "no_media", "where": "size", "errno": 0}
        answer |= _content(path, descriptor, answer["size"], seed)
    except OSError as error:
        answer |= {"verdict": "unreadable", "where": "device", "errno": error.errno}
    finally:
        os.close(descriptor)
    return answer | {"seconds": round(time.monotonic() - began, 4)}


def _content(path: str, descriptor: int, size: int, seed: int) -> dict[str, Any]:
    buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The page cache of the device may hold what an earlier attachment or fault left there;
        # libblkid reads through it. POSIX_FADV_DONTNEED drops it for this device only.
        os.posix_fadvise(buffered, 0, 0, os.POSIX_FADV_DONTNEED)
        result, values = blkid.probe(buffered)
    finally:
        os.close(buffered)
    if result == blkid.AMBIVALENT:
        return {"verdict": "ambivalent"}
    if result == blkid.FOUND and values:
        return _known(values)
    reads = _Reads(descriptor)
    reads.run(places.marks(size))
    if reads.failed is None and reads.content is None:
        reads.run(places.samples(size, seed))
    counted = {"bytes_read": reads.total, "content_at": reads.content}
    if reads.failed is not None:
        where, code = reads.failed
        return {"verdict": "unreadable", "where": f"offset {where}", "errno": code, **counted}
    if result < 0:
        return {"verdict": "unreadable", "where": "libblkid", "errno": -result, **counted}
    if reads.content is not None:
        return {"verdict": "unknown_content", "offset": reads.content, **counted}
    return {"verdict": "blank_verified", **counted}


def _known(values: dict[str, str]) -> dict[str, Any]:
    kind = "has_fs"
    if values.get("USAGE") == "crypto":
        kind = "encrypted"
    elif "TYPE" not in values:
        kind = "partitioned"
    return {
        "verdict": kind,
        "type": values.get("TYPE") or values.get("PTTYPE") or "unknown",
        "uuid": values.get("UUID") or values.get("PTUUID") or "",
        "label": values.get("LABEL", ""),
    }


class _Reads:
    """Reads places past the page cache. ``failed``: the lowest (offset, errno) that could not be
    read; ``content``: the lowest offset seen that is not zero."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.failed: tuple[int, int] | None = None
        self.content: int | None = None
        self.total = 0

    def run(self, wanted: list[tuple[int, int]]) -> None:
        pieces = [
            (at, min(_CHUNK, start + length - at))
            for start, length in wanted
            for at in range(start, start + length, _CHUNK)
        ]
        pieces.reverse()
        threads = [threading.Thread(target=self._work, args=(pieces,)) for _ in range(_READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, pieces: list[tuple[int, int]]) -> None:
        with mmap.mmap(-1, _CHUNK) as buffer, memoryview(buffer) as view:
            while True:
                try:
                    offset, length = pieces.pop()
                except IndexError:
                    return
                self._one(view, offset, length)

    def _one(self, view: memoryview, offset: int, length: int) -> None:
        fault = None
        data = b""
        try:
            with view[:length] as part:
                got = os.preadv(self._descriptor, [part], offset)
                data = bytes(part[:got])
            if got < length:  # inside the device nothing may be missing
                fault = (offset + got, errno.EIO)
        except OSError as error:
            fault = (offset, error.errno or errno.EIO)
        content = offset + len(data) - len(data.lstrip(b"\0")) if data.strip(b"\0") else None
        with self._lock:
            self.total += len(data)
            if fault is not None and (self.failed is None or fault < self.failed):
                self.failed = fault
            if content is not None and (self.content is None or content < self.content):
                self.content = content
