"""The OpenAPI document: the process's own part and one hand-written YAML file for each room."""

import importlib.resources
from functools import cache
from typing import Any

import yaml

from nodeagent import rooms

_OWN = "nodeagent.api:openapi.yaml"


@cache
def document() -> dict[str, Any]:
    """The joined document, OpenAPI 3.1: all rooms, whether or not the settings have them."""
    joined: dict[str, Any] = {"paths": {}, "components": {"schemas": {}}}
    for resource in (_OWN, *(room.openapi for room in rooms.ROOMS if room.openapi)):
        package, _, file = resource.partition(":")
        text = (importlib.resources.files(package) / file).read_text(encoding="utf-8")
        part = yaml.safe_load(text)
        joined["paths"] |= part.pop("paths", {})
        joined["components"]["schemas"] |= part.pop("schemas", {})
        joined |= part
    return joined
