"""The three listeners: who gets in where, limits on connections, TLS and tokens that rotate."""

import asyncio
import contextlib
import grp
import os
import re
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import kit.errors
import kit.files
from kit.room import Role
from nodeagent import app
from nodeagent.api import access, listeners, rotation, server
from nodeagent.settings import ApiSettings
from nodeagent.shown import page
from tests.nodeagent import test_roles
from tests.testbed import ports, waiting

TOKENS = {role: f"{role}-token-long-enough" for role in Role}
ALL_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW")


def with_admin(agent: app.Agent, **changes: Any) -> app.Agent:
    admin = agent.state.settings.admin.model_copy(update=changes)
    agent.state.settings = agent.state.settings.model_copy(update={"admin": admin})
    return agent


@contextlib.asynccontextmanager
async def unix(agent: app.Agent) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(agent.state.settings.admin.socket))
    async with aiohttp.ClientSession("http://agent", connector=connector) as session:
        yield session


@pytest.fixture(autouse=True)
def _quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not answered when a test ends is not waited for."""
    monkeypatch.setattr(listeners, "STOP_SECONDS", 0.1)


@pytest.fixture
def port() -> int:
    return ports.free(1)[0]


# --- the unix socket


async def test_socket_is_for_root_alone_and_goes_at_the_end(agent: app.Agent) -> None:
    path = agent.state.settings.admin.socket
    async with listeners.serving(agent.state), unix(agent) as session:
        assert path.stat().st_mode & 0o777 == 0o600
        answer = await session.post("/v1/datasets/a/warm")
        assert answer.status == 404  # not refused
    assert not path.exists()
    (entry,) = kit.files.last_entries(agent.state.settings.state_dir / "api-refused.log", 9)
    assert entry["who"].endswith(f"pid {os.getpid()}")


@pytest.mark.real
async def test_group_gets_the_socket_and_its_role(agent: app.Agent) -> None:
    with_admin(agent, group="nogroup", group_role=Role.READ)
    path = agent.state.settings.admin.socket
    path.parent.chmod(0o755)
    script = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(65534)
c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1])
for ask in ("GET /v1/datasets", "POST /v1/datasets/a/warm"):
    c.sendall(f"{ask} HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n".encode())
    print(c.recv(65536).split()[1].decode())
"""
    gid = path.parent.stat().st_gid
    async with listeners.serving(agent.state):
        gid = path.stat().st_gid
        assert gid != 0
        assert path.stat().st_mode & 0o777 == 0o660

        async def ask(group: int) -> str:
            done = await asyncio.create_subprocess_exec(
                "python3", "-c", script, str(path), str(group),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            return (await done.communicate())[0].decode()

        assert (await ask(gid)).split() == ["200", "403"]
        assert "PermissionError" in await ask(gid - 1)


async def test_unknown_group_leaves_the_socket_to_root_alone(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_admin(agent, group="no-such-group", group_role=Role.DANGEROUS)
    path, state = agent.state.settings.admin.socket, agent.state
    async with listeners.serving(state), unix(agent) as session:
        assert path.stat().st_mode & 0o777 == 0o600
        reasons = (await (await session.get("/readyz")).json())["reasons"]
        assert [each for each in reasons if each.startswith("admin.group: ")]
        assert [each.rule for each in state.findings.current()] == ["unknown-group"]
        # Whoever inherited a descriptor of root's has no role: no group admits it.
        monkeypatch.setattr(listeners, "_peer", lambda _: (1, 65534))
        for path_of in ("/v1/datasets", "/v1/status"):
            assert (await session.get(path_of)).status == 401


def test_stale_socket_is_replaced_a_living_one_and_a_file_are_not(short: Path) -> None:
    path = short / "new" / "s"
    first = listeners.bind_unix(path, None)
    with pytest.raises(kit.errors.RefusedError, match="another agent listens"):
        listeners.bind_unix(path, None)
    first.close()
    assert path.exists()
    listeners.bind_unix(path, None).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(kit.errors.HostError, match="not a socket"):
        listeners.bind_unix(path, None)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("mode", "refused"), [(0o755, False), (0o775, True), (0o777, True),
                                              (0o1777, False)])  # fmt: skip
def test_socket_in_a_directory_of_others_is_refused(short: Path, mode: int, refused: bool) -> None:
    short.chmod(mode)
    victim = short / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    if refused:
        with pytest.raises(kit.errors.HostError, match="others could replace the socket"):
            listeners.bind_unix(short / "s", 0)
        assert not (short / "s").exists()
    else:
        listeners.bind_unix(short / "s", 0).close()
    assert victim.stat().st_mode & 0o777 == 0o600


async def test_streams_over_the_network_take_no_place_from_root(
    agent: app.Agent, tcp: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "MOST_STREAMS", 1)
    headers = {"Authorization": f"Bearer {TOKENS[Role.READ]}"}
    context = ssl.create_default_context(cafile=str(tcp.cert_file))
    url = f"https://{tcp.listen}/v1/events/follow"
    async with (
        listeners.serving(agent.state),
        unix(agent) as root,
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url, ssl=context) as first,
        session.get(url, ssl=context) as second,
        root.get("/v1/events/follow") as ours,
    ):
        assert (first.status, second.status, ours.status) == (200, 429, 200)


