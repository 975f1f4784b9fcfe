"""The HTTP applications: the admin API, and what the metrics listener serves.

The API has the process's own routes (``nodeagent.api.own``) and every room's. A room's handler
(``kit.room.Route``) takes a plain request and returns plain JSON; here its errors become status
codes, its streams NDJSON, and its role is enforced.

A request passes, in this order: a limit on the time that its answer may take to be sent, the
conversion of errors, the caller's role, the limit on changing calls, the check of its texts, and a
limit on the time of the handler. ``nodeagent.api.listeners`` decides where all this is served.
"""

import asyncio
import contextlib
import errno
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import structlog
from aiohttp import HttpVersion11, web

import kit.errors
import kit.redact
from kit.room import Answer, Request, Role, Route, Stream
from nodeagent import STARTING, groups, rooms
from nodeagent.api import access, own
from nodeagent.state import RunningRoom, State

log = structlog.get_logger("agent")

LONGEST_BODY = 256 * 1024
LONGEST_NAME = 255  # of a placeholder in a path
LONGEST_TEXT = 4096  # of a query's value
BODY_SECONDS = 10.0
# Below the command line's own limit (nodeagent.commands.client.ANSWER_SECONDS).
HANDLER_SECONDS = 55.0
WRITE_SECONDS = 20.0  # one answer, or one line of a stream
# Streams send something at least every five seconds (``kit.room.HEARTBEAT_SECONDS``).
ASK_AGAIN_SECONDS = 5.0  # whether the caller of a stream may still read
NO_ANSWER = 0  # in place of a status in the record of calls
LONGEST_NOTE = 300  # of a path or a text in the record of calls

# Strangers on the API over TCP get so many refusals a second at once; each one more waits. So does
# a caller who makes too many changing calls.
REQUESTS_PER_SECOND = 200.0
REQUESTS_AT_ONCE = 400
WAIT_SECONDS = 0.5

_CALLER = web.RequestKey("caller", access.Caller)
_SENT = web.RequestKey("sent", dict)  # what the record of calls shows of the body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Identify = Callable[[web.Request], Awaitable[access.Caller]]

_STATUS = {
    kit.errors.NotFoundError: 404,
    kit.errors.InUseError: 409,
    kit.errors.RefusedError: 409,
    kit.errors.SettingsError: 400,
    kit.errors.SourceError: 502,
    kit.errors.DegradedError: 503,
}


_FREE = "free some space on that disk, then try again"
_LOOK = "see the kernel log and the mount options of that disk, then try again"
# A disk that takes nothing is no fault of the agent: status, and what to do.
_DISK = {
    errno.ENOSPC: (507, _FREE),
    errno.EDQUOT: (507, _FREE),
    errno.EROFS: (503, _LOOK),
    errno.EIO: (503, _LOOK),
}


@dataclass(frozen=True)
class Door:
    """How one listener of the API knows its callers."""

    caller: Identify
    calls: access.CallLog
    hosts: access.Hosts | None = None  # None: no web page can reach it under any name
    streams: access.Streams = field(default_factory=access.Streams)


# --- errors, limits, and who may call what


def _refuse_other_hosts(request: web.Request, hosts: access.Hosts | None) -> None:
    if hosts is not None and not hosts.admits(request.headers.get("Host", "")):
        raise web.HTTPMisdirectedRequest(
            reason="the Host header names another host (setting admin.names)"
        )


def _error_body(error: kit.errors.AgentError) -> dict[str, Any]:
    return {
        "error": {
            "message": str(error),
            "thing": error.thing,
            "cause": error.cause,
            "remedy": error.remedy,
            "exit_code": error.exit_code,
        }
    }


