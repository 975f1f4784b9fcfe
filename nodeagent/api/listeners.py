"""Where the agent listens: the API's unix socket, the metrics port, and the API's TLS port.

We accept connections ourselves, because neither asyncio nor aiohttp limits their number: whoever
opens enough of them would take the file descriptors that the rooms need. A listener that is full
closes the connection that has waited longest without a request, so idle connections keep neither a
probe nor an operator out. While all are busy it closes the new one.

A new certificate serves the connections that are accepted after it appeared.
"""

import asyncio
import contextlib
import dataclasses
import errno
import functools
import grp
import logging
import os
import socket
import ssl
import stat
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import structlog
from aiohttp import http_exceptions, web

import kit.errors
import kit.findings
import kit.tasks
from kit.pause import Bucket
from kit.room import Role
from nodeagent.api import access, own, reviews, rotation, server
from nodeagent.settings import AdminSettings, address, is_loopback
from nodeagent.state import State

log = structlog.get_logger("agent")

MOST_CONNECTIONS = 256  # of one listener
BACKLOG = 128
IDLE_SECONDS = 15.0  # without a complete request: at the start and between two
HANDSHAKE_SECONDS = 5.0
STOP_SECONDS = 2.0
ACCEPT_RETRY_SECONDS = 0.5
HANDSHAKES_PER_SECOND = 100.0  # each takes the event loop 1 to 2 ms; more of them wait
LONGEST_LINE = 8190  # of the request line
LONGEST_HEADER = 4096
MOST_HEADERS = 64


def _is_our_fault(record: logging.LogRecord) -> bool:
    """Not what a client does wrong: strangers could fill the log with it."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError | ConnectionError)


logging.getLogger("aiohttp.server").addFilter(_is_our_fault)


class _Listener:
    """Serves one application on one listening socket."""

    def __init__(
        self,
        name: str,
        app: web.Application,
        listening: socket.socket,
        tls: rotation.Certificate | None = None,
    ) -> None:
        self._name = name
        self._socket = listening
        self._tls = tls
        self._busy: set[Any] = set()  # connections with a request
        self._idle: dict[Any, None] = {}  # those without, the longest idle first
        self._handshake_rate = Bucket(HANDSHAKES_PER_SECOND, HANDSHAKES_PER_SECOND)
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        app.middlewares.insert(0, self._note_idle)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=STOP_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_HEADER,
            max_headers=MOST_HEADERS,
            auto_decompress=False,  # a small body must not become a large one
        )

    @web.middleware
    async def _note_idle(self, request: web.Request, handler: server.Handler) -> web.StreamResponse:
        self._idle.pop(request.protocol, None)
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)
            self._idle[request.protocol] = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self._runner.setup()
        accepting = asyncio.create_task(self._accept(), name=f"listener {self._name}")
        try:
            yield
        finally:
            await kit.tasks.end(accepting)
            self._socket.close()
            for handshake in self._handshakes:
                handshake.cancel()
            await asyncio.shield(self._runner.cleanup())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # A socket with waiting connections gives one at once: others have their turn between.
            await asyncio.sleep(0)
            if self._tls is not None and not self._handshake_rate.take():
                await asyncio.sleep(1 / HANDSHAKES_PER_SECOND)
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptors, no memory, or the client has left already
                if error.errno != errno.ECONNABORTED:
                    log.warning("cannot accept", listener=self._name, error=str(error))
                    await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if not self._has_room():
                connection.close()
                continue
            task = asyncio.create_task(self._begin(connection), name=f"accept {self._name}")
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def _has_room(self) -> bool:
        """Makes room if need be: the oldest handshake ends, else the longest idle connection."""
        assert self._runner.server is not None
        known = set(self._runner.server.connections)
        self._idle = {each: None for each in self._idle if each in known}
        if len(known) + len(self._handshakes) < MOST_CONNECTIONS:
            return True
        if len(self._handshakes) >= MOST_CONNECTIONS // 2:
            oldest = next(iter(self._handshakes))
            oldest.cancel()
            del self._handshakes[oldest]
            return True
        for connection in self._idle:
            del self._idle[connection]
            if connection.transport is not None:
                connection.transport.abort()
            return True
        return False

    async def _begin(self, connection: socket.socket) -> None:
        assert self._runner.server is not None
        if self._tls is not None and self._tls.value is None:
            connection.close()  # there is no certificate yet
            return
        tls = None if self._tls is None or self._tls.value is None else self._tls.value.context
        try:
            _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
                self._runner.server,
                connection,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
            )
            if protocol not in self._busy:  # it may have asked already
                self._idle[protocol] = None
        except (OSError, ssl.SSLError):
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise


# --- the unix socket


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user that opened the connection, from the kernel."""
    size = struct.calcsize("3i")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", packed)
    return pid, uid


