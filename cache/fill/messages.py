"""Messages between a pass and its workers: length-prefixed JSON over pipes.

Names are str by os.fsdecode: bytes that are no UTF-8 travel as lone surrogates, which JSON keeps.
"""

import json
import os
import struct
from typing import Any

# Where a worker gets its jobs and says its answers: standard input and output.
JOBS, ANSWERS = 0, 1
_LENGTH = struct.Struct("<I")
# A chunk of entries with 255-byte names is below 1 MiB; anything beyond this is a broken stream.
LONGEST = 64 * 1024 * 1024


def pack(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def send(descriptor: int, message: Any) -> None:
    """Write one message whole; blocks while the pipe is full. OSError when the reader has gone."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(descriptor, view) :]


def answer(message: Any) -> None:
    """A worker's answer to its pass."""
    send(ANSWERS, message)


def receive(descriptor: int) -> Any | None:
    """The next message, None at the end of the stream; blocks. ValueError on a broken stream."""
    head = _exactly(descriptor, _LENGTH.size)
    if head is None:
        return None
    body = _exactly(descriptor, _length(head))
    return None if body is None else json.loads(body)


def _length(head: bytes) -> int:
    length = int(_LENGTH.unpack(head)[0])
    if length > LONGEST:
        raise ValueError(f"message of {length} bytes: the stream is broken")
    return length


def _exactly(descriptor: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(descriptor, count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Stream:
    """Messages out of bytes as they arrive; for a reader that must not block."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes. ValueError on a broken stream."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _length(bytes(self._buffer[: _LENGTH.size]))
            if len(self._buffer) < end:
                break
            found.append(json.loads(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return found