@web.middleware
async def _send_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Also sends the answer: aiohttp would wait for ever for a client that does not read it."""
    response = await handler(request)
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        _abort(request)
    except ConnectionError:
        pass  # the client has left
    return response


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except kit.errors.AgentError as error:
        return web.json_response(_error_body(error), status=_STATUS.get(type(error), 500))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        shown = kit.errors.AgentError(_plain(request.path), error.reason, "see /openapi.json")
        kept = {k: error.headers[k] for k in ("Allow", "Retry-After") if k in error.headers}
        return web.json_response(_error_body(shown), status=error.status, headers=kept)
    except ConnectionError:
        raise  # the client has left
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _DISK:
            return _disk_failed(request, error)
        log.exception("request failed", method=request.method, path=_plain(request.path))
        shown = kit.errors.AgentError(_plain(request.path), "the agent failed", "see its log")
        return web.json_response(_error_body(shown), status=500)


def _disk_failed(request: web.Request, error: OSError) -> web.Response:
    status, remedy = _DISK[error.errno or 0]
    thing = _plain(str(error.filename or request.path))
    shown = kit.errors.HostError(thing, error.strerror or str(error), remedy)
    log.error("request failed", method=request.method, path=_plain(request.path), why=str(shown))
    return web.json_response(_error_body(shown), status=status)


def _plain(text: str) -> str:
    """``text`` for messages: bounded, without characters that are none."""
    return text.encode("utf-8", "backslashreplace").decode()[:LONGEST_NOTE]


def _noted(value: Any) -> Any:
    """A field of a body for the record of calls. Of a long one both ends are shown: a path can be
    made long with what means nothing."""
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > LONGEST_NOTE:
        # Secrets first: half of one would not be known as one.
        text = kit.redact.text(_ends(text, LONGEST_TEXT))
    return _plain(_ends(text, LONGEST_NOTE))


def _ends(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


class _Guard:
    """Refuses who may not; limits and records changing calls. ``roles``: by handler."""

    def __init__(self, door: Door, roles: Mapping[Any, Role]) -> None:
        self._door, self._roles = door, roles
        self._changes = access.Rate()
        self._pace = access.Rate(REQUESTS_PER_SECOND, REQUESTS_AT_ONCE)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        begun = time.monotonic()
        needed, caller = self._role(request), await self._door.caller(request)
        request[_CALLER] = caller

        async def call(request: web.Request) -> web.StreamResponse:
            self._check(request, caller, needed)
            return await handler(request)

        if caller.role is None:
            await self._wait("strangers")
        status = NO_ANSWER  # the agent stops, or the client has left
        try:
            response = await _errors_as_json(request, call)
            status = response.status
            if status == web.HTTPTooManyRequests.status_code:
                await self._wait(caller.key)
            return response
        finally:
            self._note(request, caller, needed, status, begun)

    def _role(self, request: web.Request) -> Role:
        # A path that does not exist is judged by its method.
        read = request.method in ("GET", "HEAD")
        return self._roles.get(request.match_info.handler, Role.READ if read else Role.OPERATE)

    async def _wait(self, kind: str) -> None:
        """Callers of one kind do not wait for those of another."""
        if not self._pace.of(kind).take():
            await asyncio.sleep(WAIT_SECONDS)

    def _check(self, request: web.Request, caller: access.Caller, needed: Role) -> None:
        hosts = self._door.hosts
        _refuse_other_hosts(request, hosts)
        # A page opened in a browser on this node could send requests here; it cannot avoid
        # sending its origin with them.
        if (needed is not Role.READ or hosts is not None) and (
            "Origin" in request.headers or "Sec-Fetch-Site" in request.headers
        ):
            raise web.HTTPForbidden(reason="requests from web pages are refused")
        if caller.problem:
            raise web.HTTPServiceUnavailable(reason=caller.problem, headers={"Retry-After": "5"})
        if caller.role is None and caller.authenticated:
            raise web.HTTPForbidden(reason=f"role {needed} is needed, {caller.name} has no role")
        if caller.role is None:
            raise web.HTTPUnauthorized(reason="a bearer token is needed (admin.api)")
        # Before the role: calls that a caller may not make cost as much as others.
        if needed is not Role.READ and not self._changes.of(caller.key).take():
            raise web.HTTPTooManyRequests(
                reason="too many changing calls", headers={"Retry-After": "1"}
            )
        if not caller.role.includes(needed):
            raise web.HTTPForbidden(
                reason=f"role {needed} is needed, {caller.name} is {caller.role}"
            )

    def _note(
        self,
        request: web.Request,
        caller: access.Caller,
        needed: Role,
        status: int,
        begun: float,
    ) -> None:
        if needed is Role.READ and caller.role is not None:
            return
        self._door.calls.note(
            caller,
            # A handler that refuses has changed nothing; one that failed may have. A stranger comes
            # to none, also while the cluster cannot be asked about him (503).
            changed=caller.role is not None and not 400 <= status < 500,
            method=_plain(request.method),
            path=_plain(request.path),
            role=str(needed),
            result=status,
            milliseconds=round((time.monotonic() - begun) * 1000),
            **({"sent": request[_SENT]} if _SENT in request else {}),
        )


# --- routes of the rooms


def _refuse(cause: str) -> NoReturn:
    raise kit.errors.SettingsError("the request", cause, "see /openapi.json")


def _names(request: web.Request) -> dict[str, str]:
    """The path's placeholders. ``%2F`` and ``%2E`` are decoded in them, so that a room could take
    one for a path."""
    found = dict(request.match_info)
    for value in found.values():
        if (
            not value.isprintable()
            or "/" in value
            or value in (".", "..")
            or len(value) > LONGEST_NAME
        ):
            _refuse(f"{_plain(value)!r} is not a name: it has no '/', is no '.' and not too long")
    return found


def _query(request: web.Request) -> dict[str, str]:
    found = dict(request.query)
    for name, value in found.items():
        if len(value) > LONGEST_TEXT or not _is_text(value):
            _refuse(f"{_plain(name)!r} in its query is too long or not a text")
    return found


def _is_text(value: str) -> bool:
    return "\0" not in value and not re.search("[\ud800-\udfff]", value)


def _all_texts(value: Any) -> bool:
    if isinstance(value, str):
        return _is_text(value)
    if isinstance(value, dict):
        return all(_is_text(key) and _all_texts(inner) for key, inner in value.items())
    return not isinstance(value, list) or all(map(_all_texts, value))


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


async def _body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; {} without a body."""
    if request.method in ("GET", "HEAD") or not request.can_read_body:
        return {}
    try:
        async with asyncio.timeout(BODY_SECONDS):
            sent = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            reason=f"the body did not arrive within {BODY_SECONDS:g}s"
        ) from None
    try:
        body = json.loads(sent, parse_constant=_no_number)
        good = _all_texts(body)
    except (ValueError, RecursionError):
        _refuse("its body is not JSON")
    if not isinstance(body, dict):
        _refuse("its body is not a JSON object")
    if not good:
        _refuse("its body has a text with NUL or half a character")
    request[_SENT] = {_plain(key): _noted(value) for key, value in list(body.items())[:8]}
    return body


