"""The client of the admin API, for the command line.

aiohttp takes longer to import than all else of a command, so it is loaded for streams and TCP only.
"""

import asyncio
import http.client
import io
import json
import types
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import kit.errors
import kit.files
from kit import terminal
from nodeagent import STARTING

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
# The agent sends a line at least every few seconds (kit.room.HEARTBEAT_SECONDS).
SILENCE_SECONDS = 60.0


class RemoteError(kit.errors.AgentError):
    """An error that the agent answered, with the exit code that the agent gave it."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body["thing"], body["cause"], body["remedy"])
        self.exit_code = int(body["exit_code"])  # type: ignore[misc]  # per answer, not per class


class RemoteDegradedError(RemoteError, kit.errors.DegradedError):
    """The agent answered that the part of it that was asked does not run."""


class _Reply(NamedTuple):
    """``starting``: the room that answered, while it may not know all that its settings have."""

    text: str
    status: int
    starting: str


class Client:
    """``kit.room.Api`` over HTTP. One session per call: a command makes one or two and ends.

    ``address``: unix:///PATH of an agent's socket, or the URL of one that listens on TCP.
    """

    def __init__(self, address: str, token_file: Path | None = None) -> None:
        if not address.startswith(("unix:/", "https://", "http://")):
            raise kit.errors.SettingsError(
                f"--api {address}",
                "is no address of an agent",
                "write unix:///PATH or https://HOST:PORT",
            )
        self.address = address
        self._token_file = token_file
        self._told = False  # that a room is starting
        self._socket = address.removeprefix("unix://") if address.startswith("unix:") else None
        # The host is not looked at: the socket leads to one agent.
        self._url = address.rstrip("/") if self._socket is None else "http://agent"

    def _session(self, total: float | None) -> "aiohttp.ClientSession":
        import aiohttp

        headers = {}
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {self._token()}"
        timeout = aiohttp.ClientTimeout(
            total=total, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS
        )
        connector = None if self._socket is None else aiohttp.UnixConnector(self._socket)
        return aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector, read_bufsize=2**20
        )

    def _token(self) -> str:
        assert self._token_file is not None
        if self._socket is None and not self._url.startswith("https://"):
            raise kit.errors.SettingsError(
                self.address, "a token would travel in clear text", "use https://"
            )
        try:
            return kit.files.read_small(self._token_file).decode().strip()
        except (OSError, ValueError) as error:
            raise kit.errors.SettingsError(
                f"token file {self._token_file}", f"cannot be read ({error})", "correct it"
            ) from error

    def unreachable(self, error: Exception) -> kit.errors.AgentError:
        cause = error.__cause__ or error
        if isinstance(cause, PermissionError):
            return kit.errors.HostError(
                self.address,
                "you may not use this socket",
                "use it as root or as a member of admin.group",
            )
        why = (isinstance(cause, OSError) and cause.strerror) or error or type(error).__name__
        return kit.errors.UnreachableError(
            self.address,
            f"no agent answers there ({why})",
            "see 'systemctl status nodeagent', or 'kubectl get pods' for the agent of this node; "
            "--api names another address",
        )

    async def call(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        answer = await self._ask(method, path, body, query)
        return self._decode(answer.text, answer.status)

    async def text(self, path: str) -> str:
        answer = await self._ask("GET", path, None, {})
        if answer.status >= 400:
            self._decode(answer.text, answer.status)
        return answer.text

    async def _ask(self, method: str, path: str, body: Any, query: Mapping[str, Any]) -> "_Reply":
        ask = self._over_tcp if self._socket is None else self._over_socket
        answer = await ask(method, path, body, query)
        if answer.starting and not self._told:
            self._told = True
            text = f"{answer.starting} is starting: what it shows may not be all yet"
            terminal.say(f"nodeagent: {text}", error=True)
        return answer

    async def _over_tcp(
        self, method: str, path: str, body: Any, query: Mapping[str, Any]
    ) -> "_Reply":
        import aiohttp

        try:
            async with (
                self._session(ANSWER_SECONDS) as session,
                session.request(method, self._url + path, json=body, params=query) as response,
            ):
                text, starting = await response.text(), response.headers.get(STARTING, "")
                return _Reply(text, response.status, starting)
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
            raise self.unreachable(error) from error

    async def _over_socket(
        self, method: str, path: str, body: Any, query: Mapping[str, Any]
    ) -> "_Reply":
        """HTTP/1.0: the answer lasts until the agent closes."""
        content = b"" if body is None else json.dumps(body).encode()
        question = f"?{urllib.parse.urlencode(query)}" if query else ""
        target = urllib.parse.quote(path, safe="/%:@?=&") + question
        lines = (
            f"{method} {target} HTTP/1.0", "Host: agent", "Content-Type: application/json",
            f"Content-Length: {len(content)}", "", "",
        )  # fmt: skip
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write("\r\n".join(lines).encode() + content)
                    answer = await reader.read()
                finally:
                    writer.close()
            # It reads a socket as a file.
            received: Any = types.SimpleNamespace(makefile=lambda _: io.BytesIO(answer))
            response = http.client.HTTPResponse(received)
            response.begin()
            text, starting = response.read().decode(), response.getheader(STARTING, "")
            return _Reply(text, response.status, starting)
        except (http.client.HTTPException, TimeoutError, OSError, UnicodeDecodeError) as error:
            raise self.unreachable(error) from error

    def _decode(self, text: str, status: int) -> Any:
        try:
            answer = json.loads(text) if text else {}
        except ValueError as error:
            raise kit.errors.UnreachableError(
                self.address,
                f"what answers there is not an agent (status {status})",
                "correct --api",
            ) from error
        if isinstance(answer, dict) and "error" in answer and status >= 400:
            made = RemoteDegradedError if status == HTTPStatus.SERVICE_UNAVAILABLE else RemoteError
            raise made(answer["error"])
        return answer

    async def lines(self, path: str) -> AsyncIterator[Any]:
        import aiohttp

        try:
            async with self._session(None) as session, session.get(self._url + path) as response:
                if response.status >= 400:
                    self._decode(await response.text(), response.status)
                async for line in response.content:
                    yield json.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self.unreachable(error) from error