def _socket_role(admin: AdminSettings, uid: int) -> Role | None:
    if uid in (0, os.geteuid()):
        return Role.DANGEROUS
    # The socket's mode let it in: it is in the group. Without a group it inherited root's
    # descriptor.
    return admin.group_role if admin.group is not None else None


def _socket_caller(admin: AdminSettings) -> server.Identify:
    async def caller(request: web.Request) -> access.Caller:
        assert request.transport is not None
        pid, uid = _peer(request.transport.get_extra_info("socket"))
        name = f"root, pid {pid}" if uid == 0 else f"uid {uid}, pid {pid}"
        return access.Caller(name, _socket_role(admin, uid), f"uid {uid}")

    return caller


def living(path: Path) -> bool:
    """Whether somebody listens on the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(bytes(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _admitted(state: State) -> tuple[AdminSettings, int | None]:
    """The settings, and the group's number. A group that is not there is left out of both.

    That harms its members alone: root keeps the socket, and a node keeps its agent.
    """
    admin, found = state.settings.admin, []
    try:
        gid = None if admin.group is None else grp.getgrnam(admin.group).gr_gid
    except KeyError:
        gid = None
        found.append(
            kit.findings.Finding(
                id="admin.group",
                rule="unknown-group",
                severity=kit.findings.Severity.WARNING,
                subject=str(admin.group),
                message=f"admin.group {admin.group}: there is no such group here; the socket is "
                "for root alone",
                advice="make the group, or correct the name, then restart the agent; in a pod "
                "groups are the image's: leave admin.group out (docs/security.md)",
            )
        )
        admin = admin.model_copy(update={"group": None})
    state.judge("admin.group", found)
    return admin, gid


def refuse_place(path: Path) -> None:
    """HostError where no socket of ours may be. Its directory is there. OSError.

    Who may replace the socket's name could have us change the mode of another file.
    """
    what, folder = f"admin.socket {path}", path.parent
    found = folder.stat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if writable or found.st_uid not in (0, os.geteuid()):
        raise kit.errors.HostError(
            what,
            f"its directory {folder} belongs to uid {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}: others could replace the socket",
            "give the directory to root with mode 0755, or name a socket in another one",
        )
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise kit.errors.HostError(
            what, "something that is not a socket is there", "remove it, or name another"
        )


def bind_unix(path: Path, gid: int | None) -> socket.socket:
    """A listening socket at ``path``, for root alone or also for the group ``gid``.

    Replaces the socket of an agent that has ended. HostError or RefusedError says why not.
    """
    what = f"admin.socket {path}"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        refuse_place(path)
        if os.path.lexists(path):
            if living(path):
                raise kit.errors.RefusedError(
                    what, "another agent listens there", "stop that agent, or name another"
                )
            path.unlink()
        # The mode of the unbound socket becomes that of its name: nobody else can connect before
        # the group has it.
        os.fchmod(listening.fileno(), 0o600)
        listening.bind(bytes(path))
        if gid is not None:
            os.chown(path, -1, gid)
            path.chmod(0o660)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise kit.errors.HostError(
            what, f"cannot listen there ({error.strerror})", "choose another path"
        ) from error
    except kit.errors.AgentError:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def _unix(path: Path, gid: int | None) -> Iterator[socket.socket]:
    listening = bind_unix(path, gid)
    ours = path.lstat().st_ino
    try:
        yield listening
    finally:
        listening.close()
        with contextlib.suppress(OSError):
            if path.lstat().st_ino == ours:
                path.unlink()


# --- TCP


def address_refused(setting: str, listen: str, error: OSError) -> kit.errors.HostError:
    return kit.errors.HostError(
        f"{setting} {listen}",
        f"cannot listen there ({error.strerror})",
        "choose another address, or end what uses it",
    )


async def _bind_tcp(setting: str, listen: str) -> socket.socket:
    host, port = address(listen)
    try:
        (family, _, _, _, where), *_ = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise address_refused(setting, listen, error) from error
    listening.setblocking(False)
    return listening


def _token_caller(
    known: rotation.WatchedFiles[rotation.Known] | None, asked: reviews.Reviews | None
) -> server.Identify:
    async def caller(request: web.Request) -> access.Caller:
        peer = request.remote or "?"
        token = rotation.bearer(request.headers.get("Authorization", ""))
        found, problem = None, ""
        try:
            found = rotation.whose(None if known is None else known.value, token)
            if found is None and token and asked is not None:
                found = await asked.caller(token, peer)
        except reviews.ReviewError as error:
            problem = str(error)
        except Exception as error:  # a token that nobody thought of: its limits hold all the same
            problem = f"the token cannot be checked ({type(error).__name__})"
        if found is None or found.role is None:
            name = "unknown caller" if found is None else found.name
            authenticated = found is not None and found.authenticated
            return access.Caller(
                f"{name} at {peer}", None, f"unknown {peer}", problem, authenticated
            )
        return dataclasses.replace(found, name=f"{found.name} at {peer}")

    return caller


def _note_shut(state: State, error: kit.errors.HostError) -> None:
    """The API over TCP does not get its address. The node keeps its agent all the same."""
    found = kit.findings.Finding(
        id="admin.api.listen",
        rule="address-unavailable",
        severity=kit.findings.Severity.WARNING,
        subject=error.thing,
        message=f"{error.thing}: {error.cause}; the API over TCP is shut",
        advice=f"{error.remedy}, then restart the agent",
    )
    state.judge("admin.api.listen", [found])


def _note_unrecorded(state: State, why: str) -> None:
    found = kit.findings.Finding(
        id="api-record",
        rule="api-calls-not-recorded",
        severity=kit.findings.Severity.WARNING,
        subject="api.log",
        message=f"who changed what by the API is in the agent's log only: {why}",
        advice="make the file writable, or free its disk; the next lines come by themselves",
    )
    state.judge("api.log", [], [found] if why else [])


# --- all of them


@contextlib.asynccontextmanager
async def serving(state: State) -> AsyncIterator[None]:
    """Listen while the block runs. HostError when socket or metrics cannot have their address."""
    admin, gid = _admitted(state)
    calls = access.CallLog(state.settings.state_dir, functools.partial(_note_unrecorded, state))
    async with contextlib.AsyncExitStack() as stack:
        door = server.Door(_socket_caller(admin), calls)
        listening = stack.enter_context(_unix(admin.socket, gid))
        process = own.Own(state)
        app = server.application(state, door, process)
        listeners = [_Listener("socket", app, listening)]
        if admin.metrics is not None:
            host, _ = address(admin.metrics)
            local = is_loopback(host)
            hosts = access.Hosts(host, admin.names) if local else None
            app = server.metrics_application(state, hosts, local, process)
            listening = stack.enter_context(await _bind_tcp("admin.metrics", admin.metrics))
            listeners.append(_Listener("metrics", app, listening))
        if admin.api is not None:
            host, _ = address(admin.api.listen)
            certificate = rotation.Certificate(admin.api)
            files: list[rotation.WatchedFiles[Any]] = [certificate]
            known = asked = None
            also = []
            if admin.api.tokens_file is not None:
                known = rotation.tokens(admin.api.tokens_file)
                files.append(known)
            if admin.api.kubernetes is not None:
                asked = reviews.Reviews(admin.api.kubernetes, state.settings.this_node)
                stack.push_async_callback(asked.close)
                also.append(asked.finding)
            await stack.enter_async_context(rotation.following(state, files, also))
            # Its streams are counted apart: callers over the network take no place from root.
            door = server.Door(_token_caller(known, asked), calls, access.Hosts(host, admin.names))
            app = server.application(state, door, process)
            try:
                listening = stack.enter_context(
                    await _bind_tcp("admin.api.listen", admin.api.listen)
                )
            except kit.errors.HostError as error:
                _note_shut(state, error)
            else:
                listeners.append(_Listener("api", app, listening, certificate))
        writer = asyncio.create_task(calls.write(), name="api.log")
        stack.callback(writer.cancel)
        stack.push_async_callback(calls.flush)
        for listener in listeners:
            await stack.enter_async_context(listener.serving())
        yield
