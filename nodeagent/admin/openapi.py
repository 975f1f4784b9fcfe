"""The OpenAPI document: one hand-written YAML file per room, joined."""

import importlib.resources
from functools import cache
from typing import Any

import yaml
from aiohttp import web


@cache
def document() -> dict[str, Any]:
    """The joined document, OpenAPI 3.1."""
    folder = importlib.resources.files("nodeagent.admin") / "openapi"
    parts = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    joined: dict[str, Any] = {"paths": {}, "components": {"schemas": {}}}
    for part in parts:
        content = yaml.safe_load(part.read_text(encoding="utf-8"))
        joined["paths"] |= content.pop("paths", {})
        joined["components"]["schemas"] |= content.pop("schemas", {})
        joined |= content
    return joined


def routes() -> list[web.RouteDef]:
    async def openapi_json(_: web.Request) -> web.Response:
        """200: the OpenAPI document of this API."""
        return web.json_response(document())

    return [web.get("/openapi.json", openapi_json)]