async def _within(call: Awaitable[Any], changes: bool, what: str) -> Any:
    """The handler's answer. A change that takes too long is not broken off half way.

    ``what``: the request, for the log.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=HANDLER_SECONDS)
    except asyncio.CancelledError:  # the agent stops
        task.cancel()
        raise
    if task.done():
        return task.result()
    if not changes:
        task.cancel()
        raise web.HTTPGatewayTimeout(reason=f"no answer within {HANDLER_SECONDS:g}s")
    task.add_done_callback(lambda task: _note_late_end(task, what))
    raise web.HTTPGatewayTimeout(
        reason=f"it takes longer than {HANDLER_SECONDS:g}s and continues; its end is logged"
    )


def _note_late_end(task: asyncio.Future[Any], what: str) -> None:
    error = None if task.cancelled() else task.exception()
    log.info("api call ended late", call=what, error=str(error or ""), cancelled=task.cancelled())


def _handler(route: Route, running: RunningRoom, door: Door) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if running.trouble is not None and not running.started:
            raise kit.errors.DegradedError(
                running.room.name, f"it does not run ({running.trouble})", "it is tried again"
            )
        asked = Request(
            _names(request), _query(request), await _body(request), request[_CALLER].name
        )
        changes = route.role is not Role.READ
        try:
            what = f"{route.method} {_plain(request.path)}"
            answer = await _within(route.handler(running.component, asked), changes, what)
        except kit.errors.NotFoundError as error:
            if running.starting:  # what the settings have may come yet
                raise kit.errors.DegradedError(
                    error.thing, f"{running.room.name} is starting", "try again in a moment"
                ) from error
            raise
        except ConnectionError as error:  # to what the room talks to; the client may well be there
            raise RuntimeError(f"{what}: {error}") from error
        if isinstance(answer, Stream):
            return await _send(request, answer, door)
        if not isinstance(answer, Answer):
            answer = Answer(answer)
        # What the settings have may come yet: a short list may not be the whole one.
        headers = {STARTING: running.room.name} if running.starting else None
        body = msgspec.to_builtins(answer.body)
        return web.json_response(body, status=answer.status, headers=headers)

    return handle


async def _send(request: web.Request, stream: Stream, door: Door) -> web.StreamResponse:
    with door.streams.one(request[_CALLER].key) as refused:
        if refused:
            await stream.items.aclose()
            raise web.HTTPTooManyRequests(reason=refused, headers={"Retry-After": "5"})
        return await _write_lines(request, stream, door.caller)


async def _write_lines(
    request: web.Request, stream: Stream, identify: Identify
) -> web.StreamResponse:
    """Ends when ``identify`` does not know the caller any more, or not as one who may read."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    asked = time.monotonic()
    async with contextlib.aclosing(stream.items) as items:
        async for item in items:
            if request.transport is None:
                break  # the client has left
            if time.monotonic() - asked >= ASK_AGAIN_SECONDS:
                role, asked = (await identify(request)).role, time.monotonic()
                if role is None or not role.includes(Role.READ):
                    break
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    line = json.dumps(msgspec.to_builtins(item))
                    await response.write(line.encode() + b"\n")
            except ConnectionResetError:
                break  # the client has left
            except TimeoutError:
                _abort(request)
                break
    return response


