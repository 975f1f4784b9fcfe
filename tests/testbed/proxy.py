"""A proxy in front of the registry that counts, throttles and breaks. Its own thread and loop."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import re
import threading
from collections.abc import Iterator

from tests.testbed import ports, waiting

CHUNK = 65536


@dataclasses.dataclass(frozen=True)
class Seen:
    method: str
    path: str
    status: int
    bytes: int
    range: str
    authorized: bool
    agent: str = ""  # the client's User-Agent


def _blob(path: str) -> str:
    found = re.search(r"/blobs/(sha256:[0-9a-f]{64})", path)
    return found[1] if found else ""


class Proxy:
    """Attributes may be set at any time; they apply from the next request or chunk."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        (self.port,) = ports.free(1)
        self.rate = 0  # bytes per second and connection of blob bodies; 0: unlimited
        self.login: tuple[str, str] | None = None  # what a client has to send
        self.bearer = False  # by token, as most registries want it, else by Basic
        self.truncate: set[str] = set()  # blobs whose body ends at half with the connection
        self.corrupt: set[str] = set()  # blobs with one byte inverted
        self.fail_status = 0  # answered to everything that ``failed`` asks for
        self.failed = ""  # how the User-Agent of those begins who get it
        self.retry_after = ""  # sent with it
        self.redirect: dict[str, str] = {}  # blobs that are elsewhere, as object stores have it
        self.redirected = ""  # how the User-Agent of those begins who are sent there
        self.stall = False  # answers, then never sends a body
        self.pause_at = 0  # a blob's body waits after so many bytes; 0: never
        self.seen: list[Seen] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.live = 0  # bytes of blob bodies sent so far, unfinished requests included

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(waiting.limit(10))

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._handle, "127.0.0.1", self.port, limit=2**20)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """Nothing listens while the block runs."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(waiting.limit(10))
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(waiting.limit(10))

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(waiting.limit(10))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(waiting.limit(10))

    def reset(self) -> None:
        with self._lock:
            self.seen.clear()
            self.live = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def blob_bytes(self) -> int:
        return self.live

    @property
    def all_bytes(self) -> int:
        """Bodies of every answer, manifests and configs included."""
        with self._lock:
            return sum(each.bytes for each in self.seen)

    def requests(self) -> list[Seen]:
        with self._lock:
            return list(self.seen)

    def _allowed(self, headers: dict[str, str]) -> bool:
        if self.login is None:
            return True
        given = headers.get("authorization", "")
        plain = base64.b64encode(":".join(self.login).encode()).decode()
        return given == ("Bearer good-token" if self.bearer else f"Basic {plain}")

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        line = await reader.readline()
        if not line:
            return False
        method, path, _ = line.decode().split(" ", 2)
        headers: dict[str, str] = {}
        while (raw := await reader.readline()) not in (b"\r\n", b""):
            key, value = raw.decode().split(":", 1)
            headers[key.strip().lower()] = value.strip()
        if self.fail_status and headers.get("user-agent", "").startswith(self.failed):
            extra = f"Retry-After: {self.retry_after}\r\n" if self.retry_after else ""
            return await self._say(writer, method, path, self.fail_status, extra, b"")
        if path.startswith("/token"):
            return await self._token(writer, method, path, headers)
        if not self._allowed(headers):
            challenge = 'Basic realm="test"'
            if self.bearer:
                challenge = f'Bearer realm="{self.url}/token",service="test",scope="repository"'
            extra = f"WWW-Authenticate: {challenge}\r\n"
            return await self._say(writer, method, path, 401, extra, b"{}")
        elsewhere = self.redirect.get(_blob(path))
        if elsewhere is not None and headers.get("user-agent", "").startswith(self.redirected):
            return await self._say(writer, method, path, 307, f"Location: {elsewhere}\r\n", b"")
        return await self._forward(writer, method, path, headers)

    async def _token(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str]
    ) -> bool:
        assert self.login is not None
        plain = base64.b64encode(":".join(self.login).encode()).decode()
        good = headers.get("authorization") == f"Basic {plain}"
        # Too long to arrive in one piece.
        body = json.dumps({"token": "good-token", "more": "x" * 1_000_000}).encode()
        body = body if good else b"{}"
        return await self._say(writer, method, path, 200 if good else 401, "", body)

    async def _say(
        self,
        writer: asyncio.StreamWriter,
        method: str,
        path: str,
        status: int,
        extra: str,
        body: bytes,
    ) -> bool:
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode()
            + (b"" if method == "HEAD" else body)
        )
        await writer.drain()
        with self._lock:
            self.seen.append(Seen(method, path, status, 0, "", False))
        return True

    async def _forward(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str]
    ) -> bool:
        up_reader, up_writer = await asyncio.open_connection(
            "127.0.0.1", self._upstream, limit=2**20
        )
        try:
            kept = {k: v for k, v in headers.items() if k not in ("connection", "authorization")}
            lines = "".join(f"{key}: {value}\r\n" for key, value in kept.items())
            head = f"{method} {path} HTTP/1.1\r\n{lines}connection: close\r\n\r\n"
            up_writer.write(head.encode())
            await up_writer.drain()
            status_line = await up_reader.readline()
            status, answer, length = int(status_line.split()[1]), b"", 0
            while (raw := await up_reader.readline()) not in (b"\r\n", b""):
                if raw.lower().startswith(b"content-length"):
                    length = int(raw.split(b":")[1])
                if not raw.lower().startswith(b"connection"):
                    answer += raw
            writer.write(status_line + answer + b"\r\n")
            await writer.drain()
            sent = 0
            try:
                if method != "HEAD":
                    whole = await self._body(up_reader, writer, path, length)
                    sent = whole if whole >= 0 else -whole
                    return whole >= 0
            finally:
                with self._lock:
                    authorized = "authorization" in headers
                    span = headers.get("range", "")
                    agent = headers.get("user-agent", "")
                    self.seen.append(Seen(method, path, status, sent, span, authorized, agent))
            return True
        finally:
            up_writer.close()

    async def _body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, length: int
    ) -> int:
        """Bytes handed on; negative when the connection is cut on purpose."""
        blob = _blob(path)
        sent = 0
        while sent < length:
            while blob and (self.stall or 0 < self.pause_at <= sent):
                await asyncio.sleep(0.05)
            chunk = await reader.read(min(CHUNK, length - sent))
            if not chunk:
                return -sent
            if blob in self.corrupt and sent + len(chunk) >= length:
                chunk = chunk[:-1] + bytes([chunk[-1] ^ 1])
            writer.write(chunk)
            await writer.drain()
            sent += len(chunk)
            if blob:
                with self._lock:
                    self.live += len(chunk)
                if blob in self.truncate and sent >= length // 2:
                    return -sent
                if self.rate:
                    await asyncio.sleep(len(chunk) / self.rate)
        return sent