# --- the metrics listener


async def test_metrics_listener_serves_nothing_else(agent: app.Agent, port: int) -> None:
    with_admin(agent, metrics=f"127.0.0.1:{port}")
    served = {"/", "/runbook", "/metrics", "/healthz", "/readyz"}
    async with listeners.serving(agent.state), aiohttp.ClientSession() as session:
        for path in (*served, "/openapi.json", "/v1/findings", "/v1/datasets", "/v1/datasets/a",
                     "/v1/datasets/a/warm", "//", "/metrics/", "/%2e%2e/v1/datasets"):  # fmt: skip
            for method in ALL_METHODS:
                if method == "CONNECT":
                    continue  # aiohttp's client cannot
                answer = await session.request(method, f"http://127.0.0.1:{port}{path}")
                good = method == "GET" and path in served
                assert (answer.status in (200, 503)) is good, (method, path, answer.status)
                assert good or answer.status in (400, 404, 405)
                answer.close()


async def test_metrics_listener_checks_the_name_on_loopback(agent: app.Agent, port: int) -> None:
    with_admin(agent, metrics=f"127.0.0.1:{port}", names=("node.example",))
    async with listeners.serving(agent.state), aiohttp.ClientSession() as session:
        for host, status in (
            (f"127.0.0.1:{port}", 200), ("localhost", 200), ("node.example:1", 200), ("[::1]", 200),
            ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("10.0.0.1", 421),
        ):  # fmt: skip
            answer = await session.get(f"http://127.0.0.1:{port}/metrics", headers={"Host": host})
            assert answer.status == status, host


async def test_page_is_served_on_loopback_only(agent: app.Agent, port: int) -> None:
    with_admin(agent, metrics=f"0.0.0.0:{port}")
    async with listeners.serving(agent.state), aiohttp.ClientSession() as session:
        assert (await session.get(f"http://127.0.0.1:{port}/")).status == 404
        headers = {"Host": "prometheus-target.example"}
        found = await session.get(f"http://127.0.0.1:{port}/metrics", headers=headers)
        assert found.status == 200


async def test_no_metrics_listener_when_off(agent: app.Agent) -> None:
    async with listeners.serving(with_admin(agent, metrics=None).state), unix(agent) as session:
        assert (await session.get("/metrics")).status == 200