def application(state: State, door: Door, process: own.Own | None = None) -> web.Application:
    """The whole admin API: the process's routes and those of each running room.

    ``process``: what other listeners show too.
    """
    roles: dict[Any, Role] = {}
    app = web.Application(
        middlewares=[_send_in_time, _Guard(door, roles).middleware], client_max_size=LONGEST_BODY
    )

    async def follow_events(request: web.Request) -> web.StreamResponse:
        return await _send(request, Stream(state.findings.journal.follow()), door)

    # A live page is for browsers, which the API refuses.
    for own_route in (process or own.Own(state)).routes():
        if own_route.path != "/live":
            _add(app, "GET", own_route.path, own_route.handler)
    _add(app, "GET", "/v1/events/follow", follow_events)
    for running in state.running:
        for route in running.room.routes():
            handler = _handler(route, running, door)
            roles[handler] = route.role
            _add(app, route.method, route.path, handler)
    on = {each.room.name for each in state.running}
    for room in rooms.ROOMS:
        for head in room.heads if room.name not in on else ():
            _add(app, "*", f"/v1/{head}{{rest:(/.*)?}}", _off(room))
    return app


async def _heed_no_expectation(request: web.Request) -> None:
    """aiohttp would answer 417 before anybody knows who calls. A client that
    waits for "100 Continue" gets it."""
    waits = request.headers.get("Expect", "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # no byte of the answer is sent yet


def _add(app: web.Application, method: str, path: str, handler: Handler) -> None:
    methods = ("GET", "HEAD") if method == "GET" else (method,)
    for each in methods:
        app.router.add_route(each, path, handler, expect_handler=_heed_no_expectation)


def _off(room: kit.room.Room) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        raise kit.errors.RefusedError(
            f"nodeagent {groups.of(room.name)[0].name}",
            f"this is off on this node: the settings have no section '{room.name}'",
            "add the section, then restart the agent",
        )

    return handle


def _elsewhere(state: State) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        raise kit.errors.NotFoundError(
            _plain(request.path),
            "these are the metrics, not the admin API",
            f"use --api unix://{state.settings.admin.socket} on the node (the default)",
        )

    return handle


def metrics_application(
    state: State, hosts: access.Hosts | None, with_page: bool, process: own.Own | None = None
) -> web.Application:
    """Figures and probes for whoever reaches the metrics listener. It cannot change anything."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        _refuse_other_hosts(request, hosts)
        return await handler(request)

    served = {"/metrics", "/healthz", "/readyz"}
    if with_page:
        served |= {"/", "/live", "/runbook"}
    app = web.Application(
        middlewares=[_send_in_time, _errors_as_json, check], client_max_size=LONGEST_BODY
    )
    for route in (process or own.Own(state)).routes():
        if route.path in served:
            _add(app, "GET", route.path, route.handler)
    for path in ("/v1/{rest:.*}", "/openapi.json"):
        _add(app, "*", path, _elsewhere(state))
    return app
