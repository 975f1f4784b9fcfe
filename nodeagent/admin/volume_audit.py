"""Admin API of the volume audit."""

import json
from typing import Any

from aiohttp import web

import kit.errors
from linux import blockdev
from volumes.audit import status
from volumes.audit.inventory.model import Inventory
from volumes.audit.service import Audit

_LOOKED = "the node has not been looked at yet"


def _device(audit: Audit, name: str) -> tuple[Inventory, blockdev.BlockDevice]:
    if audit.inventory is None:
        raise kit.errors.RefusedError(f"volume {name}", _LOOKED, "try again in a few seconds")
    found = audit.inventory.device(name.removeprefix("/dev/"))
    if found is None:
        raise kit.errors.NotFoundError(
            f"volume {name}",
            "no guarded device has that name",
            "see 'nodeagent volume list'; devices of other drivers are not watched",
        )
    return audit.inventory, found


def routes(component: Any) -> list[web.RouteDef]:
    """Of the volumes component; none while the audit is switched off."""
    return _routes(component.audit) if component.audit is not None else []


def _routes(audit: Audit) -> list[web.RouteDef]:
    async def overview(_: web.Request) -> web.Response:
        """200: how the audit is, rule by rule."""
        return web.json_response(status.overview(audit))

    async def run(_: web.Request) -> web.Response:
        """200: the same after a full pass."""
        await audit.audit_now()
        return web.json_response(status.overview(audit))

    async def devices(_: web.Request) -> web.Response:
        """200: every guarded device."""
        if audit.inventory is None:
            raise kit.errors.RefusedError("volumes", _LOOKED, "try again in a few seconds")
        return web.json_response({"devices": status.devices(audit)})

    async def device(request: web.Request) -> web.Response:
        """200: one device; 404 when it is not watched."""
        inventory, found = _device(audit, request.match_info["device"])
        return web.json_response(status.detail(audit, inventory, found))

    async def findings(_: web.Request) -> web.Response:
        """200: what stands now."""
        return web.json_response({"findings": status.findings(audit)})

    async def act(request: web.Request) -> web.Response:
        """200: what was done, refused, or would be done."""
        try:
            body = await request.json()
            identity, dry_run = body["finding"], body.get("dry_run", True)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise kit.errors.SettingsError(
                "request", f"is not as it should be ({error!r})", 'send {"finding": ID}'
            ) from error
        if not isinstance(identity, str) or not isinstance(dry_run, bool):
            raise kit.errors.SettingsError(
                "request", "finding is no text or dry_run no truth value", "see /openapi.json"
            )
        return web.json_response(await audit.act(identity, dry_run=dry_run))

    return [
        web.get("/v1/audit", overview),
        web.post("/v1/audit/pass", run),
        web.get("/v1/audit/devices", devices),
        web.get("/v1/audit/devices/{device}", device),
        web.get("/v1/audit/findings", findings),
        web.post("/v1/audit/act", act),
    ]
