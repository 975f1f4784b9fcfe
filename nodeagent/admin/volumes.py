"""Admin API of the volumes room."""

import json
from typing import Any, get_args

from aiohttp import web

import kit.errors
from volumes import settings

_MODES = (*get_args(settings.GuardSettings.model_fields["mode"].annotation), "settings")


async def _body(request: web.Request, *wanted: str) -> dict[str, str]:
    """The JSON object's strings. SettingsError (400) names what is missing."""
    try:
        data = await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise kit.errors.SettingsError("request", f"is not JSON ({error})", "send JSON") from error
    if not isinstance(data, dict):
        raise kit.errors.SettingsError("request", "is no JSON object", "see /openapi.json")
    for name in wanted:
        value = data.get(name)
        if not isinstance(value, str) or len(value) > 4096 or "\0" in value:
            raise kit.errors.SettingsError(
                f"request field {name!r}", "is missing or no text of at most 4096 characters",
                "see /openapi.json",
            )  # fmt: skip
    return data


def routes(component: Any) -> list[web.RouteDef]:
    async def status(_: web.Request) -> web.Response:
        """200: what the kernel enforces, devices, leases, denials."""
        return web.json_response(component.guard_status())

    async def mode(request: web.Request) -> web.Response:
        """200: the new status. 400: no such mode."""
        body = await _body(request, "mode", "by", "reason")
        if body["mode"] not in _MODES:
            raise kit.errors.SettingsError(
                f"mode {body['mode']!r}", "is none", f"use one of {', '.join(_MODES)}"
            )
        return web.json_response(await component.set_mode(body["mode"], body["by"], body["reason"]))

    async def detach(request: web.Request) -> web.Response:
        """200: the new status."""
        body = await _body(request, "by", "reason")
        return web.json_response(await component.detach(body["by"], body["reason"]))

    async def probe(request: web.Request) -> web.Response:
        """200: the verdict. 404: no such device. 409: no block device."""
        body = await _body(request, "device")
        return web.json_response(await component.probe(body["device"]))

    async def ledger(_: web.Request) -> web.Response:
        """200: every volume that this node knows."""
        return web.json_response({"volumes": component.ledger()})

    async def accept(request: web.Request) -> web.Response:
        """200: the new entry. 409: the volume is not attached here with readable content."""
        body = await _body(request, "volume", "by")
        return web.json_response(await component.accept(body["volume"], body["by"]))

    async def allow(request: web.Request) -> web.Response:
        """200: the lease. 404: no such device. 409: another volume, in use, or no reason."""
        body = await _body(request, "device", "volume", "reason", "by")
        answer = await component.allow_format(
            body["device"], body["volume"], body["reason"], body["by"]
        )
        return web.json_response(answer)

    return [
        web.get("/v1/volumes/guard", status),
        web.put("/v1/volumes/guard/mode", mode),
        web.post("/v1/volumes/guard/detach", detach),
        web.post("/v1/volumes/probe", probe),
        web.get("/v1/volumes/ledger", ledger),
        web.post("/v1/volumes/ledger/accept", accept),
        web.post("/v1/volumes/allow-format", allow),
    ]
