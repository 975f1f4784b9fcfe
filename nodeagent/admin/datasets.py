"""Admin API of the dataset cache."""

from typing import Any

from aiohttp import web


def routes(component: Any) -> list[web.RouteDef]:
    return []
