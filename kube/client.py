"""Small requests to one API server, each with a deadline and a bounded answer.

aiohttp and not the official client: for the few kinds of requests of this agent that one costs
17 to 42 MB of memory and 126 MB on disk, on every node.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import aiohttp
import structlog

import kit.errors
from kit.pause import Backoff
from kube import access
from kube.settings import AccessSettings

log = structlog.get_logger("cluster")

LARGEST_ANSWER = 256 * 1024
LARGEST_LINE = 4 * 1024 * 1024  # of a watch: an object of etcd has 1.5 MiB at most
LONGEST_RETRY_AFTER = 120.0
MOST_AT_ONCE = 8
CONNECT_SECONDS = 10.0
# A connection whose other end vanished without a word is found by the kernel's own probes: seconds
# until the first, between two, and how many. A watch says nothing for a minute when all is well,
# so silence alone would take minutes. They cost the server no request.
KEEPALIVE = (8, 4, 3)
AWAY_SECONDS, REFUSED_SECONDS = 20.0, 120.0  # longest pauses (``Pauses``)
REFUSALS = (400, 403, 404, 409, 413, 422)  # answers that stay so until somebody does something
MERGE_PATCH = "application/merge-patch+json"


# A path of the API as ``path_to`` makes it, and perhaps a query as urllib makes it.
_PATH = re.compile(r"(/(?!\.{1,2}(?:[/?]|$))[A-Za-z0-9._~%:-]+)+(\?[A-Za-z0-9._~%=&+-]*)?")


def path_to(root: str, *names: str) -> str:
    """``root``, a path of the API, with ``names`` below it. Each of them is one part of the path,
    whatever others wrote into it. KubeError for one that cannot be one."""
    for name in names:
        if name in ("", ".", ".."):
            raise KubeError(f"{root}/{name}", f"{name!r} is not the name of an object", 404)
    return "/".join([root, *(urllib.parse.quote(name, safe=":") for name in names)])


class KubeError(kit.errors.AgentError):
    """The API server did not do what was asked. ``status``: of its answer; 0 without one.

    ``retry_after``: seconds for which it asked to be left alone.
    """

    def __init__(self, thing: str, cause: str, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(thing, cause, "")
        self.status = status
        self.retry_after = retry_after


class ApiServer:
    """``close`` ends its connections.

    ``versions``: what was seen of the etcd of each part of the API (``part_of``). ``epoch`` counts
    how often one of them turned out to be another one, or an older one: what was written there
    before may be lost. A server that asked to be left alone is: until then each request fails
    without being sent.

    ``requests``: how many were sent. ``received``: bytes of answers. ``no_streams_until``: it does
    not stream lists, as far as is known (``watching``), on the monotonic clock.
    """

    def __init__(self, asked: AccessSettings) -> None:
        self.requests = 0
        self.received = 0
        self.versions: dict[str, ResourceVersions] = {}
        self.no_streams_until = 0.0
        self._quiet_until = 0.0  # what Retry-After asked for, on the monotonic clock
        self._reader = access.Reader(asked)
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        about: str,
        deadline: float,
        kind: str = "application/json",
        largest: int = LARGEST_ANSWER,
    ) -> dict[str, Any]:
        """The decoded object of an answer with status 200 or 201. KubeError for everything else.

        ``about`` names the object in errors; ``deadline``: seconds for all of it; ``largest``:
        bytes of the answer. No redirect is followed: it would carry the token elsewhere.
        """
        self._keep_quiet(about)
        try:
            async with (
                asyncio.timeout(deadline),
                self._sent(method, path, body, kind) as response,
            ):
                sent = await self._whole(response, largest)
                if response.status not in (200, 201):
                    raise self._refused(response, sent, about)
            answer = json.loads(sent)
            if not isinstance(answer, dict):
                raise ValueError("the answer is no object")
            return answer
        except aiohttp.ConnectionTimeoutError:
            raise KubeError(about, f"no connection within {CONNECT_SECONDS:g}s") from None
        except TimeoutError:
            raise KubeError(about, f"no answer within {deadline:g}s") from None
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            # RuntimeError: the session was closed meanwhile, for other settings.
            raise KubeError(about, str(error) or type(error).__name__) from None

    async def lines(
        self, path: str, *, about: str, deadline: float, silence: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of a watch, one for each line, until the server ends it.

        ``deadline``: seconds until its answer begins; ``silence``: most seconds without a line.
        KubeError for everything but an orderly end.
        """
        self._keep_quiet(about)
        try:
            async with asyncio.timeout(deadline) as limit, self._sent("GET", path) as response:
                if response.status != 200:
                    raise self._refused(
                        response, await self._whole(response, LARGEST_ANSWER), about
                    )
                limit.reschedule(asyncio.get_running_loop().time() + silence)
                rest = bytearray()
                async for chunk in response.content.iter_any():
                    limit.reschedule(asyncio.get_running_loop().time() + silence)
                    self.received += len(chunk)
                    if b"\n" not in chunk and len(rest) <= LARGEST_LINE:
                        rest += chunk  # a slow connection brings a large object in many pieces
                        continue
                    *whole, last = (bytes(rest) + chunk).split(b"\n")
                    rest = bytearray(last)
                    if len(rest) > LARGEST_LINE:
                        raise ValueError(f"an event has more than {LARGEST_LINE} bytes")
                    for line in whole:
                        event = json.loads(line)
                        if not isinstance(event, dict):
                            raise ValueError("an event is no object")
                        yield event
        except TimeoutError:
            raise KubeError(about, "no answer, or a silent connection") from None
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise KubeError(about, str(error) or type(error).__name__) from None

    @contextlib.asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: dict[str, Any] | None = None, kind: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if not _PATH.fullmatch(path):
            raise ValueError(f"{path[:100]!r} is not a path of the API")  # nobody quoted it
        found = await asyncio.to_thread(self._reader.read)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_AT_ONCE, socket_factory=_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Each call has a deadline of its own; a connection that does not come is tried anew
                # before it.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        headers = {"Accept": "application/json", "User-Agent": "nodeagent"}
        if found.token:
            headers["Authorization"] = f"Bearer {found.token}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), kind
        self.requests += 1
        async with self._session.request(
            method, f"{found.server}{path}", data=data, headers=headers, ssl=found.tls,
            allow_redirects=False,
        ) as response:  # fmt: skip
            yield response

    async def _whole(self, response: aiohttp.ClientResponse, largest: int) -> bytes:
        sent = bytearray()
        async for chunk in response.content.iter_any():
            sent += chunk
            self.received += len(chunk)
            if len(sent) > largest:
                raise ValueError(f"the answer has more than {largest} bytes")
        return bytes(sent)

    def _refused(self, response: aiohttp.ClientResponse, sent: bytes, about: str) -> KubeError:
        try:
            pause = float(response.headers.get("Retry-After", 0))
        except ValueError:  # a date: the server's clock is not ours
            pause = 0.0
        status = response.status
        cause = f"the API server answers {status}{_why(sent)}"
        pause = max(0.0, min(pause, LONGEST_RETRY_AFTER))
        if status in (429, 503):
            self._quiet_until = max(self._quiet_until, time.monotonic() + pause)
        return KubeError(about, cause, status, pause)

    def _keep_quiet(self, about: str) -> None:
        left = self._quiet_until - time.monotonic()
        if left > 0:
            raise KubeError(about, "the API server asked to be left alone", 429, left)

    @property
    def epoch(self) -> int:
        return sum(each.epoch for each in self.versions.values())

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class ResourceVersions:
    """``newest``: the highest that was seen; ``epoch``: how often they began anew."""

    def __init__(self) -> None:
        self.newest = 0
        self.epoch = 0

    def saw(self, version: int) -> None:
        self.newest = max(self.newest, version)

    def compare(self, version: int) -> None:
        """What the server says now is its version."""
        if version < self.newest:
            self.epoch += 1
            self.newest = version


