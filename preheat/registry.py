"""A client of container registries: resolve a reference, read manifests, stream blobs.

The runtime pulls. This client asks before a pull what an image costs and whether its tag moved, and
under a rate limit it fetches layers in the runtime's place. Mirrors, CAs and plain http come from
containerd's own hosts.toml files. Everything that is read has a size limit and is checked against
its digest.
"""

import asyncio
import base64
import contextlib
import json
import re
import ssl
import tomllib
import urllib.parse
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from cachetools import LRUCache

from preheat import manifest
from preheat.failure import Kind, PullError
from preheat.runtimes import base

CONNECT_SECONDS = 10.0
DOCUMENT_SECONDS = 30.0
BLOB_SILENCE_SECONDS = 60.0
MOST_CONNECTIONS = 16
MOST_TOKENS = 256
CHUNK = 256 * 1024
_ACCEPT = ", ".join(sorted(manifest.INDEX_TYPES | manifest.MANIFEST_TYPES))
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")


@dataclass(frozen=True)
class Host:
    """One server to ask for a registry's images."""

    url: str  # with scheme, without /v2
    ca: str | None = None
    verify: bool = True


def hosts(directory: Path, name: str) -> list[Host]:
    """The servers for registry ``name`` in the order of its hosts.toml, its own server last.

    Blocking (small files). Raises ValueError for a file that cannot be read.
    """
    own = ("http" if _LOOPBACK.fullmatch(name) else "https") + f"://{name}"
    for folder in (name, name.replace(":", "_") + "_", "_default"):
        file = directory / folder / "hosts.toml"
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: {error}") from error
        return _listed(content, own, file)
    return [Host(own)]


def _listed(content: Mapping[str, Any], own: str, file: Path) -> list[Host]:
    found = []
    tables = content.get("host", {})
    if not isinstance(tables, dict):
        raise ValueError(f"{file}: [host] is not a table")
    for url, table in tables.items():
        abilities = table.get("capabilities", ["pull", "resolve"])
        if "pull" in abilities and "resolve" in abilities:
            found.append(_host(str(url), table, file))
    server = content.get("server", own)
    if isinstance(server, str) and server:
        found.append(_host(server, content, file))
    return list(dict.fromkeys(found))


