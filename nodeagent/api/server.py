"""The admin API server: the only module that knows the HTTP server library.

It serves the process's own routes (probes, metrics, findings, the OpenAPI document, the status
page) and every room's. A room's handler (``kit.room.Route``) takes a plain request and returns
plain JSON; here its errors become status codes, its streams NDJSON, and its role is enforced.
"""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import prometheus_client
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import kit.errors
from kit.room import Answer, Component, Request, Role, Route, Stream
from nodeagent import page
from nodeagent.api import openapi
from nodeagent.state import State

MOST_STREAMS = 32  # of one route at a time
LONGEST_BODY = 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {
    kit.errors.NotFoundError: 404,
    kit.errors.InUseError: 409,
    kit.errors.RefusedError: 409,
    kit.errors.SettingsError: 400,
    kit.errors.SourceError: 502,
}


class _Collector(Collector):
    """Asks every component when Prometheus asks us."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily(
            "nodeagent_component_ready", "1 while the component is ready.", labels=["component"]
        )
        for component in self._state.components:
            ready.add_metric([component.name], 1 if component.health().ready else 0)
            yield from component.metrics()
        yield ready
        yield from self._state.findings.metrics()


# --- errors, and who may change things


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
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except kit.errors.AgentError as error:
        return web.json_response(_error_body(error), status=_STATUS.get(type(error), 500))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        remedy = "see /openapi.json"
        if error.status == 404:
            remedy += "; a part of the agent that the settings leave out has no paths"
        shown = kit.errors.AgentError(request.path, error.reason, remedy)
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response(_error_body(shown), status=error.status, headers=headers)


def _guard(state: State, roles: dict[Any, Role]) -> Any:
    """Lets everybody read. Other roles: not a web page, and with the token where one is set."""

    def role(request: web.Request) -> Role:
        # A path that does not exist is judged by its method.
        read = request.method in ("GET", "HEAD")
        return roles.get(request.match_info.handler, Role.READ if read else Role.OPERATE)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if role(request) is not Role.READ:
            # A page opened in a browser on this node could send requests here; it cannot avoid
            # sending its origin with them.
            if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
                raise web.HTTPForbidden(reason="requests from web pages are refused")
            token_file = state.settings.admin.token_file
            if token_file is not None:
                expected = (await asyncio.to_thread(token_file.read_bytes)).strip()
                given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
                if not expected or not hmac.compare_digest(given, expected):
                    raise web.HTTPUnauthorized(reason="a bearer token is needed (admin.token_file)")
        return await handler(request)

    return guard


# --- routes of the rooms


async def _body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; {} without a body."""
    if request.method in ("GET", "HEAD") or not request.can_read_body:
        return {}
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise kit.errors.SettingsError(
            "the request", "its body is not JSON", "send a JSON object"
        ) from error
    if not isinstance(body, dict):
        raise kit.errors.SettingsError(
            "the request", "its body is not a JSON object", "send a JSON object"
        )
    return body


def _handler(route: Route, component: Component[Any]) -> Handler:
    streams = asyncio.Semaphore(MOST_STREAMS)

    async def handle(request: web.Request) -> web.StreamResponse:
        asked = Request(dict(request.match_info), dict(request.query), await _body(request))
        answer = await route.handler(component, asked)
        if isinstance(answer, Stream):
            if streams.locked():
                raise web.HTTPServiceUnavailable(reason=f"{MOST_STREAMS} streams are open already")
            async with streams:
                return await _send(request, answer)
        if isinstance(answer, Answer):
            return web.json_response(dict(answer.body), status=answer.status)
        return web.json_response(dict(answer))

    return handle


async def _send(request: web.Request, stream: Stream) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    async with contextlib.aclosing(stream.items) as items:
        async for item in items:
            try:
                await response.write(json.dumps(item).encode() + b"\n")
            except ConnectionResetError:
                break  # the client has left
    return response


# --- routes of the process


def _own_routes(state: State) -> list[web.RouteDef]:
    async def healthz(_: web.Request) -> web.Response:
        """200 while every component's work loop advances, else 503 with the reasons."""
        dead = [c.name for c in state.components if not c.health().alive]
        reasons = [f"{name}: its work loop does not advance" for name in dead]
        body = {"alive": not dead, "reasons": reasons}
        return web.json_response(body, status=503 if dead else 200)

    async def readyz(_: web.Request) -> web.Response:
        """200 when every component does its work, else 503 with the reasons."""
        states = {c.name: c.health() for c in state.components}
        reasons = [f"{name}: {reason}" for name, h in states.items() for reason in h.reasons]
        if state.config_error:
            reasons.append(f"settings: {state.config_error}")
        ready = all(h.ready for h in states.values())
        body = {"ready": ready, "reasons": reasons, "needs_restart": state.refused}
        return web.json_response(body, status=200 if ready else 503)

    async def findings(_: web.Request) -> web.Response:
        found = [
            {**vars(finding), "severity": str(finding.severity), "evidence": dict(finding.evidence)}
            for finding in state.findings.current()
        ]
        return web.json_response({"findings": found})

    async def openapi_json(_: web.Request) -> web.Response:
        return web.json_response(openapi.document())

    async def status_page(_: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return web.Response(text=page.render(state), content_type="text/html", headers=headers)

    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(state))
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    return [
        web.get("/", status_page),
        web.get("/openapi.json", openapi_json),
        web.get("/metrics", make_aiohttp_handler(registry)),
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/v1/findings", findings),
    ]


def application(state: State) -> web.Application:
    """The whole admin API: the process's routes and those of each running room."""
    roles: dict[Any, Role] = {}
    app = web.Application(
        middlewares=[_errors_as_json, _guard(state, roles)], client_max_size=LONGEST_BODY
    )
    app.add_routes(_own_routes(state))
    for room, component in state.running:
        for route in room.routes():
            handler = _handler(route, component)
            roles[handler] = route.role
            if route.method == "GET":
                app.router.add_get(route.path, handler)  # answers HEAD too
            else:
                app.router.add_route(route.method, route.path, handler)
    return app


@contextlib.asynccontextmanager
async def serving(state: State) -> AsyncIterator[None]:
    """Serve while the block runs. HostError when the address cannot be had."""
    admin = state.settings.admin
    runner = web.AppRunner(application(state), access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, admin.host, admin.port).start()
        except OSError as error:
            raise kit.errors.HostError(
                f"admin.listen {admin.listen}",
                f"cannot listen there ({error.strerror})",
                "choose another address, or end what uses it",
            ) from error
        yield
    finally:
        await asyncio.shield(runner.cleanup())
