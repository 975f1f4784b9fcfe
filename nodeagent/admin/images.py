"""Admin API of image preheating."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

import kit.errors
import kit.units
import preheat.component
import preheat.status

PROGRESS_SECONDS = 0.5
# Even when nothing changes, so that a client knows that somebody is there.
BEAT_SECONDS = 5.0

Change = Callable[[str], Awaitable[preheat.status.Status | None]]


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("ref"), str):
        raise kit.errors.SettingsError(
            "request body", 'no JSON object with "ref"', 'send {"ref": "HOST/PATH:TAG"}'
        )
    return body


def _keep(value: object) -> str:
    """The pin rule of a request: always, never or {"for": duration}."""
    if value in ("always", "never"):
        return str(value)
    if isinstance(value, dict) and set(value) == {"for"}:
        try:
            return f"for:{kit.units.parse_duration(value['for']):.0f}"
        except ValueError as error:
            raise kit.errors.SettingsError("pin", str(error), "write it like 72h") from None
    raise kit.errors.SettingsError(
        "pin", f"{str(value)[:60]!r} is no rule", 'send always, never or {"for": "72h"}'
    )


def _ref(request: web.Request) -> str:
    ref = request.query.get("ref", "")
    if not ref:
        raise kit.errors.SettingsError("query", "ref is missing", "add ?ref=HOST/PATH:TAG")
    return ref


def routes(component: Any) -> list[web.RouteDef]:
    room: preheat.component.Preheat = component

    async def images(_: web.Request) -> web.Response:
        """200: every image that is wanted or pinned."""
        return web.json_response({"images": [row.as_json() for row in room.images()]})

    async def one(request: web.Request) -> web.Response:
        """200: one image with its layers. 400 bad reference, 404 neither wanted nor pinned."""
        return web.json_response(room.show(_ref(request)).as_json())

    async def plan(_: web.Request) -> web.Response:
        """200: the latest plan and the layer reuse report. 502 before there is one."""
        return web.json_response(room.plan())

    async def preheat_image(request: web.Request) -> web.Response:
        """202: taken in. 400 bad reference or rule, 502 the runtime does not answer."""
        body = await _body(request)
        row = await room.preheat(body["ref"], _keep(body.get("pin", "always")))
        return web.json_response(row.as_json(), status=202)

    def change(method: Change) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            """200: done. 400 bad reference, 404 unknown, 409 refused, 502 no runtime."""
            row = await method((await _body(request))["ref"])
            return web.json_response({} if row is None else row.as_json())

        return handler

    async def watch(request: web.Request) -> web.StreamResponse:
        """200: NDJSON, one line whenever something changes, until the image is ready or gone."""
        ref = room.show(_ref(request)).ref
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        last, beat = None, 0.0
        while True:
            try:
                row = room.show(ref)
            except kit.errors.NotFoundError:
                break
            if row != last or beat >= BEAT_SECONDS:
                await response.write(json.dumps(row.as_json()).encode() + b"\n")
                last, beat = row, 0.0
            if row.state in ("ready", "released") or _is_final(row):
                break
            await asyncio.sleep(PROGRESS_SECONDS)
            beat += PROGRESS_SECONDS
        await response.write_eof()
        return response

    return [
        web.get("/v1/images", images),
        web.get("/v1/images/one", one),
        web.get("/v1/images/plan", plan),
        web.get("/v1/images/watch", watch),
        web.post("/v1/images/preheat", preheat_image),
        web.post("/v1/images/pin", change(room.pin)),
        web.post("/v1/images/unpin", change(room.unpin)),
        web.post("/v1/images/pause", change(room.pause)),
        web.post("/v1/images/resume", change(room.resume)),
        web.post("/v1/images/cancel", change(room.cancel)),
    ]


def _is_final(row: preheat.status.Status) -> bool:
    """Nothing changes any more without somebody's help."""
    if row.state == "failed":
        return row.retry_at is None or row.failure_kind in ("auth", "not_found")
    return row.state in ("refused", "skipped", "paused")
