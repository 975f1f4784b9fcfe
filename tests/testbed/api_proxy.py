"""A proxy between an agent and a real API server, which counts requests and makes trouble.

It ends the agent's TLS with the API server's own certificate, and is a client of the server for
each request. Its own thread and loop, as the proxy of the registry.
"""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import json
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.testbed import ports, waiting

CHUNK = 65536
PIECE = 64  # bytes at a time of a slow watch
_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes


@dataclasses.dataclass(frozen=True)
class Seen:
    """``what``: list, page (the next one of a list), stream (a list as the beginning of a watch),
    watch, compare (a list of one, for its version), or the method. A stream is one when its answer
    begins, and a watch when it ends."""

    when: float
    what: str
    path: str
    status: int
    bytes: int  # of the answer

    @property
    def kind(self) -> str:
        return self.path.rpartition("/")[2]


class ApiProxy:
    """Attributes may be set at any time; they apply from the next request or piece."""

    def __init__(self, upstream: int, pki: Path) -> None:
        self.answer: tuple[int, str] | None = None  # status and header lines for every request
        self.watches = ""  # what a watch gets: "410", "410 event", "end" (at once, in order)
        self.streams = 0  # the status with which each stream is refused
        self.rate = 0  # bytes per second of each watch; 0: unlimited
        self._upstream = upstream
        (self.port,) = ports.free(1)
        self._mine = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._mine.load_cert_chain(pki / "api.crt", pki / "api.key")
        self._theirs = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._seen: list[Seen] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="api-proxy", daemon=True)
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._dead: set[asyncio.StreamWriter] = set()

    # --- what tests do with it

    def start(self) -> None:
        self._thread.start()
        self._do(self._listen())

    def stop(self) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(waiting.limit(10))

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Nothing listens while the block runs; open connections are reset."""
        self._do(self._close())
        try:
            yield
        finally:
            self._do(self._listen())

    def cut(self) -> None:
        """Reset every open connection; new ones work."""
        self._do(self._cut())

    def half_open(self) -> int:
        """How many open connections have lost their other end: their packets are dropped, nothing
        is said on them, nobody closes them. New ones work."""
        found: int = self._do(self._lose())
        return found

    def seen(self, what: str = "", since: float = 0.0) -> list[Seen]:
        """Answered or refused requests (a watch: when it ended), ``since`` on time.monotonic."""
        with self._lock:
            return [
                each
                for each in self._seen
                if each.what.startswith(what) and each.when >= since
            ]  # fmt: skip

    def lists(self, since: float) -> dict[str, int]:
        """Counts the whole lists of each kind, streamed or not, without refused streams."""
        streamed = [each for each in self.seen("stream", since) if each.status == 200]
        return dict(collections.Counter(e.kind for e in self.seen("list", since) + streamed))

    # --- in its loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(waiting.limit(30))

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._handle, "127.0.0.1", self.port, ssl=self._mine, limit=2**20
        )

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _cut(self) -> None:
        tasks = list(self._clients)
        for task, writer in self._clients.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _lose(self) -> int:
        program = ctypes.create_string_buffer(_RETURN_NOTHING)
        described = struct.pack("HL", 1, ctypes.addressof(program))
        for writer in self._clients.values():
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, described
            )
            self._dead.add(writer)
        return len(self._clients)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            del self._clients[task]
            self._dead.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split(" ", 2)
        parts = [line.partition(":") for line in lines if line]
        headers = {key.strip().lower(): value.strip() for key, _, value in parts}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path, _, query = target.partition("?")
        what = _what(method, dict(urllib.parse.parse_qsl(query)))
        if self.answer is not None:
            status, more = self.answer
            return await self._say(writer, what, path, status, more, b"")
        if what == "stream" and self.streams:
            return await self._say(writer, what, path, self.streams, "", b"")
        if what == "watch" and self.watches:
            status = 410 if self.watches == "410" else 200
            text = b""
            if self.watches == "410 event":
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                text = json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"
            return await self._say(writer, what, path, status, "", text)
        kept = "".join(f"{k}: {v}\r\n" for k, v in headers.items() if k != "connection")
        asked = f"{method} {target} HTTP/1.1\r\n{kept}connection: close\r\n\r\n".encode() + body
        return await self._forward(writer, what, path, asked)

    async def _say(
        self, writer: asyncio.StreamWriter, what: str, path: str, status: int, more: str,
        body: bytes,
    ) -> bool:  # fmt: skip
        self._note(what, path, status, len(body))
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return True

    async def _forward(
        self, writer: asyncio.StreamWriter, what: str, path: str, asked: bytes
    ) -> bool:
        """The answer as it comes: the server ends it by closing, its own framing stays."""
        began = time.monotonic()
        status, sent = 0, 0
        try:
            up_reader, up_writer = await asyncio.open_connection(
                "127.0.0.1", self._upstream, ssl=self._theirs, limit=2**20
            )
        except OSError:
            return await self._say(writer, what, path, 502, "", b"")
        try:
            up_writer.write(asked)
            head = await up_reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            if what == "stream":
                self._note(what, path, status, 0)
                what = "watch"
            lines = [e for e in head.split(b"\r\n") if not e.lower().startswith(b"connection")]
            writer.write(b"\r\n".join(lines))
            last = b""
            while data := await self._piece(up_reader, what):
                last = (last + data)[-5:]
                if writer in self._dead:
                    await asyncio.Event().wait()  # until it is cut
                writer.write(data)
                await writer.drain()
                sent += len(data)
            # Its own framing says whether that was all; if not, the client has to know.
            return last == b"0\r\n\r\n" if b"chunked" in head.lower() else True
        finally:
            self._note(what, path, status, sent, began)
            up_writer.transport.abort()

    async def _piece(self, reader: asyncio.StreamReader, what: str) -> bytes:
        if what != "watch" or not self.rate:
            return await reader.read(CHUNK)
        await asyncio.sleep(PIECE / self.rate)
        return await reader.read(PIECE)

    def _note(self, what: str, path: str, status: int, sent: int, began: float = 0.0) -> None:
        with self._lock:
            when = began or time.monotonic()
            self._seen.append(Seen(when, what, path, status, sent))


def _what(method: str, query: dict[str, str]) -> str:
    if "watch" in query:
        return "stream" if "sendInitialEvents" in query else "watch"
    if "continue" in query:
        return "page"
    if "limit" in query:
        return "compare" if query["limit"] == "1" else "list"
    return "list" if "resourceVersion" in query else method
