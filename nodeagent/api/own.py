"""The process's own routes: probes, figures, what is wrong, what happened, the status page.

They work when no room does. ``nodeagent.api.server`` decides who may call them.
"""

import asyncio
import importlib.resources
import json
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from kit.room import HEARTBEAT_SECONDS
from nodeagent.api import access, figures
from nodeagent.shown import overview, page
from nodeagent.state import State

# scripts/openapi.py makes it of what the routes return and of each part's openapi.yaml.
OPENAPI = importlib.resources.files("nodeagent.api") / "openapi.json"

LOOK_SECONDS = 1.0  # how often a live page is compared with what it shows
WRITE_SECONDS = 20.0  # one message to a live page
_HEADERS = {
    "Content-Security-Policy": page.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Own:
    """One for all listeners, so that what they show is made once."""

    def __init__(self, state: State) -> None:
        self._state, self._held = state, overview.HeldOverview(state)
        self._live_pages = access.Streams()
        self._figures = figures.HeldFigures(figures.registry(state))
        self._rendered: tuple[overview.Overview | None, str] = None, ""  # the page, and of what

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._status_page),
            web.get("/live", self._live),
            web.get("/runbook", self._runbook_page),
            web.get("/openapi.json", self._openapi),
            web.get("/metrics", self._metrics),
            web.get("/healthz", self._healthz),
            web.get("/readyz", self._readyz),
            web.get("/v1/status", self._status),
            web.get("/v1/events", self._events),
            web.get("/v1/findings", self._findings),
        ]

    async def _metrics(self, request: web.Request) -> web.Response:
        accept, encodings = (
            ",".join(request.headers.getall(name, [])) for name in ("Accept", "Accept-Encoding")
        )
        headers, body = self._figures.text(accept, encodings)
        return web.Response(body=body, headers=headers)

    async def _healthz(self, _: web.Request) -> web.Response:
        """200 while the process's own loop runs: a stuck one answers nothing.

        A sick room is a matter of /readyz: a restart of the process would not heal it.
        """
        return web.json_response({"alive": True, "reasons": []})

    async def _readyz(self, _: web.Request) -> web.Response:
        """200 when every component does its work, else 503 with the reasons."""
        state = self._state
        states = {each.room.name: each.health() for each in state.running}
        reasons = [f"{name}: {reason}" for name, h in states.items() for reason in h.reasons]
        if state.config_error:
            reasons.append(f"settings: {state.config_error}")
        reasons += [f"{part}: {why}" for part, found in state.degraded.items() for why in found]
        ready = all(h.ready for h in states.values())
        body = {
            "ready": ready,
            "degraded": bool(reasons),
            "reasons": reasons,
            "needs_restart": state.refused,
        }
        return web.json_response(body, status=200 if ready else 503)

    async def _findings(self, _: web.Request) -> web.Response:
        found = msgspec.to_builtins(self._state.findings.current())
        return web.json_response({"findings": found})

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(body=self._held.answer(), content_type="application/json")

    async def _events(self, _: web.Request) -> web.Response:
        known = msgspec.to_builtins(self._state.findings.journal.after())
        return web.json_response({"events": known})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(body=OPENAPI.read_bytes(), content_type="application/json")

    async def _status_page(self, _: web.Request) -> web.Response:
        now = self._held.now()
        if self._rendered[0] is not now:
            self._rendered = now, page.render(now)
        return _html(self._rendered[1])

    async def _runbook_page(self, _: web.Request) -> web.Response:
        return _html(page.runbook())

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: the page's content whenever it has changed."""
        with self._live_pages.one(f"live page {request.remote}") as refused:
            if refused:
                raise web.HTTPTooManyRequests(reason=refused, headers={"Retry-After": "5"})
            response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for message in _messages(self._held):
                try:
                    async with asyncio.timeout(WRITE_SECONDS):
                        await response.write(message)
                except (ConnectionResetError, TimeoutError):
                    break  # the reader has left, or does not read
            if request.transport is not None:
                request.transport.abort()
            return response


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html", headers=_HEADERS)


async def _messages(held: overview.HeldOverview) -> AsyncIterator[bytes]:
    last, idle = "", 0.0
    while True:
        content = page.content(held.now())
        if content != last:
            last, idle = content, 0.0
            yield b"data: " + json.dumps(content).encode() + b"\n\n"
        elif idle >= HEARTBEAT_SECONDS:
            idle = 0.0
            yield b": alive\n\n"  # a comment; finds out that the reader has left
        await asyncio.sleep(LOOK_SECONDS)
        idle += LOOK_SECONDS