def part_of(path: str) -> str:
    """What shares one etcd, and so has versions that count on together.

    All kinds of a custom group do. A built-in kind may have an etcd of its own (the API server's
    option --etcd-servers-overrides, which takes no custom ones), and an aggregated server has one
    for its groups. Versions of two etcds say nothing about one another.
    """
    root, *parts = path.partition("?")[0].strip("/").split("/")
    if root == "apis" and "." in parts[0] and not parts[0].endswith(".k8s.io"):
        return parts[0]
    after = parts[2:] if root == "apis" else parts[1:]
    kind = after[2] if after[0] == "namespaces" and len(after) > 2 else after[0]
    return f"{parts[0] if root == 'apis' else ''}/{kind}"


class Pauses:
    """How long a loop waits after an error, from ``first`` seconds on.

    One that may be over in a moment (no answer, busy, an expired token) is tried anew within
    ``AWAY_SECONDS``, so that all is as it should be 30 s after it was over; a refusal within
    ``REFUSED_SECONDS``, and so what is not there: somebody has to make it.
    """

    def __init__(self, first: float) -> None:
        self._away = Backoff(first, AWAY_SECONDS)
        self._refused = Backoff(first, REFUSED_SECONDS)

    def after(self, error: KubeError) -> float:
        """As long as the server asked for, at least."""
        pause = (self._refused if error.status in REFUSALS else self._away).next()
        return max(pause, error.retry_after * random.uniform(1.0, 1.25))

    @property
    def attempts(self) -> int:
        return self._away.attempts + self._refused.attempts

    def reset(self) -> None:
        self._away.reset()
        self._refused.reset()


async def repeat(
    step: Callable[[], Awaitable[None]],
    seconds: float,
    problem: str,
    failed: Callable[[KubeError], None] = lambda _: None,
) -> NoReturn:
    """``step`` again and again, ``seconds`` apart, after an error later (``Pauses``); never ends.

    ``problem``: what the log says of the first error in a row. ``failed`` gets each.
    """
    pauses = Pauses(seconds)
    while True:
        pause = seconds * random.uniform(1.0, 1.25)
        try:
            await step()
            pauses.reset()
        except KubeError as error:
            if not pauses.attempts:
                log.warning(problem, why=str(error))
            failed(error)
            pause = pauses.after(error)
        await asyncio.sleep(pause)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """One whose dead connection ends within 30 s, also while something waits to be sent."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    first, between, most = KEEPALIVE
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, first)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, most)
    limit = 1000 * (first + between * most)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
    return made


def _why(sent: bytes) -> str:
    """What a Status object says."""
    try:
        return f" ({str(json.loads(sent)['message'])[:300]})"
    except (ValueError, LookupError, TypeError):
        return ""
