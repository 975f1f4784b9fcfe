"""Status requests on the unix socket, answered before they reach the HTTP library.

Monitors ask for ``/v1/status`` all the time, and all get the same bytes (``overview.Held``). The
library would take most of an answer's time, on the loop that also fills the store. So each
connection of a caller who may read begins here: a request that is exactly one for the status gets
these bytes. At the first that is anything else the library takes over the connection, with all that
has arrived of it, and keeps it.

On the metrics port kubelet's liveness probe is answered before anything is made for the connection:
a flood of connections costs so little each that the probe among them is in time.
"""

import asyncio
import re
import socket
import time
from collections.abc import Callable

import structlog

from nodeagent.api import own

log = structlog.get_logger("agent")

# No header that changes how a request is read or answered; what is cut or malformed is the
# library's to judge.
_REQUEST = re.compile(
    rb"GET /v1/status HTTP/1\.1\r\n"
    rb"(?:(?:host|user-agent|accept|accept-encoding): [\x20-\x7e]{0,256}\r\n){1,4}\r\n",
    re.IGNORECASE,
)
# A probe as kubelet sends it: it asks once and leaves. No browser can ask for that.
_PROBE = re.compile(
    rb"GET /healthz HTTP/1\.1\r\n"
    rb"(?=(?:[^\r]*\r\n){0,4}connection: close\r\n)"
    rb"(?:(?:host|user-agent|accept|accept-encoding|connection): [\x20-\x7e]{0,256}\r\n){1,5}\r\n",
    re.IGNORECASE,
)
_LARGEST_PROBE = 2048
_ALIVE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\n" + (
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(own.ALIVE), own.ALIVE)
)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

Library = Callable[[], asyncio.Protocol]


def probed(connection: socket.socket) -> bool | None:
    """Whether it has asked for ``/healthz`` as kubelet does, and got its answer.

    None: it has asked nothing yet. OSError: it has left.
    """
    try:
        asked = connection.recv(_LARGEST_PROBE, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    if not asked:
        raise ConnectionResetError
    if _PROBE.fullmatch(asked) is None:
        return False
    connection.recv(len(asked))  # what is left unread would become a reset
    connection.send(_ALIVE)
    return True


class Door:
    """The connections of one listener that have not been handed over; the longest silent first."""

    def __init__(self, answer: Callable[[], bytes], idle: float, write: float) -> None:
        """``answer``: the body. ``idle``: seconds that a connection may be silent; ``write``: that
        it may leave an answer unread."""
        self._answer, self.idle, self.write = answer, idle, write
        self._body, self._message = b"", b""
        self.silent: dict[Connection, None] = {}

    def message(self) -> bytes:
        """Head and body; made once of each body."""
        body = self._answer()
        if body is not self._body:
            self._body, self._message = body, _HEAD % len(body) + body
        return self._message

    def drop_oldest(self) -> bool:
        """Close the connection that was silent longest. False when no connection is open."""
        for oldest in self.silent:
            oldest.abort()
            return True
        return False

    def close(self) -> None:
        for each in list(self.silent):
            each.abort()


class Connection(asyncio.Protocol):
    """One connection until the library takes it over."""

    def __init__(self, door: Door, library: Library) -> None:
        self._door, self._library = door, library
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._unread = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._note()
        self._wait(self._door.idle)

    def data_received(self, data: bytes) -> None:
        if _REQUEST.fullmatch(data) is None:
            self._hand_over(data)
            return
        try:
            message = self._door.message()
        except Exception:  # the library's routes say so to the caller
            log.exception("status failed")
            self._hand_over(data)
            return
        assert self._transport is not None
        self._note()
        self._transport.write(message)

    def pause_writing(self) -> None:
        """The caller does not read: nothing more is read of it either, so no more is held."""
        assert self._transport is not None
        self._unread = True
        self._transport.pause_reading()
        self._wait(self._door.write)

    def resume_writing(self) -> None:
        assert self._transport is not None
        self._unread = False
        self._transport.resume_reading()
        self._note()
        self._wait(self._door.idle)

    def connection_lost(self, _: Exception | None) -> None:
        self._leave()

    def abort(self) -> None:
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _hand_over(self, data: bytes) -> None:
        assert self._transport is not None
        self._leave()
        library = self._library()
        self._transport.set_protocol(library)
        library.connection_made(self._transport)
        library.data_received(data)

    def _note(self) -> None:
        """It is the one that was silent for the shortest time."""
        self._heard = time.monotonic()
        self._door.silent.pop(self, None)
        self._door.silent[self] = None

    def _leave(self) -> None:
        self._door.silent.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        """One timer for many requests: it looks how long the silence is when it ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _late(self) -> None:
        left = self._door.idle - (time.monotonic() - self._heard)
        if self._unread or left <= 0:
            self.abort()
        else:
            self._wait(left)
