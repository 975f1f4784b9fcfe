"""Admin API of the dataset cache; paths and bodies are in openapi/datasets.yaml."""

import asyncio
import json
import time
from typing import Any

from aiohttp import web

import cache.component
import kit.errors
from cache import status
from cache.dataset import Dataset

STREAM_SECONDS = 0.5
# An unchanged stream still speaks, so that a client knows that it is there.
HEARTBEAT_SECONDS = 5.0
MOST_STREAMS = 32
MOST_FAILURES = 1000


async def body_of(request: web.Request, allowed: dict[str, type]) -> dict[str, Any]:
    """The JSON object of a request, only with the allowed keys; {} when there is no body."""
    if not request.can_read_body:
        return {}
    try:
        body = await request.json()
    except ValueError as error:
        raise kit.errors.SettingsError(
            "the request", "its body is not JSON", "send JSON"
        ) from error
    if not isinstance(body, dict):
        raise kit.errors.SettingsError("the request", "its body is no object", "send an object")
    for key, value in body.items():
        if key not in allowed or not isinstance(value, allowed[key]):
            known = ", ".join(f"{k} ({t.__name__})" for k, t in allowed.items()) or "none"
            raise kit.errors.SettingsError(
                "the request", f"{key!r} is not understood", f"fields are: {known}"
            )
    return body


def routes(component: cache.component.Cache) -> list[web.RouteDef]:
    streams = asyncio.Semaphore(MOST_STREAMS)

    def named(request: web.Request) -> Dataset:
        return component.get(request.match_info["name"])

    def shown(request: web.Request, code: int = 200) -> web.Response:
        return web.json_response(status.of_dataset(named(request)), status=code)

    async def listing(_: web.Request) -> web.Response:
        """200: every dataset, and what of the store belongs to none."""
        datasets = [status.of_dataset(component.datasets[n]) for n in sorted(component.datasets)]
        return web.json_response(
            {
                "datasets": datasets,
                "orphans": sorted({folder.split("/")[-2] for folder in component.orphans}),
                "store_bytes": component.used(),
                "budget_bytes": component.settings.budget,
            }
        )

    async def show(request: web.Request) -> web.Response:
        """200: one dataset. 404."""
        return shown(request)

    async def warm(request: web.Request) -> web.Response:
        """202: it is warmed, or was. 404."""
        await body_of(request, {})
        await component.jobs.warm(named(request))
        return shown(request, 202)

    async def pause(request: web.Request) -> web.Response:
        """202. 404, 409 when there is nothing to pause."""
        await body_of(request, {})
        await component.jobs.pause(named(request))
        return shown(request, 202)

    async def resume(request: web.Request) -> web.Response:
        """202. 404, 409 when it is not paused."""
        await body_of(request, {})
        await component.jobs.resume(named(request))
        return shown(request, 202)

    async def cancel(request: web.Request) -> web.Response:
        """202. 404, 409 when there is nothing to cancel."""
        await body_of(request, {})
        await component.jobs.cancel(named(request))
        return shown(request, 202)

    async def verify(request: web.Request) -> web.Response:
        """202: queued. 404, 409 when a pass is under way, 502 when the source does not answer."""
        body = await body_of(request, {"source": bool})
        await component.jobs.verify(named(request), source=body.get("source", False))
        return shown(request, 202)

    async def remove(request: web.Request) -> web.Response:
        """200: view and store are gone. 404, 409 saying who uses it."""
        name = request.match_info["name"]
        await component.remove(name)
        return web.json_response({"removed": name, "in_settings": name in component.datasets})

    async def failures(request: web.Request) -> web.Response:
        """200: entries that could not be copied, with reasons; ``next`` continues. 404."""
        limit = request.query.get("limit", "100")
        if not limit.isdigit() or not 1 <= int(limit) <= MOST_FAILURES:
            raise kit.errors.SettingsError(
                "limit", f"{limit!r} is no number from 1 to {MOST_FAILURES}", "give one"
            )
        after = request.query.get("after", "")
        return web.json_response(await status.failures(named(request), int(limit), after))

    async def progress(request: web.Request) -> web.StreamResponse:
        """200: a line of JSON whenever something changed, until the client goes. 404, 503."""
        dataset = named(request)
        if streams.locked():
            raise web.HTTPServiceUnavailable(reason=f"{MOST_STREAMS} streams are open already")
        async with streams:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            last, said = "", 0.0
            while dataset in component.datasets.values():
                line = json.dumps(status.of_dataset(dataset))
                if line != last or time.monotonic() - said >= HEARTBEAT_SECONDS:
                    last, said = line, time.monotonic()
                    try:
                        await response.write(line.encode() + b"\n")
                    except ConnectionResetError:
                        break  # the client has gone
                await asyncio.sleep(STREAM_SECONDS)
            return response

    base = "/v1/datasets"
    return [
        web.get(base, listing),
        web.get(f"{base}/{{name}}", show),
        web.delete(f"{base}/{{name}}", remove),
        web.post(f"{base}/{{name}}/warm", warm),
        web.post(f"{base}/{{name}}/pause", pause),
        web.post(f"{base}/{{name}}/resume", resume),
        web.post(f"{base}/{{name}}/cancel", cancel),
        web.post(f"{base}/{{name}}/verify", verify),
        web.get(f"{base}/{{name}}/failures", failures),
        web.get(f"{base}/{{name}}/progress", progress),
    ]
