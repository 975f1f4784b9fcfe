"""The OpenAPI document: the process's own part and one hand-written YAML file for each room."""

import functools
import importlib.resources
from typing import Any

import yaml

from nodeagent import rooms

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
    joined: dict[str, Any] = {"paths": {}, "components": {"schemas": {}}}
    for content in map(part, [OWN, *(room.openapi for room in rooms.ROOMS if room.openapi)]):
        joined["paths"] |= content.pop("paths", {})
        joined["components"]["schemas"] |= content.pop("schemas", {})
        joined |= content
    return joined
