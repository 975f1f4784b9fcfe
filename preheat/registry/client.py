"""A client of container registries: resolve a reference, read manifests, stream blobs.

The runtime pulls. This client asks before a pull what an image costs and whether its tag moved, and
under a rate limit it fetches layers in the runtime's place. It asks the servers that containerd
would ask, with containerd's own hosts.toml files (``hosts``). Everything that is read has a size
limit and is checked against its digest.
"""

import asyncio
import base64
import contextlib
import dataclasses
import json
import re
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import aiohttp
from cachetools import LRUCache

from preheat.image import manifest
from preheat.registry import documents, failure, hosts
from preheat.registry.failure import Kind, PullError
from preheat.runtimes import base

CONNECT_SECONDS = 10.0
DOCUMENT_SECONDS = 30.0
BLOB_SILENCE_SECONDS = 60.0
# A pull waits for what the layers of its image say of themselves: so long for all together.
MEASURE_SECONDS = 20.0
# Those of documents are theirs alone: layers hold their own for hours, two of each pull.
MOST_CONNECTIONS = 16
MOST_STREAMS = 32
MOST_TOKENS = 256
MOST_CONTEXTS = 64
# A server that did not answer in time is asked after the others for so long.
HUNG_SECONDS = 600.0
CHUNK = 256 * 1024
# gzip makes a thousandth of zeros: a smaller layer takes 128 MiB at most.
LEAST_MEASURED = 128 * 1024
_ACCEPT = ", ".join(sorted(manifest.INDEX_TYPES | manifest.MANIFEST_TYPES))
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class _Server:
    """A host and what TLS with it takes; ``trouble``: why that cannot be had. ``connections``: at
    most, of all servers together."""

    host: hosts.Host
    tls: ssl.SSLContext | bool = True
    trouble: str = ""
    connections: int = MOST_CONNECTIONS


@dataclass(frozen=True, repr=False)
class _TokenQuestion:
    """A request to a token service: a POST with ``form``, else a GET with ``query``."""

    url: str
    query: dict[str, str | list[str]]
    headers: dict[str, str]
    form: dict[str, str] | None = None


