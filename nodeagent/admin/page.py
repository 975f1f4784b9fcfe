"""The status page: one server-rendered HTML page."""

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from nodeagent.app import Agent


def routes(agent: "Agent") -> list[web.RouteDef]:
    async def status_page(_: web.Request) -> web.Response:
        """200: the page."""
        return web.Response(text=f"{len(agent.components)} components", content_type="text/html")

    return [web.get("/", status_page)]
