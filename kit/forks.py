"""Children that are forks of one prepared process (``kit.fork_server``) instead of interpreters.

The server is started for the first child, and anew when it has ended, or when this process has
another environment or module path than the server got from it.

Invariant: every child that is returned dies with the server, and the server with the agent.
"""

import asyncio
import atexit
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TypeVar

from kit import child_main

# A server that has not answered for so long is ill. It may have to load modules from a slow disk.
SILENT_SECONDS = 60.0
MOST_SERVERS = 4  # one, and those that still have children or hang
_BUSY_SECONDS = 0.01
_PACKET_BYTES = 64
_PART_BYTES = 2**16


class Child:
    """A child of the server. ``returncode``: as of ``subprocess``; None while it runs."""

    def __init__(
        self, server: "_Server", control: socket.socket, streams: list[socket.socket]
    ) -> None:
        self.pid = 0
        self._server = server
        self.returncode: int | None = None
        # Not the socket: what warns of an unclosed one comes before ``__del__`` in a cycle.
        self._control = control.detach()
        self._streams = streams  # ours of its stdin, stdout and perhaps stderr
        self._pidfd: int | None = None
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        # Whoever does not wait any more does not ask why it could not be started.
        self._started.add_done_callback(lambda done: done.cancelled() or done.exception())
        for each in streams:
            each.setblocking(False)
        os.set_blocking(self._control, False)
        self._loop.add_reader(self._control, self._hear)

    async def started(self) -> None:
        """Wait until it runs. OSError when the server could not start it."""
        await asyncio.shield(self._started)

    async def wait(self) -> int:
        """Wait until it has ended; its returncode."""
        return await asyncio.shield(self._ended)

    async def communicate(self, data: bytes) -> tuple[bytes, bytes]:
        """Of a call: give it ``data``, read its stdout and stderr until it has ended."""
        stdin, stdout, stderr = self._streams
        try:
            out, err, _ = await asyncio.gather(
                self._take(stdout), self._take(stderr), self._feed(stdin, data)
            )
        finally:
            for each in self._streams:
                each.close()
        await self.wait()
        return out, err

    async def _feed(self, stdin: socket.socket, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it ends without its arguments
            await self._loop.sock_sendall(stdin, data)
        stdin.close()

    async def _take(self, stream: socket.socket) -> bytes:
        said = bytearray()
        while part := await self._loop.sock_recv(stream, _PART_BYTES):
            said += part
        return bytes(said)

    def _hear(self) -> None:
        """The next word of the server; none when the server has ended."""
        control = socket.socket(fileno=self._control)
        try:
            words, pidfds, *_ = socket.recv_fds(control, _PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            words, pidfds = b"", []
        finally:
            control.detach()
        self._server.heard()
        if pidfds:
            os.set_inheritable(pidfds[0], False)
            self.pid, self._pidfd = int(words), pidfds[0]
            self._started.set_result(None)
        elif self._pidfd is None:
            # A pid without its pidfd: this process has no descriptor left for it.
            number = max(-int(words or -errno.ESRCH), 0) or errno.EMFILE
            self._started.set_exception(OSError(number, f"fork: {os.strerror(number)}"))
            self._end(-signal.SIGKILL)
        elif words:
            self._end(int(words))
        else:
            # Its child is killed with it, but one that hangs in the kernel does not end yet.
            self._loop.remove_reader(self._control)
            self._loop.add_reader(self._pidfd, self._end, -signal.SIGKILL)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._loop.remove_reader(self._control)
        os.close(self._control)
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._ended.set_result(code)

    def forget(self) -> None:
        """Not wait for it: a child that gets no word ends."""
        if self.returncode is None:
            self._end(-signal.SIGKILL)
        for each in self._streams:
            each.close()

    def __del__(self) -> None:
        """The loop was closed while it was waited for."""
        if self.returncode is None:
            os.close(self._control)
            if self._pidfd is not None:
                os.close(self._pidfd)


class Talker(Child):
    """A child that goes on. ``stdin``, ``stdout``: as of ``asyncio.subprocess``, once connected."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    _transports: tuple[asyncio.BaseTransport, ...] = ()

    async def connect(self, limit: int) -> None:
        """``limit``: the longest line in bytes that its stdout may be read by."""
        stdin, stdout = self._streams
        self.stdout = asyncio.StreamReader(limit)
        answers = asyncio.StreamReaderProtocol(self.stdout)
        transport, _ = await self._loop.connect_read_pipe(lambda: answers, stdout)
        self._transports = (transport,)
        # It tells that the child has closed its end; nothing is read from it.
        nothing = asyncio.StreamReader()
        watched = asyncio.StreamReaderProtocol(nothing)
        writing, _ = await self._loop.connect_write_pipe(lambda: watched, stdin)
        self._transports += (writing,)
        self.stdin = asyncio.StreamWriter(writing, watched, nothing, self._loop)

    def hang_up(self) -> None:
        """Neither say nor hear any more."""
        for each in self._transports:
            # What a child that hangs has not read would keep it open.
            if isinstance(each, asyncio.WriteTransport) and each.get_write_buffer_size():
                each.abort()
            else:
                each.close()

    def forget(self) -> None:
        self.hang_up()
        super().forget()


ChildT = TypeVar("ChildT", bound=Child)


class _BusyError(Exception):
    """The server has many requests, or others are still ending."""


class _Server:
    def __init__(self) -> None:
        self.left = False
        self.inherited = _inherited()
        self._asked: float | None = None  # when it was asked first since it said something
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(self._channel.close)
            self.process = subprocess.Popen(
                child_main.command("run", "kit.fork_server:main"), stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL, cwd="/", start_new_session=True,
            )  # fmt: skip
            failed.pop_all()
        self._channel.setblocking(False)

    def fits(self) -> bool:
        """Whether it lives and its children get what this process's own would inherit."""
        lives = not self.left and self.process.poll() is None
        return lives and self.inherited == _inherited()

    def ask(self, request: str, ends: list[socket.socket]) -> None:
        """OSError when it has ended."""
        try:
            socket.send_fds(self._channel, [request.encode()], [each.fileno() for each in ends])
        except BlockingIOError as error:
            raise _BusyError from error
        if self._asked is None:
            self._asked = time.monotonic()

    def heard(self) -> None:
        self._asked = None

    def end_if_silent(self) -> None:
        """Others may be waiting for it, and its children end with it: only when it is ill."""
        if self._asked is not None and time.monotonic() - self._asked > SILENT_SECONDS:
            self.leave()
            self.process.kill()

    def leave(self) -> None:
        """Not ask it any more; it ends after its last child."""
        self.left = True
        self._channel.close()

    def end(self) -> None:
        self.leave()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
            self.process.wait(1.0)


_servers: list[_Server] = []  # the last one is asked


async def start(target: str, seconds: float) -> Child:
    """A child that runs ``target`` ("module:function") and says an outcome (``kit.messages``).

    TimeoutError after ``seconds``, another OSError when it cannot be started.
    """
    async with asyncio.timeout(seconds):
        return await _asked(f"call {target}", Child, 3)


async def talk(target: str, seconds: float, limit: int) -> Talker:
    """A child that runs ``target`` and talks by itself; it ends when its stdin is closed.

    ``limit``: as of ``Talker.connect``. Errors as of ``start``.
    """
    async with asyncio.timeout(seconds):
        child = await _asked(f"run {target}", Talker, 2)
        try:
            await child.connect(limit)
        except BaseException:
            child.forget()
            raise
        return child


async def _asked(request: str, kind: type[ChildT], streams: int) -> ChildT:
    ended = 0
    while True:
        try:
            server = _server()
            return await _start(server, request, kind, streams)
        except _BusyError:
            pass
        except (BrokenPipeError, ConnectionResetError, ProcessLookupError):
            server.leave()  # it has ended; nothing ran: a child waits for its first word
            ended += 1
            if ended == MOST_SERVERS:
                raise
        await asyncio.sleep(_BUSY_SECONDS)


async def _start(server: _Server, request: str, kind: type[ChildT], streams: int) -> ChildT:
    kinds = (socket.SOCK_SEQPACKET, *[socket.SOCK_STREAM] * streams)
    pairs = [socket.socketpair(socket.AF_UNIX, each) for each in kinds]
    child = kind(server, pairs[0][0], [ours for ours, _ in pairs[1:]])
    try:
        try:
            server.ask(request, [theirs for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        await child.started()
    except BaseException:
        child.forget()
        server.end_if_silent()
        raise
    return child


def _server() -> _Server:
    """The one that fits. OSError when it cannot be started."""
    if not _servers or not _servers[-1].fits():
        if _servers:
            _servers[-1].leave()
        _servers[:] = [each for each in _servers if each.process.poll() is None]
        if len(_servers) >= MOST_SERVERS:
            raise _BusyError
        _servers.append(_Server())
    return _servers[-1]


def _inherited() -> tuple[int, dict[str, str], list[str]]:
    """What a server has from this process and may change; a fork of this process has no server."""
    return os.getpid(), dict(os.environ), list(sys.path)


@atexit.register
def _end() -> None:
    for each in _servers:
        if each.inherited[0] == os.getpid():
            each.end()