def _host(url: str, table: Mapping[str, Any], file: Path) -> Host:
    ca = table.get("ca")
    if isinstance(ca, list):
        ca = ca[0] if ca else None
    if isinstance(ca, str):
        ca = str(file.parent / ca)
    if "://" not in url:
        url = f"https://{url}"
    return Host(url.rstrip("/").removesuffix("/v2"), ca, not table.get("skip_verify", False))


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Registry:
    """One client for all registries; ``close`` ends its connections."""

    def __init__(self, hosts_dir: Path) -> None:
        self._hosts_dir = hosts_dir
        self._session: aiohttp.ClientSession | None = None
        self._tokens: LRUCache[tuple[str, str, str], str] = LRUCache(MOST_TOKENS)
        self._contexts: dict[Host, ssl.SSLContext | bool] = {}
        self.requests = 0

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MOST_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=CONNECT_SECONDS, sock_read=BLOB_SILENCE_SECONDS
                ),
                auto_decompress=False,
                trust_env=True,
                headers={"User-Agent": "nodeagent"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    # --- images -----------------------------------------------------------------------------------

    async def resolve(self, ref: manifest.Reference, login: base.Login | None) -> manifest.Target:
        """What ``ref`` names now. Raises PullError."""
        wanted = ref.digest or ref.tag or "latest"
        answer = await self._document(ref, f"manifests/{wanted}", login)
        digest = manifest.digest_of(answer.body)
        if ref.digest is not None and digest != ref.digest:
            raise PullError(ref.text, Kind.CORRUPT, f"the registry answered with {digest} instead")
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        if media_type not in manifest.INDEX_TYPES | manifest.MANIFEST_TYPES:
            text = f"its manifest has the unknown type {media_type!r}"
            raise PullError(ref.text, Kind.BAD_IMAGE, text)
        return manifest.Target(media_type, digest, len(answer.body))

    async def shape(
        self,
        ref: manifest.Reference,
        target: manifest.Target,
        platform: str,
        login: base.Login | None,
    ) -> manifest.Shape:
        """What the image consists of. Raises PullError, also for a document with another digest."""

        async def read(digest: str) -> bytes:
            kind = "manifests" if digest in manifests else "blobs"
            answer = await self._document(ref, f"{kind}/{digest}", login)
            if manifest.digest_of(answer.body) != digest:
                raise PullError(ref.text, Kind.CORRUPT, f"the bytes do not match {digest}")
            if kind == "manifests":
                manifests.update(_manifests_in(answer.body))
            return answer.body

        manifests = {target.digest}
        try:
            return await manifest.shape(target, read, platform)
        except manifest.BadImageError as error:
            raise PullError(ref.text, Kind.BAD_IMAGE, str(error)) from error

    async def span(
        self, ref: manifest.Reference, digest: str, first: int, last: int, login: base.Login | None
    ) -> bytes:
        """Bytes ``first`` to ``last`` of a blob; empty when the registry does not serve ranges."""
        headers = {"Range": f"bytes={first}-{last}"}
        answer = await self._document(ref, f"blobs/{digest}", login, headers, partial=True)
        return answer.body if answer.status == 206 else b""

    async def blob(
        self, ref: manifest.Reference, digest: str, offset: int, login: base.Login | None
    ) -> AsyncIterator[bytes]:
        """The blob from ``offset`` on. The caller checks the digest (the runtime's store does)."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        last: PullError | None = None
        for host in await self._hosts(ref):
            try:
                response = await self._open(host, ref, f"blobs/{digest}", login, headers)
            except PullError as error:
                last = error
                continue
            try:
                if offset and response.status != 206:
                    raise PullError(ref.text, Kind.NETWORK, "the registry cannot resume a blob")
                with _reaching(ref):
                    async for chunk in response.content.iter_chunked(CHUNK):
                        yield chunk
                return
            finally:
                response.close()
        assert last is not None
        raise last

    # --- requests ---------------------------------------------------------------------------------

    async def _hosts(self, ref: manifest.Reference) -> list[Host]:
        try:
            return await asyncio.to_thread(hosts, self._hosts_dir, ref.host)
        except ValueError as error:
            raise PullError(ref.text, Kind.BAD_IMAGE, str(error)) from error

    async def _document(
        self,
        ref: manifest.Reference,
        path: str,
        login: base.Login | None,
        headers: Mapping[str, str] | None = None,
        partial: bool = False,
    ) -> _Answer:
        """A small body from the first host that has it."""
        last: PullError | None = None
        largest = manifest.LARGEST_DOCUMENT
        for host in await self._hosts(ref):
            try:
                with _reaching(ref):
                    async with asyncio.timeout(DOCUMENT_SECONDS):
                        response = await self._open(host, ref, path, login, headers or {})
                        try:
                            if partial and response.status != 206:
                                return _Answer(response.status, {}, b"")
                            body = await _body(response)
                        finally:
                            response.release() if response.content.at_eof() else response.close()
            except PullError as error:
                last = error
                continue
            if len(body) > largest:
                raise PullError(ref.text, Kind.BAD_IMAGE, f"{path} has more than {largest} bytes")
            return _Answer(response.status, response.headers, body)
        assert last is not None
        raise last

    def _tls(self, host: Host) -> ssl.SSLContext | bool:
        if not host.verify:
            return False
        if host.ca is None:
            return True
        if host not in self._contexts:
            self._contexts[host] = ssl.create_default_context(cafile=host.ca)
        return self._contexts[host]

    async def _open(
        self,
        host: Host,
        ref: manifest.Reference,
        path: str,
        login: base.Login | None,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        """A 200 or 206 response, which the caller closes. Raises PullError."""
        url = f"{host.url}/v2/{ref.path}/{path}"
        token = self._tokens.get(self._token_key(host, ref, login))
        sent = {"Accept": _ACCEPT, **headers}
        for attempt in (1, 2):
            if token is not None:
                sent["Authorization"] = token
            response = await self._get(host, ref, url, sent)
            if response.status in (200, 206):
                return response
            challenge = response.headers.get("WWW-Authenticate", "")
            retry_after = response.headers.get("Retry-After", "")
            status = response.status
            response.close()
            if status != 401 or attempt == 2:
                raise _refused(ref, status, retry_after)
            token = await self._authorize(host, ref, challenge, login)
        raise AssertionError("unreachable")

    async def _get(
        self, host: Host, ref: manifest.Reference, url: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        self.requests += 1
        with _reaching(ref):
            return await self._connected().get(url, headers=headers, ssl=self._tls(host))

    @staticmethod
    def _token_key(
        host: Host, ref: manifest.Reference, login: base.Login | None
    ) -> tuple[str, str, str]:
        if login is None:
            return host.url, ref.path, ""
        secret = f"{login.username}\n{login.password}\n{login.identity_token}".encode()
        return host.url, ref.path, manifest.digest_of(secret)

    async def _authorize(
        self, host: Host, ref: manifest.Reference, challenge: str, login: base.Login | None
    ) -> str:
        """The Authorization header that the challenge asks for; remembered for the next request."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if login is None or not login.username:
                raise PullError(ref.text, Kind.AUTH, "it requires a login, but none is configured")
            value = _basic(login)
        elif scheme.lower() == "bearer":
            value = "Bearer " + await self._token(host, ref, dict(_CHALLENGE.findall(rest)), login)
        else:
            raise PullError(
                ref.text,
                Kind.AUTH,
                f"unknown authentication scheme {scheme[:40]!r}",
            )
        self._tokens[self._token_key(host, ref, login)] = value
        return value

    async def _token(
        self,
        host: Host,
        ref: manifest.Reference,
        asked: Mapping[str, str],
        login: base.Login | None,
    ) -> str:
        if login is not None and login.registry_token:
            return login.registry_token
        realm = asked.get("realm", "")
        parts = urllib.parse.urlsplit(realm)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PullError(ref.text, Kind.AUTH, f"unusable token service {realm[:80]!r}")
        secret = login is not None
        if secret and parts.scheme == "http" and host.url.startswith("https:"):
            raise PullError(
                ref.text, Kind.AUTH, "its token service uses plain http: no credentials sent"
            )
        query = {"service": asked.get("service", ""), "scope": f"repository:{ref.path}:pull"}
        headers: dict[str, str] = {}
        data: dict[str, str] | None = None
        if login is not None and login.identity_token:
            data = {
                **query,
                "grant_type": "refresh_token",
                "client_id": "nodeagent",
                "refresh_token": login.identity_token,
            }
        elif login is not None and login.username:
            headers["Authorization"] = _basic(login)
        with _reaching(ref):
            async with asyncio.timeout(DOCUMENT_SECONDS):
                session = self._connected()
                self.requests += 1
                # With the registry's trust settings: its CA is also that of its token service.
                tls = self._tls(host)
                request = (
                    session.post(realm, data=data, ssl=tls)
                    if data is not None
                    else session.get(realm, params=query, headers=headers, ssl=tls)
                )
                async with request as response:
                    body = await _body(response)
                    if response.status != 200:
                        raise _refused(ref, response.status, "", "its token service")
        try:
            found = json.loads(body)
            token = found.get("token") or found.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not isinstance(token, str) or not token:
            raise PullError(ref.text, Kind.AUTH, "its token service answered without a token")
        return token


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """All of it; of one that is too large, more than ``manifest.LARGEST_DOCUMENT`` bytes."""
    body = b""
    while not response.content.at_eof() and len(body) <= manifest.LARGEST_DOCUMENT:
        body += await response.content.read(manifest.LARGEST_DOCUMENT + 1 - len(body))
    return body


def _manifests_in(body: bytes) -> set[str]:
    try:
        entries = json.loads(body).get("manifests", [])
        return {str(entry["digest"]) for entry in entries}
    except (ValueError, TypeError, KeyError, AttributeError):
        return set()


def _basic(login: base.Login) -> str:
    plain = f"{login.username}:{login.password}".encode()
    return "Basic " + base64.b64encode(plain).decode()


def _refused(ref: manifest.Reference, status: int, retry_after: str, who: str = "it") -> PullError:
    wait = float(min(int(retry_after), 3600)) if retry_after.isdigit() else None
    if status in (401, 403):
        return PullError(ref.text, Kind.AUTH, f"{who} answered {status}")
    if status in (404, 410):
        return PullError(ref.text, Kind.NOT_FOUND, f"the registry answered {status}")
    if status == 416:
        return PullError(ref.text, Kind.CORRUPT, "a blob is shorter than the manifest says")
    if status in (408, 425, 429) or status >= 500:
        return PullError(ref.text, Kind.NETWORK, f"{who} answered {status}", wait)
    return PullError(ref.text, Kind.BAD_IMAGE, f"{who} answered {status}")


@contextlib.contextmanager
def _reaching(ref: manifest.Reference) -> Iterator[None]:
    """A server that is not reached, or whose answer breaks off, is a failure of the network."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        text = str(error) or type(error).__name__
        raise PullError(ref.text, Kind.NETWORK, text[:300]) from error