async def test_address_in_use_leaves_nothing(agent: app.Agent) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with_admin(agent, metrics=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(kit.errors.HostError, match="in use"):
            async with listeners.serving(agent.state):
                pass
    assert not agent.state.settings.admin.socket.exists()


# --- limits


async def test_a_thousand_idle_connections_keep_nobody_out(agent: app.Agent, port: int) -> None:
    with_admin(agent, metrics=f"127.0.0.1:{port}")
    path = str(agent.state.settings.admin.socket)
    before = len(os.listdir("/proc/self/fd"))
    async with listeners.serving(agent.state), contextlib.AsyncExitStack() as stack:
        for number in range(1000):
            idle = socket.socket(socket.AF_UNIX if number % 2 else socket.AF_INET)
            stack.enter_context(idle)
            idle.setblocking(False)
            where: Any = path if number % 2 else ("127.0.0.1", port)
            await asyncio.get_running_loop().sock_connect(idle, where)
            if number % 3 == 0:
                idle.send(b"GET /metrics HTTP/1.1\r\nX: ")

        def ours() -> int:
            return len(os.listdir("/proc/self/fd")) - before - 1000

        most = 2 * listeners.MOST_CONNECTIONS + 10
        await waiting.until_async(lambda: ours() <= most, 10, "the oldest to go", detail=ours)
        async with aiohttp.ClientSession() as session, unix(agent) as api:
            for _ in range(3):
                assert (await session.get(f"http://127.0.0.1:{port}/metrics")).status == 200
                assert (await api.get("/v1/datasets")).status == 200


async def test_the_longest_idle_is_closed_and_not_who_came_first(
    agent: app.Agent, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus keeps its connection and asks again and again."""
    with_admin(agent, metrics=f"127.0.0.1:{port}")
    monkeypatch.setattr(listeners, "MOST_CONNECTIONS", 8)

    async def asks() -> None:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split()[1])
        await reader.readexactly(length)

    async with listeners.serving(agent.state), contextlib.AsyncExitStack() as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        await asks()
        for _ in range(20):
            _, other = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(other.close)
            other.write(b"GET /metrics HTTP/1.1\r\nX: ")
            await asyncio.sleep(0.02)
            await asks()


def all_but_the_first_wait(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """For ever, as far as a test goes."""
    monkeypatch.setattr(server, "REQUESTS_PER_SECOND", 0.0)
    monkeypatch.setattr(server, "REQUESTS_AT_ONCE", at_once)
    monkeypatch.setattr(server, "WAIT_SECONDS", 3600.0)


async def test_strangers_with_requests_wait_where_operators_do_not(
    agent: app.Agent, tcp: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_but_the_first_wait(monkeypatch, 1)
    async with listeners.serving(agent.state):
        ask = Asker(tcp).status
        assert await ask("GET", "/healthz") == 401
        stranger = asyncio.create_task(ask("GET", "/healthz"))
        for _ in range(3):
            assert await ask("GET", "/healthz", TOKENS[Role.READ]) == 200
        assert not stranger.done()
        stranger.cancel()


async def test_a_token_that_cannot_be_checked_is_refused_like_any_other(
    agent: app.Agent, tcp: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong with it: the caller is a stranger, with the limits of one and a line."""

    def whose(*_: Any) -> None:
        raise OverflowError("int too large to convert to float")

    async with listeners.serving(agent.state):
        monkeypatch.setattr(rotation, "whose", whose)
        assert await Asker(tcp).status("GET", "/healthz", "made-up") == 503
    refused = agent.state.settings.state_dir / "api-refused.log"
    (entry,) = kit.files.last_entries(refused, 9)
    assert entry["result"] == 503


async def test_connection_without_a_whole_request_is_closed(
    agent: app.Agent, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "IDLE_SECONDS", 0.2)
    with_admin(agent, metrics=f"127.0.0.1:{port}")
    asked = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with listeners.serving(agent.state):
        for begun, answers in ((b"", 0), (asked[:-9], 0), (asked, 1)):
            for connected in (
                asyncio.open_connection("127.0.0.1", port),
                asyncio.open_unix_connection(str(agent.state.settings.admin.socket)),
            ):
                reader, writer = await connected
                writer.write(begun)
                read = await asyncio.wait_for(reader.read(), waiting.limit(60))
                assert read.count(b"HTTP/1.1 200 OK") == answers
                writer.close()


async def test_while_all_connections_are_busy_a_new_one_is_closed(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "MOST_CONNECTIONS", 4)
    path, follow = str(agent.state.settings.admin.socket), b"GET /v1/events/follow HTTP/1.1\r\n"
    async with listeners.serving(agent.state), contextlib.AsyncExitStack() as stack:

        async def connect(request: bytes) -> bytes:
            reader, writer = await asyncio.open_unix_connection(path)
            stack.callback(writer.close)
            with contextlib.suppress(ConnectionError):
                writer.write(request + b"Host: agent\r\n\r\n")
                return await asyncio.wait_for(reader.readline(), waiting.limit(60))
            return b""

        for _ in range(4):
            assert await connect(follow) == b"HTTP/1.1 200 OK\r\n"
        assert await connect(b"GET /healthz HTTP/1.1\r\n") == b""


@pytest.mark.parametrize(
    "request_text",
    [
        "GET /" + "a" * 9000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + "a" * 9000 + "\r\n\r\n",
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + "X: a\r\n" * 500 + "\r\n",
        "GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        "nonsense\r\n\r\n",
    ],
    ids=["line", "header", "headers", "NUL", "nonsense"],
)
async def test_requests_too_large_or_not_http_are_refused_and_leave_the_log_alone(
    agent: app.Agent, port: int, request_text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with_admin(agent, metrics=f"127.0.0.1:{port}")
    async with listeners.serving(agent.state):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_text.encode())
        assert (await asyncio.wait_for(reader.readline(), waiting.limit(60))).split()[1] == b"400"
        writer.close()
    assert "aiohttp" not in caplog.text


async def test_client_that_does_not_read_is_dropped(
    agent: app.Agent, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, asked = 30_000_000, asyncio.Event()

    def render(_: object) -> str:
        asked.set()
        return "a" * size

    monkeypatch.setattr(server, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(page, "render", render)
    with_admin(agent, metrics=f"127.0.0.1:{port}")
    async with listeners.serving(agent.state):
        before = len(os.listdir("/proc/self/fd"))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.wait_for(asked.wait(), waiting.limit(30))
        await waiting.until_async(
            lambda: len(os.listdir("/proc/self/fd")) == before + 1, 30, "the server's end to close"
        )
        read = 0
        with contextlib.suppress(ConnectionResetError):
            while data := await reader.read(2**20):
                read += len(data)
        assert read < size
        writer.close()


# --- the API over TCP


def certify(folder: Path, name: str) -> None:
    """A new self-signed certificate for 127.0.0.1."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", folder / "new.key", "-out", folder / "new.crt", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "new.key").rename(folder / "tls.key")
    (folder / "new.crt").rename(folder / "tls.crt")


def over_tcp(agent: app.Agent, folder: Path) -> ApiSettings:
    """Settings of an API over TCP with ``TOKENS``, in force for ``agent``."""
    certify(folder, "first")
    (folder / "tokens").touch(mode=0o600)
    (folder / "tokens").write_text(
        "".join(f"{role}: {{role: {role}, token: {token}}}\n" for role, token in TOKENS.items())
    )
    api = ApiSettings(
        listen=f"127.0.0.1:{ports.free(1)[0]}",
        cert_file=folder / "tls.crt",
        key_file=folder / "tls.key",
        tokens_file=folder / "tokens",
    )
    with_admin(agent, api=api)
    return api


@pytest.fixture
def tcp(agent: app.Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ApiSettings:
    monkeypatch.setattr(rotation, "RECHECK_SECONDS", 0.02)
    return over_tcp(agent, tmp_path)


class Asker:
    """A client over TLS that trusts the present certificate; a new connection for each request."""

    def __init__(self, api: ApiSettings) -> None:
        self._api = api
        self._context = ssl.create_default_context(cafile=str(api.cert_file))

    async def status(self, method: str, path: str, token: str = "", **headers: str) -> int:
        if token:
            headers["Authorization"] = f"Bearer {token}"
        url = f"https://{self._api.listen}{path}"
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, url, ssl=self._context) as answer,
        ):
            return answer.status


async def test_tcp_needs_a_token_for_everything(agent: app.Agent, tcp: ApiSettings) -> None:
    async with listeners.serving(agent.state):
        ask = Asker(tcp).status
        for path in ("/", "/metrics", "/healthz", "/openapi.json", "/v1/datasets", "/nothing"):
            assert await ask("GET", path) == 401
            assert await ask("GET", path, "wrong-token-long-enough") == 401
            assert await ask("GET", path, TOKENS[Role.READ]) in (200, 404, 503)
        warm = ("POST", "/v1/datasets/a/warm")
        assert await ask(*warm, TOKENS[Role.READ]) == 403
        assert await ask(*warm, TOKENS[Role.OPERATE]) == 404
        assert await ask("DELETE", "/v1/datasets/a", TOKENS[Role.OPERATE]) == 403
        assert await ask("DELETE", "/v1/datasets/a", TOKENS[Role.DANGEROUS]) == 404


async def test_tcp_refuses_web_pages_and_other_names(agent: app.Agent, tcp: ApiSettings) -> None:
    async with listeners.serving(agent.state):
        ask = Asker(tcp).status
        get = ("GET", "/v1/datasets", TOKENS[Role.DANGEROUS])
        assert await ask(*get, Host="evil.example") == 421
        assert await ask(*get, Origin="https://127.0.0.1") == 403
        assert await ask(*get, Host="localhost:1") == 200


async def test_tcp_refuses_plain_http(agent: app.Agent, tcp: ApiSettings) -> None:
    async with listeners.serving(agent.state), aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{tcp.listen}/metrics")


async def readyz(agent: app.Agent) -> Any:
    async with unix(agent) as session:
        return await (await session.get("/readyz")).json()


async def test_tokens_rotate_while_serving(agent: app.Agent, tcp: ApiSettings) -> None:
    assert tcp.tokens_file is not None
    async with listeners.serving(agent.state):
        ask = Asker(tcp).status
        old, new = TOKENS[Role.READ], "another-token-long-enough"
        assert await ask("GET", "/v1/datasets", old) == 200

        async def refused(token: str) -> bool:
            return await ask("GET", "/v1/datasets", token) == 401

        kit.files.save(tcp.tokens_file, f"x: {{role: read, token: {new}}}\n".encode())
        await waiting.until_async(lambda: refused(old))
        assert await ask("GET", "/v1/datasets", new) == 200
        kit.files.save(tcp.tokens_file, b"x: {role: read}\n")
        await waiting.until_async(lambda: agent.state.findings.current())
        assert await ask("GET", "/v1/datasets", new) == 200  # the earlier tokens stay
        assert await refused(old)
        shown = await readyz(agent)
        assert shown["degraded"] is True
        assert any("admin.api.tokens_file" in reason for reason in shown["reasons"])
        kit.files.save(tcp.tokens_file, b"{}")
        await waiting.until_async(lambda: refused(new))
        assert agent.state.findings.current() == []


async def test_certificate_rotates_while_serving(
    agent: app.Agent, tcp: ApiSettings, tmp_path: Path
) -> None:
    async with listeners.serving(agent.state):
        first, get = Asker(tcp), ("GET", "/v1/datasets", TOKENS[Role.READ])
        assert await first.status(*get) == 200
        good = tcp.cert_file.read_bytes()
        kit.files.save(tcp.cert_file, b"nonsense")
        await waiting.until_async(lambda: agent.state.findings.current())
        assert await first.status(*get) == 200  # the earlier pair stays
        kit.files.save(tcp.cert_file, good)
        certify(tmp_path, "second")

        async def replaced() -> bool:
            try:
                return await first.status(*get) != 200
            except aiohttp.ClientSSLError:
                return True

        await waiting.until_async(replaced)
        assert await Asker(tcp).status(*get) == 200
        await waiting.until_async(lambda: not agent.state.findings.current())


@pytest.mark.parametrize("which", ["key_file", "cert_file", "tokens_file"])
@pytest.mark.parametrize("content", [b"nonsense", b"", None])
async def test_bad_file_at_the_start_keeps_the_api_shut_until_it_is_good(
    agent: app.Agent, tcp: ApiSettings, which: str, content: bytes | None
) -> None:
    path: Path = getattr(tcp, which)
    good, ask = path.read_bytes(), Asker(tcp)
    path.unlink() if content is None else path.write_bytes(content)

    async def admitted() -> bool:
        try:
            return await ask.status("GET", "/v1/datasets", TOKENS[Role.READ]) == 200
        except aiohttp.ClientError:
            return False

    async with listeners.serving(agent.state):
        assert not await admitted()
        (found,) = agent.state.findings.current()
        assert found.rule == "unusable-file"
        shown = await readyz(agent)
        assert shown["degraded"] is True
        assert any("nobody is admitted" in reason for reason in shown["reasons"])
        kit.files.save(path, good)
        await waiting.until_async(admitted)


async def test_address_that_is_not_there_leaves_the_agent(
    agent: app.Agent, tcp: ApiSettings
) -> None:
    """A pod that ended there would be started again and again: no guard's agent on that node."""
    host, _, port = tcp.listen.rpartition(":")
    with socket.create_server((host, int(port))):
        async with listeners.serving(agent.state), unix(agent) as session:
            reasons = (await (await session.get("/readyz")).json())["reasons"]
            assert [each for each in reasons if f"admin.api.listen {tcp.listen}" in each]
            assert [each.rule for each in agent.state.findings.current()] == ["address-unavailable"]


async def test_handshakes_that_never_end_keep_nobody_out(
    agent: app.Agent, tcp: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "MOST_CONNECTIONS", 32)
    where = tcp.listen.rpartition(":")
    async with listeners.serving(agent.state):
        with contextlib.ExitStack() as stack:
            for _ in range(5 * listeners.MOST_CONNECTIONS):
                idle = stack.enter_context(socket.socket())
                idle.setblocking(False)
                await asyncio.get_running_loop().sock_connect(idle, (where[0], int(where[2])))
            ask = Asker(tcp).status

            async def answered() -> bool:
                # On a slow machine its own handshake may take longer than that.
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    assert await ask("GET", "/v1/datasets", TOKENS[Role.READ]) == 200
                    return True
                return False

            await waiting.until_async(answered, 30, "an answer")


async def test_every_route_of_every_listener_refuses_a_lower_role(
    whole: app.Agent, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole matrix is tried on all three: as nobody, and with each lower role."""
    operations = [
        (method, path, known.role)
        for call, known in test_roles.CALLS.items()
        for method, _, path in [call.partition(" ")]
    ]
    assert len(operations) > 30
    api = over_tcp(whole, tmp_path)
    monkeypatch.setattr(listeners, "_peer", lambda _: (1, 4242))  # a stranger with the descriptor
    refused = 0
    for group_role in (None, Role.READ, Role.OPERATE):
        with_admin(whole, metrics=f"127.0.0.1:{port}")
        if group_role is not None:
            group = grp.getgrgid(os.getegid()).gr_name
            with_admin(whole, group=group, group_role=group_role)
        async with (
            listeners.serving(whole.state),
            unix(whole) as socket_client,
            aiohttp.ClientSession() as plain,
        ):
            ask = Asker(api).status
            for method, path, own in operations:
                url = re.sub(r"{\w+}", "none", path)
                if group_role is not None and group_role.includes(own):
                    continue
                status = 401 if group_role is None else 403
                assert (await socket_client.request(method, url)).status == status, (method, path)
                token = "" if group_role is None else TOKENS[group_role]
                assert await ask(method, url, token) == status, (method, path)
                refused += 1
                served = {"/", "/runbook", "/metrics", "/healthz", "/readyz"}
                if method != "GET" or path not in served:
                    answer = await plain.request(method, f"http://127.0.0.1:{port}{url}")
                    assert answer.status in (404, 405), (method, path)
    assert refused > 60


async def test_serving_leaves_no_task(agent: app.Agent) -> None:
    async with listeners.serving(agent.state), unix(agent) as session:
        await session.get("/v1/datasets")
    await waiting.until_async(lambda: len(asyncio.all_tasks()) == 1)
