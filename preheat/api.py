"""Preheating's part of the admin API; paths and bodies are in openapi.yaml."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kit.errors
import kit.units
from kit.room import Answer, Json, Request, Role, Route, Stream, watch
from preheat import status
from preheat.component import Preheat

Change = Callable[[Preheat, str], Awaitable[status.Status | None]]


def _ref(fields: Mapping[str, Any], example: str = 'send {"ref": "HOST/PATH:TAG"}') -> str:
    ref = fields.get("ref")
    if not isinstance(ref, str) or not ref:
        raise kit.errors.SettingsError("request", "it has no text 'ref'", example)
    return ref


def _asked(request: Request) -> str:
    return _ref(request.query, "add ?ref=HOST/PATH:TAG")


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
        "pin", f"{str(value)[:60]!r} is not a rule", 'send always, never or {"for": "72h"}'
    )


async def _list(preheat: Preheat, _: Request) -> Json:
    return {"images": [row.as_json() for row in preheat.images()]}


async def _show(preheat: Preheat, request: Request) -> Json:
    return preheat.show(_asked(request)).as_json()


async def _plan(preheat: Preheat, _: Request) -> Json:
    return status.plan_json(preheat.reconciler)


async def _watch(preheat: Preheat, request: Request) -> Stream:
    """Ends when the image is ready or gone, or when only an operator can change its state."""
    row = preheat.show(_asked(request)).as_json()

    def read() -> Json | None:
        nonlocal row
        try:
            row = preheat.show(row["ref"]).as_json()
        except kit.errors.NotFoundError:
            # With "pin: never" a request ends with its pull, before it was seen as ready.
            if row["state"] in status.PRESENT or not preheat.has(row["ref"]):
                return None
            row |= {"state": "ready", "reason": "", "bytes_done": row["bytes_total"]}
        return row

    return Stream(watch(read, _is_final))


def _is_final(row: Json) -> bool:
    if row["state"] == "failed":
        return row["retry_at"] is None or row["failure_kind"] in status.FOR_OPERATORS
    return row["state"] in (*status.PRESENT, "released", "refused", "skipped", "paused")


async def _preheat(preheat: Preheat, request: Request) -> Answer:
    body = request.fields(ref=object, pin=object)
    row = await preheat.preheat(_ref(body), _keep(body.get("pin", "always")))
    return Answer(row.as_json(), 202)


def _change(method: Change) -> Callable[[Preheat, Request], Awaitable[Json]]:
    async def handler(preheat: Preheat, request: Request) -> Json:
        row = await method(preheat, _ref(request.fields(ref=object)))
        return {} if row is None else row.as_json()

    return handler


ROUTES = (
    Route("GET", "/v1/images", _list),
    Route("GET", "/v1/images/one", _show),
    Route("GET", "/v1/images/plan", _plan),
    Route("GET", "/v1/images/watch", _watch),
    Route("POST", "/v1/images/preheat", _preheat, Role.OPERATE),
    Route("POST", "/v1/images/pin", _change(Preheat.pin), Role.OPERATE),
    Route("POST", "/v1/images/unpin", _change(Preheat.unpin), Role.OPERATE),
    Route("POST", "/v1/images/pause", _change(Preheat.pause), Role.OPERATE),
    Route("POST", "/v1/images/resume", _change(Preheat.resume), Role.OPERATE),
    Route("POST", "/v1/images/cancel", _change(Preheat.cancel), Role.OPERATE),
)