class Registry:
    """One client for all registries; ``close`` ends its connections."""

    def __init__(self, directories: Sequence[Path], known: documents.Documents) -> None:
        self._directories = tuple(directories)
        self.documents = known
        self._sessions: dict[int, aiohttp.ClientSession] = {}  # by how many connections it has
        self._tokens: LRUCache[tuple[str, str, str], str] = LRUCache(MOST_TOKENS)
        self._contexts: LRUCache[tuple[hosts.Host, hosts.Seen], _Server] = LRUCache(MOST_CONTEXTS)
        # Servers that hung, with the monotonic time.
        self._hung: LRUCache[str, float] = LRUCache(MOST_CONTEXTS)
        self.requests = 0

    def _connected(self, most: int) -> aiohttp.ClientSession:
        if most not in self._sessions:
            self._sessions[most] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=most),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=BLOB_SILENCE_SECONDS
                ),
                auto_decompress=False,
                middlewares=(_by_proxy,),
                # Digests are of the bytes as they are.
                headers={"User-Agent": "nodeagent", "Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._sessions[most]

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()
        await self.documents.close()

    # --- images -----------------------------------------------------------------------------------

    async def resolve(
        self, ref: manifest.Reference, login: base.Login | None, *, origin: bool = False
    ) -> manifest.Target:
        """What ``ref`` names now; a HEAD where that suffices. Raises PullError.

        ``origin``: ask only the registry's own server, no mirror.
        """
        wanted = ref.digest or ref.tag or "latest"
        needs = {"pull"} if ref.digest else {"pull", "resolve"}
        servers = await self._servers(ref, needs, origin=origin)
        target = await _first(servers, lambda each: self._resolve(each, ref, wanted, login))
        if ref.digest is not None and target.digest != ref.digest:
            text = f"the registry answered with {target.digest} instead"
            raise PullError(ref.text, Kind.CORRUPT, text)
        if target.media_type not in manifest.INDEX_TYPES | manifest.MANIFEST_TYPES:
            text = f"its manifest has the unknown type {target.media_type!r}"
            raise PullError(ref.text, Kind.BAD_IMAGE, text)
        return target

    async def _resolve(
        self, server: _Server, ref: manifest.Reference, wanted: str, login: base.Login | None
    ) -> manifest.Target:
        path = f"manifests/{wanted}"
        answer, _ = await self._document(server, ref, path, login, method="HEAD")
        digest = answer.headers.get("Docker-Content-Digest", "")
        length = answer.headers.get("Content-Length", "")
        if answer.status != 200 or not manifest.is_digest(digest) or not length.isdigit():
            answer, body = await self._document(server, ref, path, login)
            digest, length = manifest.digest_of(body), str(len(body))
            await self.documents.put(digest, body)
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        return manifest.Target(media_type, digest, int(length))

    async def is_public(self, ref: manifest.Reference) -> bool:
        """Whether the registry itself gives ``ref`` without a login. Raises PullError.

        A mirror may answer without asking, so none is asked. When the registry refuses for another
        reason (its limit for anonymous clients), the anonymous token may say what it is good for.
        """
        try:
            await self.resolve(ref, None, origin=True)
        except PullError as error:
            if error.kind in (Kind.AUTH, Kind.NOT_FOUND):
                return False
            (server,) = await self._servers(ref, {"pull"}, origin=True)
            if not _grants(self._tokens.get(self._token_key(server.host, ref, None), ""), ref.path):
                raise
        return True

    async def is_mirrored(self, ref: manifest.Reference) -> bool:
        return len(await self._servers(ref, {"pull"})) > 1

    async def shape(
        self,
        ref: manifest.Reference,
        target: manifest.Target,
        platform: str,
        login: base.Login | None,
    ) -> manifest.Shape:
        """What the image consists of. Raises PullError, also for a document with another digest."""

        async def read(digest: str) -> bytes:
            data = await self.documents.get(digest)
            if data is None:
                kind = "manifests" if digest in manifests else "blobs"
                path = f"{kind}/{digest}"
                servers = await self._servers(ref, {"pull"})
                _, body = await _first(servers, lambda each: self._document(each, ref, path, login))
                if manifest.digest_of(body) != digest:
                    raise PullError(ref.text, Kind.CORRUPT, f"the bytes do not match {digest}")
                await self.documents.put(digest, body)
                data = body
            if digest in manifests:
                manifests.update(_manifests_in(data))
            return data

        manifests = {target.digest}
        try:
            found = await manifest.shape(target, read, platform)
            sizes = await self._sizes(ref, found.layers, login)
            layers = zip(found.layers, sizes, strict=True)
            measured = tuple(dataclasses.replace(each, unpacked=size) for each, size in layers)
            return dataclasses.replace(found, layers=measured)
        except manifest.BadImageError as error:
            final = isinstance(error, manifest.NoPlatformError)
            raise PullError(ref.text, Kind.BAD_IMAGE, str(error), final=final) from error

    async def _sizes(
        self, ref: manifest.Reference, layers: Sequence[manifest.Layer], login: base.Login | None
    ) -> list[int]:
        """What layers say of themselves in their last four bytes; each is asked once, up to the
        first that cannot be asked. 0: not known."""
        sizes = {each.digest: await self.documents.size(each.digest) for each in layers}
        url = (await self._servers(ref, {"pull"}))[0].host.url
        since = time.monotonic()
        try:
            with _reaching(ref):
                async with asyncio.timeout(MEASURE_SECONDS):
                    for layer in layers if not _is_recent(self._hung.get(url)) else ():
                        large = layer.size >= LEAST_MEASURED and "gzip" in layer.media_type
                        if large and sizes[layer.digest] is None:
                            since = time.monotonic()
                            place = ref, layer.digest, layer.size - 4, login
                            stream = self.blob(*place, MOST_CONNECTIONS)
                            sizes[layer.digest] = size = await _number(stream)
                            await self.documents.put_size(layer.digest, size)
        except PullError as error:
            silent = time.monotonic() - since
            if isinstance(error.__cause__, TimeoutError) and silent >= MEASURE_SECONDS / 2:
                self._hung[url] = time.monotonic()
        return [sizes[each.digest] or 0 for each in layers]

    async def blob(
        self,
        ref: manifest.Reference,
        digest: str,
        offset: int,
        login: base.Login | None,
        connections: int = MOST_STREAMS,
    ) -> AsyncGenerator[bytes, None]:
        """The blob from ``offset`` on. The caller checks the digest (the runtime's store does).

        A registry without ranges sends it from its start: what lies before ``offset`` comes as
        empty chunks, so that the caller sees that bytes flow.
        """
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        path = f"blobs/{digest}"
        servers = await self._servers(ref, {"pull"})
        servers = [dataclasses.replace(each, connections=connections) for each in servers]
        response = await _first(servers, lambda each: self._open(each, ref, path, login, headers))
        try:
            before = _skipped(ref, response, offset)
            with _reaching(ref):
                async for chunk in response.content.iter_chunked(CHUNK):
                    dropped = min(before, len(chunk))
                    before -= dropped
                    yield chunk[dropped:]
        finally:
            response.close()

    # --- requests ---------------------------------------------------------------------------------

    async def _servers(
        self, ref: manifest.Reference, needs: set[str], *, origin: bool = False
    ) -> list[_Server]:
        """The servers to ask, in order. Raises PullError when there is none."""
        try:
            every = await asyncio.to_thread(self._hosts, ref.host)
        except ValueError as error:
            raise PullError(ref.text, Kind.NETWORK, str(error)) from error
        found = [(host, seen) for host, seen in every if needs <= host.abilities]
        if origin:
            found = [(host, seen) for host, seen in every if host.origin]
        if not found:
            text = f"hosts.toml of {ref.host} names no server with {' and '.join(sorted(needs))}"
            raise PullError(ref.text, Kind.NETWORK, text)
        found.sort(key=lambda each: _is_recent(self._hung.get(each[0].url)))
        return [await self._server(host, seen) for host, seen in found]

    def _hosts(self, name: str) -> list[tuple[hosts.Host, hosts.Seen]]:
        """Blocking: small files, read anew each time, so that a change takes effect at once."""
        return [(host, hosts.seen(host)) for host in hosts.of(self._directories, name)]

    async def _server(self, host: hosts.Host, seen: hosts.Seen) -> _Server:
        known = self._contexts.get((host, seen))
        if known is None:
            try:
                known = _Server(host, await asyncio.to_thread(hosts.context, host))
            except ValueError as error:
                known = _Server(host, trouble=str(error))
            self._contexts[host, seen] = known
        return known

    async def _document(
        self,
        server: _Server,
        ref: manifest.Reference,
        path: str,
        login: base.Login | None,
        method: str = "GET",
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """An answer and its small body."""
        try:
            with _reaching(ref):
                async with asyncio.timeout(DOCUMENT_SECONDS):
                    response = await self._open(server, ref, path, login, {}, method)
                    try:
                        body = await _body(response)
                    finally:
                        response.release() if response.content.at_eof() else response.close()
        except PullError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._hung[server.host.url] = time.monotonic()
            raise
        if len(body) > manifest.LARGEST_DOCUMENT:
            text = f"{path} has more than {manifest.LARGEST_DOCUMENT} bytes"
            raise PullError(ref.text, Kind.BAD_IMAGE, text)
        return response, body

    async def _open(
        self,
        server: _Server,
        ref: manifest.Reference,
        path: str,
        login: base.Login | None,
        headers: Mapping[str, str],
        method: str = "GET",
    ) -> aiohttp.ClientResponse:
        """A 200 or 206 response, which the caller closes. Raises PullError."""
        if server.trouble:
            raise PullError(ref.text, Kind.NETWORK, server.trouble)
        host = server.host
        url = f"{host.url}/{ref.path}/{path}"
        token = self._tokens.get(self._token_key(host, ref, login))
        sent = {"Accept": _ACCEPT, **dict(host.headers), **headers}
        for attempt in (1, 2):
            if token is not None:
                sent["Authorization"] = token
            response = await self._send(server, ref, method, url, sent)
            if response.status in (200, 206):
                return response
            asked = response.headers.get("WWW-Authenticate", "")
            retry_after = response.headers.get("Retry-After", "")
            status = response.status
            response.close()
            if method == "HEAD" and status in (405, 501):  # then the caller asks with GET
                return response
            if status in (403, 429) and login is not None and token is None:
                # Anonymous clients are over their limit, or not let in: a login may be.
                status, asked = await self._challenge(server, ref)
            if status != 401 or attempt == 2:
                raise _refused(ref, response.status, retry_after, what=path)
            token = await self._authorize(server, ref, asked, login)
        raise AssertionError("unreachable")

    async def _challenge(self, server: _Server, ref: manifest.Reference) -> tuple[int, str]:
        """The status of the registry's base, and its challenge."""
        response = await self._send(server, ref, "GET", f"{server.host.url}/", {})
        try:
            return response.status, response.headers.get("WWW-Authenticate", "")
        finally:
            response.close()

    async def _send(
        self,
        server: _Server,
        ref: manifest.Reference,
        method: str,
        url: str,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        self.requests += 1
        # A mirror of several registries cannot tell without it which one is meant.
        query = {"ns": server.host.namespace} if server.host.namespace else {}
        with _reaching(ref):
            return await self._connected(server.connections).request(
                method, url, params=query, headers=headers, ssl=server.tls, allow_redirects=True
            )

    @staticmethod
    def _token_key(
        host: hosts.Host, ref: manifest.Reference, login: base.Login | None
    ) -> tuple[str, str, str]:
        if login is None:
            return host.url, ref.path, ""
        secret = f"{login.username}\n{login.password}\n{login.identity_token}".encode()
        return host.url, ref.path, manifest.digest_of(secret)

    async def _authorize(
        self, server: _Server, ref: manifest.Reference, asked: str, login: base.Login | None
    ) -> str:
        """The Authorization header that a challenge asks for; remembered for the next request."""
        encrypted = server.host.url.startswith("https:")
        try:
            header = _answer_to(asked, ref.path, login, encrypted=encrypted)
            if isinstance(header, _TokenQuestion):
                header = _token(await self._ask(server, ref, header))
        except ValueError as error:
            raise PullError(ref.text, Kind.AUTH, str(error)) from error
        self._tokens[self._token_key(server.host, ref, login)] = header
        return header

    async def _ask(
        self, server: _Server, ref: manifest.Reference, question: _TokenQuestion
    ) -> bytes:
        """The token service's answer."""
        headers = {**dict(server.host.headers), **question.headers}
        method = "GET" if question.form is None else "POST"
        with _reaching(ref):
            async with asyncio.timeout(DOCUMENT_SECONDS):
                self.requests += 1
                # With the registry's trust settings: its CA is also that of its token service.
                request = self._connected(MOST_CONNECTIONS).request(
                    *(method, question.url), params=question.query, data=question.form,
                    headers=headers, ssl=server.tls,
                )  # fmt: skip
                async with request as response:
                    body = await _body(response)
                    if response.status != 200:
                        retry_after = response.headers.get("Retry-After", "")
                        raise _refused(ref, response.status, retry_after, "its token service")
        return body


async def _by_proxy(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """By the environment's proxy, for each redirect anew. aiohttp's own ``trust_env`` would also
    send logins of ~/.netrc, and with them a private image looks public."""
    proxy = urllib.request.getproxies().get(request.url.scheme)
    if proxy and not urllib.request.proxy_bypass(request.url.host or ""):
        request.update_proxy(type(request.url)(proxy), None, None)
    return await handler(request)


async def _first(
    servers: Sequence[_Server], ask: Callable[[_Server], Awaitable[AnswerT]]
) -> AnswerT:
    """The first server's answer that is one. Raises the PullError that says most.

    That a mirror lacks an image says little when another server could not be asked.
    """
    errors: list[PullError] = []
    for server in servers:
        try:
            return await ask(server)
        except PullError as error:
            errors.append(error)
    telling = [each for each in errors if each.kind is not Kind.NOT_FOUND]
    raise errors[-1] if errors[-1].kind is Kind.NOT_FOUND or not telling else telling[0]


def _is_recent(hung: float | None) -> bool:
    return hung is not None and hung > time.monotonic() - HUNG_SECONDS


async def _number(stream: AsyncGenerator[bytes, None]) -> int:
    """Of the last four bytes; 0 from a server without ranges, which begins with what is skipped."""
    tail = b""
    async with contextlib.aclosing(stream):
        while len(tail) < 4 and (chunk := await anext(stream, b"")):
            tail += chunk
    return int.from_bytes(tail, "little") if len(tail) == 4 else 0


def _skipped(ref: manifest.Reference, response: aiohttp.ClientResponse, offset: int) -> int:
    """How many bytes the registry sends that were not asked for."""
    if response.status != 206:
        return offset
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != offset:
        text = f"the registry sent another range than the one from byte {offset}"
        raise PullError(ref.text, Kind.NETWORK, text)
    return 0


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """All of it; of one that is too large, more than ``manifest.LARGEST_DOCUMENT`` bytes."""
    parts: list[bytes] = []
    left = manifest.LARGEST_DOCUMENT + 1
    while not response.content.at_eof() and left > 0:
        parts.append(await response.content.read(left))
        left -= len(parts[-1])
    return b"".join(parts)


def _manifests_in(body: bytes) -> set[str]:
    try:
        entries = json.loads(body).get("manifests", [])
        return {str(entry["digest"]) for entry in entries}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()


def _refused(
    ref: manifest.Reference, status: int, retry_after: str, who: str = "it", what: str = ""
) -> PullError:
    wait = failure.asked_wait(retry_after, time.time())
    if status in (401, 403):
        return PullError(ref.text, Kind.AUTH, f"{who} answered {status}")
    if status in (404, 410):
        return PullError(ref.text, Kind.NOT_FOUND, f"the registry answered {status}")
    if status == 416:
        return PullError(ref.text, Kind.CORRUPT, f"{what} is shorter than the manifest says")
    if status == 429:
        return PullError(ref.text, Kind.BUSY, f"{who} answered {status}", wait)
    if status in (408, 425) or status >= 500:
        return PullError(ref.text, Kind.NETWORK, f"{who} answered {status}", wait)
    return PullError(ref.text, Kind.BAD_IMAGE, f"{who} answered {status}")


@contextlib.contextmanager
def _reaching(ref: manifest.Reference) -> Iterator[None]:
    """A server that is not reached, or whose answer breaks off, is a failure of the network."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = re.sub(r" ssl:<[^>]*>", "", str(error)) or type(error).__name__
        raise PullError(ref.text, Kind.NETWORK, text[:300]) from error


# --- challenges -----------------------------------------------------------------------------------

# What a 401 asks for. Errors are ValueErrors without secrets in them.


def _basic(login: base.Login) -> str:
    plain = f"{login.username}:{login.password}".encode()
    return "Basic " + base64.b64encode(plain).decode()


def _answer_to(
    challenge: str, path: str, login: base.Login | None, *, encrypted: bool
) -> str | _TokenQuestion:
    """The Authorization header, or what to ask the token service. Raises ValueError.

    ``encrypted``: the registry is asked by TLS, so its token service must be, too.
    """
    scheme, _, rest = challenge.partition(" ")
    if scheme.lower() == "basic":
        if login is None or not login.username:
            raise ValueError("it requires a login, but none is configured")
        return _basic(login)
    if scheme.lower() != "bearer":
        raise ValueError(f"unknown authentication scheme {scheme[:40]!r}")
    if login is not None and login.registry_token:
        return f"Bearer {login.registry_token}"
    return _question(dict(_PARAMETER.findall(rest)), path, login, encrypted)


def _question(
    asked: dict[str, str], path: str, login: base.Login | None, encrypted: bool
) -> _TokenQuestion:
    realm = asked.get("realm", "")
    parts = urllib.parse.urlsplit(realm)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"unusable token service {realm[:80]!r}")
    if login is not None and parts.scheme == "http" and encrypted:
        raise ValueError("its token service uses plain http: no credentials sent")
    service = asked.get("service", "")
    # A proxy project (override_path) has its repositories under names that only it knows.
    scopes = list(dict.fromkeys([f"repository:{path}:pull", *asked.get("scope", "").split()]))
    if login is not None and login.identity_token:
        form = {"grant_type": "refresh_token", "client_id": "nodeagent", "service": service}
        form |= {"scope": " ".join(scopes), "refresh_token": login.identity_token}
        return _TokenQuestion(realm, {}, {}, form)
    headers = {"Authorization": _basic(login)} if login is not None and login.username else {}
    return _TokenQuestion(realm, {"service": service, "scope": scopes}, headers)


def _token(body: bytes) -> str:
    """The header with the token in a service's answer. Raises ValueError."""
    try:
        found = json.loads(body)
        text = found.get("token") or found.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str) or not text:
        raise ValueError("its token service answered without a token")
    return f"Bearer {text}"


def _grants(header: str, path: str) -> bool:
    """Whether a Bearer token says of itself that it is good for pulling ``path``."""
    parts = header.removeprefix("Bearer ").split(".")
    if len(parts) != 3:
        return False
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        access = claims["access"]
        return any(each["name"] == path and "pull" in each["actions"] for each in access)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
