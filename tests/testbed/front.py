"""Registries as they are met: an aiohttp server before the real registry, in its own thread.

Plain or by TLS; it wants logins, limits anonymous clients, sends blobs from elsewhere, serves no
ranges, needs ``ns=``, is slow, or dies in the middle of a blob.
"""

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.testbed import ports, waiting

CHUNK = 65536
_COPIED = ("Content-Type", "Docker-Content-Digest", "Content-Range", "Content-Length", "Etag")


@dataclasses.dataclass(frozen=True)
class Authority:
    """A certificate authority with a certificate for 127.0.0.1."""

    ca: Path
    certificate: Path
    key: Path


def authority(folder: Path, name: str) -> Authority:
    """A new one; again in the same folder: a rotated one."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Authority(*(folder / f"{name}{end}" for end in (".ca.crt", ".crt", ".key")))
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    ca_key = folder / f"{name}.ca.key"
    san = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    for extra in (
        ["-keyout", ca_key, "-out", made.ca, "-subj", f"/CN=ca-{name}"],
        [
            "-keyout",
            made.key,
            "-out",
            made.certificate,
            "-subj",
            f"/CN={name}",
            *san,
            "-CA",
            made.ca,
            "-CAkey",
            ca_key,
        ],
    ):
        subprocess.run(
            ["openssl", "req", "-x509", "-days", "2", *curve, *map(str, extra)],
            check=True, capture_output=True,
        )  # fmt: skip
    return made


@dataclasses.dataclass(frozen=True)
class Seen:
    method: str
    path: str
    query: str
    status: int
    authorized: bool
    agent: str
    headers: dict[str, str]


class Front:
    """Attributes may be set at any time; they apply from the next request or chunk."""

    def __init__(self, upstream: int, trust: Authority | None = None) -> None:
        self._upstream = upstream
        self.trust = trust
        (self.port,) = ports.free(1)
        self.login: tuple[str, str] | None = None  # what a client has to send
        self.bearer = False  # by token, as most registries want it, else by Basic
        self.scheme = ""  # an authentication scheme that nobody knows
        self.anonymous_limit = 0  # answers to clients without a login, then 429
        self.token_wait = ""  # its token service answers 429 with this Retry-After
        self.elsewhere = ""  # the URL of another server that has the blobs
        self.ranges = True
        self.namespace = ""  # the ``ns`` that each request must have
        self.rate = 0  # bytes per second and connection of blobs; 0: unlimited
        self.dies_after = 0  # a blob's connection ends after so many bytes; 0: never
        self.deaths = 0  # how often that happens
        self.wanted_header: tuple[str, str] | None = None
        self.broken_documents = False  # what lookups of the agent get is not JSON
        # What it has itself, by path: content type and bytes. Such a front needs no upstream.
        self.files: dict[str, tuple[str, bytes]] = {}
        self.project = ""  # a proxy project: the path before each repository, and in its scopes
        self.compresses = False  # documents, for clients that take that
        self.hangs = False  # takes requests and never answers
        self.page = False  # 200 and a page of HTML to everything, as a captive portal
        self.refuses_agent = False  # 403 to the agent, as a firewall that knows containerd only
        self.blob_bytes = 0  # sent so far
        self.seen: list[Seen] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front", daemon=True)
        self._runner: web.AppRunner | None = None
        self._client: aiohttp.ClientSession | None = None
        self._context: ssl.SSLContext | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.trust else 'http'}://{self.host}"

    def start(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(waiting.limit(10))

    async def _start(self) -> None:
        self._client = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        if self.trust is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(self.trust.certificate, self.trust.key)
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._context).start()

    def rotate(self, trust: Authority) -> None:
        """From now on handshakes use this certificate."""
        assert self._context is not None
        self._context.load_cert_chain(trust.certificate, trust.key)

    def require(self, ca: Path) -> None:
        """From now on clients need a certificate of this authority."""
        assert self._context is not None
        self._context.load_verify_locations(ca)
        self._context.verify_mode = ssl.CERT_REQUIRED

    def stop(self) -> None:
        async def end() -> None:
            assert self._runner is not None and self._client is not None
            await self._client.close()
            await self._runner.cleanup()

        self.hangs, self.rate = False, 0
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(waiting.limit(10))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(waiting.limit(10))
        self._loop.close()

    def asked(self, agent: str = "nodeagent") -> list[Seen]:
        """The requests of clients whose User-Agent begins like this."""
        return [each for each in self.seen if each.agent.startswith(agent)]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(
            request.method, request.path, request.query_string, 0,
            "Authorization" in request.headers, request.headers.get("User-Agent", ""),
            dict(request.headers),
        )  # fmt: skip
        if self.hangs:
            self.seen.append(seen)
            while self.hangs:
                await asyncio.sleep(0.02)
        answers: list[Callable[[web.Request], Awaitable[web.StreamResponse | None]]]
        answers = [self._token, self._gate, self._redirect, self._broken]
        for each in answers:
            response = await each(request)
            if response is not None:
                break
        self.seen.append(dataclasses.replace(seen, status=response.status if response else 0))
        return response or await self._forward(request)

    def _named(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        plain = base64.b64encode(":".join(self.login or ("", "")).encode()).decode()
        return self.login is not None and given in (f"Basic {plain}", "Bearer named")

    async def _token(self, request: web.Request) -> web.StreamResponse | None:
        if request.path != "/token":
            return None
        if self.token_wait:
            return web.json_response({}, status=429, headers={"Retry-After": self.token_wait})
        if request.method == "POST":  # as registries without OAuth
            return web.json_response({}, status=405)
        scopes = [each.split(":") for each in request.query.getall("scope", [])]
        if self.project:
            given = any(each[1].startswith(f"{self.project}/") for each in scopes)
            return web.json_response({"token": "project" if given else "nothing"})
        if self._named(request):
            return web.json_response({"token": "named"})
        if "Authorization" in request.headers:
            return web.json_response({}, status=401)
        path = next((each[1] for each in scopes if each[0] == "repository"), "")
        actions = ["pull"] if self.anonymous_limit else []
        claims = {"access": [{"type": "repository", "name": path, "actions": actions}]}
        middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
        return web.json_response({"token": f"x.{middle}.x"})

    async def _gate(self, request: web.Request) -> web.StreamResponse | None:
        """Who may pass at all."""
        if self.refuses_agent and request.headers.get("User-Agent", "").startswith("nodeagent"):
            return web.json_response({}, status=403)
        if self.namespace and request.query.get("ns") != self.namespace:
            return web.json_response({}, status=404)
        if (
            self.wanted_header
            and request.headers.get(self.wanted_header[0]) != (self.wanted_header[1])
        ):
            return web.json_response({}, status=403)
        token = request.headers.get("Authorization", "")
        if self.project:
            if token == "Bearer project":
                return None
            path = "/".join(request.path.split("/")[2:-2])
            challenge = f'Bearer realm="{self.url}/token",scope="repository:{path}:pull"'
            return web.json_response({}, status=401, headers={"WWW-Authenticate": challenge})
        if self.login is None or self._named(request):
            return None
        base = request.path == "/v2/"  # as Docker Hub: it says how to log in, whatever the limit
        if self.anonymous_limit and not base and (not self.bearer or token.startswith("Bearer x.")):
            if sum(not each.authorized or self.bearer for each in self.seen) < self.anonymous_limit:
                return None
            return web.json_response({}, status=429)
        challenge = 'Basic realm="front"'
        if self.bearer:
            challenge = f'Bearer realm="{self.url}/token",service="front"'
        challenge = self.scheme or challenge
        return web.json_response({}, status=401, headers={"WWW-Authenticate": challenge})

    async def _redirect(self, request: web.Request) -> web.StreamResponse | None:
        if not self.elsewhere or "/blobs/" not in request.path:
            return None
        return web.Response(status=307, headers={"Location": self.elsewhere + request.path})

    async def _broken(self, request: web.Request) -> web.StreamResponse | None:
        if self.page:
            return web.Response(text="<html>please log in</html>", content_type="text/html")
        mine = request.headers.get("User-Agent", "").startswith("nodeagent")
        if not self.broken_documents or not mine or request.method != "GET":
            return None
        return web.Response(body=b"{", content_type="application/vnd.oci.image.index.v1+json")

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._client is not None
        kept = {k: v for k, v in request.headers.items() if k in ("Accept", "Range")}
        if not self.ranges:
            kept.pop("Range", None)
        path = request.path.replace(f"/v2/{self.project}/", "/v2/", 1)
        if path in self.files:
            return await self._own(request, *self.files[path])
        url = f"http://127.0.0.1:{self._upstream}{path}"
        async with self._client.request(request.method, url, headers=kept) as answer:
            headers = {k: answer.headers[k] for k in _COPIED if k in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            if request.method != "HEAD":
                blob = re.search(r"/blobs/sha256:", request.path) is not None
                with contextlib.suppress(ConnectionError):
                    await self._stream(request, answer, response, blob)
            return response

    async def _own(self, request: web.Request, kind: str, data: bytes) -> web.StreamResponse:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        headers = {"Content-Type": kind, "Docker-Content-Digest": digest}
        if span := re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", "") * self.ranges):
            start, whole = int(span[1]), len(data)
            data = data[start:]
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{whole}"
        response = web.StreamResponse(status=206 if span else 200, headers=headers)
        if self.compresses and "/manifests/" in request.path:
            response.enable_compression()  # as the client's Accept-Encoding has it
        else:
            response.content_length = len(data)
        await response.prepare(request)
        for begin in range(0, len(data), CHUNK) if request.method != "HEAD" else ():
            chunk = data[begin : begin + CHUNK]
            with contextlib.suppress(ConnectionError):
                await response.write(chunk)
            if "/blobs/" in request.path:
                self.blob_bytes += len(chunk)
                ends = self._loop.time() + len(chunk) / (self.rate or 1e9)
                while self.rate and self._loop.time() < ends:
                    await asyncio.sleep(0.02)
        return response

    async def _stream(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        response: web.StreamResponse,
        blob: bool,
    ) -> None:
        sent = 0
        async for chunk in answer.content.iter_chunked(CHUNK):
            await response.write(chunk)
            sent += len(chunk)
            self.blob_bytes += len(chunk) if blob else 0
            if blob and self.rate:
                await asyncio.sleep(len(chunk) / self.rate)
            if blob and self.deaths and self.dies_after and sent >= self.dies_after:
                self.deaths -= 1
                if request.transport is not None:
                    request.transport.abort()
                return
        await response.write_eof()
