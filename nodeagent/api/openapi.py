"""The OpenAPI document: the process's own part and one hand-written YAML file for each room."""

import functools
import importlib.resources
from typing import Any

import yaml

from nodeagent import rooms

METHODS = {"get", "post", "put", "delete", "patch"}
OWN = "nodeagent.api:openapi.yaml"


def part(resource: str) -> dict[str, Any]:
    """One file, named as in ``kit.room.Room.openapi``."""
    package, _, file = resource.partition(":")
    text = (importlib.resources.files(package) / file).read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@functools.lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The joined document, OpenAPI 3.1: all rooms, whether or not the settings have them.

    Read when it is first asked for: parsing it takes 90 ms, which a start does not need.
    """
    own = part(OWN)
    own_paths = own["paths"].keys()
    shared = {name: own.pop(f"x-every-{name}") for name in ("operation", "change", "room")}
    joined: dict[str, Any] = {"paths": {}, "components": {"schemas": {}}}
    joined["components"]["securitySchemes"] = own.pop("securitySchemes")
    for content in (own, *(part(room.openapi) for room in rooms.ROOMS if room.openapi)):
        joined["paths"] |= content.pop("paths", {})
        joined["components"]["schemas"] |= content.pop("schemas", {})
        joined |= content
    for path, item in joined["paths"].items():
        for method in METHODS & item.keys():
            changes = shared["change"] if method != "get" else {}
            of_room = shared["room"] if path not in own_paths else {}
            item[method]["responses"] = _answers(
                {**shared["operation"], **changes, **of_room, **item[method]["responses"]}
            )
    return joined


def _answers(answers: dict[str, Any]) -> dict[str, Any]:
    """In order, errors with their body.

    aiohttp itself answers a request that is not HTTP, or whose first line is too long.
    """
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    plain = {"text/plain": {"schema": {"type": "string"}}}
    return {
        status: {"content": error | (plain if status == "400" else {}), **answer}
        if status >= "400"
        else answer
        for status, answer in sorted(answers.items())
    }
