"""Messages through a pipe: each behind its length, without blocking where the reader must not."""

import os
import struct
from typing import Generic, TypeVar

import msgspec

import kit.messages

_LENGTH = struct.Struct("<I")
READ_BYTES = 1024 * 1024
# A chunk of entries with 255-byte names is below 1 MiB; a longer message is a broken stream.
LONGEST = 64 * 1024 * 1024

T = TypeVar("T")


def pack(message: msgspec.Struct) -> bytes:
    body = kit.messages.encode(message).encode()
    return _LENGTH.pack(len(body)) + body


def send(descriptor: int, message: msgspec.Struct) -> None:
    """Write one message; blocks while the pipe is full. OSError when nobody reads it."""
    view = memoryview(pack(message))
    while view:
        view = view[os.write(descriptor, view) :]


class MessageStream(Generic[T]):
    """Messages out of bytes as they arrive, for a reader that must not block."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages that ``data`` completes. ValueError on a broken stream."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _LENGTH.size:
            length = int(_LENGTH.unpack_from(self._buffer)[0])
            if length > LONGEST:
                raise ValueError(f"message of {length} bytes: the stream is broken")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            found.append(kit.messages.decode(bytes(self._buffer[_LENGTH.size : end]), self._kind))
            del self._buffer[:end]
        return found


def receive(descriptor: int, kind: type[T]) -> T | None:
    """The next message, None at the end of the stream; blocks. ValueError on a broken stream.

    For a worker, which gets a message only after it answered the one before.
    """
    stream = MessageStream(kind)
    while data := os.read(descriptor, READ_BYTES):
        if found := stream.feed(data):
            return found[0]
    return None
