"""The admin API server: routing, errors as JSON, who may change things, probes and metrics."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
import structlog
from aiohttp import web
from prometheus_client.aiohttp import make_aiohttp_handler
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import cache.component
import kit.errors
from nodeagent.admin import datasets, images, openapi, page, volume_audit, volumes

if TYPE_CHECKING:
    from nodeagent.app import Agent

log = structlog.get_logger("admin")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS = {
    kit.errors.NotFoundError: 404,
    kit.errors.InUseError: 409,
    kit.errors.RefusedError: 409,
    kit.errors.SettingsError: 400,
    kit.errors.SourceError: 502,
}


class _AgentCollector(Collector):
    def __init__(self, agent: "Agent") -> None:
        self._agent = agent

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily(
            "nodeagent_component_ready", "1 while the component is ready.", labels=["component"]
        )
        for component in self._agent.components:
            ready.add_metric([component.name], 1 if component.health().ready else 0)
            yield from component.metrics()
        yield ready
        yield from self._agent.findings.metrics()


def error_body(error: kit.errors.AgentError) -> dict[str, Any]:
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
        return web.json_response(error_body(error), status=_STATUS.get(type(error), 500))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        told = kit.errors.AgentError(request.path, error.reason, "see /openapi.json")
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response(error_body(told), status=error.status, headers=headers)


def _guard(token_file: Path | None) -> Any:
    """Who may change things: no web page in somebody's browser, and the token where one is set."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            # A page opened in a browser on this node could send requests here; it cannot avoid
            # sending its origin with them.
            if "Origin" in request.headers or "Sec-Fetch-Site" in request.headers:
                raise web.HTTPForbidden(reason="requests from web pages are not taken")
            if token_file is not None:
                expected = (await asyncio.to_thread(token_file.read_bytes)).strip()
                given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
                if not expected or not hmac.compare_digest(given, expected):
                    raise web.HTTPUnauthorized(reason="a bearer token is needed (admin.token_file)")
        return await handler(request)

    return guard


def _probes(agent: "Agent") -> list[web.RouteDef]:
    async def healthz(_: web.Request) -> web.Response:
        """200 while every component's work loop advances, 503 with the reasons otherwise."""
        dead = [c.name for c in agent.components if not c.health().alive]
        body = {"alive": not dead, "reasons": [f"{name}: its work loop stands" for name in dead]}
        return web.json_response(body, status=503 if dead else 200)

    async def readyz(_: web.Request) -> web.Response:
        """200 when every component does what it is for, 503 with the reasons otherwise."""
        states = {c.name: c.health() for c in agent.components}
        reasons = [f"{name}: {reason}" for name, h in states.items() for reason in h.reasons]
        if agent.config_error:
            reasons.append(f"settings: {agent.config_error}")
        ready = all(h.ready for h in states.values())
        body = {"ready": ready, "reasons": reasons, "needs_restart": agent.refused}
        return web.json_response(body, status=200 if ready else 503)

    async def findings(_: web.Request) -> web.Response:
        """200: everything the audits find now."""
        found = [
            {**vars(finding), "severity": str(finding.severity), "evidence": dict(finding.evidence)}
            for finding in agent.findings.current()
        ]
        return web.json_response({"findings": found})

    return [
        web.get("/healthz", healthz),
        web.get("/readyz", readyz),
        web.get("/v1/findings", findings),
    ]


def application(agent: "Agent") -> web.Application:
    """The whole admin application. A room's routes are one module, joined here."""
    app = web.Application(
        middlewares=[_errors_as_json, _guard(agent.settings.admin.token_file)],
        client_max_size=1024 * 1024,
    )
    registry = prometheus_client.CollectorRegistry()
    registry.register(_AgentCollector(agent))
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    app.add_routes([web.get("/metrics", make_aiohttp_handler(registry))])
    app.add_routes(_probes(agent))
    app.add_routes(openapi.routes())
    app.add_routes(page.routes(agent))
    for component in agent.components:
        if isinstance(component, cache.component.Cache):
            app.add_routes(datasets.routes(component))
        elif component.name == "volumes":
            app.add_routes(volumes.routes(component))
            app.add_routes(volume_audit.routes(component))
        elif component.name == "preheat":
            app.add_routes(images.routes(component))
    return app


@contextlib.asynccontextmanager
async def serving(agent: "Agent") -> AsyncIterator[None]:
    """Serve while the block runs. HostError when the address cannot be had."""
    admin = agent.settings.admin
    runner = web.AppRunner(application(agent), access_log=None, shutdown_timeout=2.0)
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
