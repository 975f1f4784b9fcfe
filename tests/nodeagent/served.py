"""The admin API served without a node or a listener, with routes of a test's own."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

import kit.errors
import kit.files
import kit.room
import kit.settings
from kit.room import Role, Route
from nodeagent import app
from nodeagent.api import access, server
from nodeagent.state import RunningRoom, State


def door(
    state: State, role: Role | None = Role.DANGEROUS, calls: access.CallLog | None = None
) -> server.Door:
    """Takes everybody for somebody of this role."""
    caller = access.Caller(f"somebody who may {role}", role, "somebody")

    async def identify(_: Any) -> access.Caller:
        return caller

    return server.Door(identify, calls or access.CallLog(state.settings.state_dir))


@contextlib.asynccontextmanager
async def served(
    state: State, role: Role | None = Role.DANGEROUS
) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(server.application(state, door(state, role)))) as made:
        yield made


class Fake:
    """A component whose handlers are the tests'."""

    name = "fake"

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reconcile(self, settings: kit.settings.Section) -> list[str]:
        return []

    def health(self) -> kit.room.Health:
        return kit.room.Health(True, True)

    def metrics(self) -> list[Any]:
        return []


def application(
    agent: app.Agent,
    *routes: Route,
    unsettled: bool = False,
    caller: server.Identify | None = None,
    calls: access.CallLog | None = None,
) -> web.Application:
    """The admin API with a room of these routes."""
    room = kit.room.Room("fake", "", kit.settings.Section, lambda *_: Fake(), routes=lambda: routes)
    running = RunningRoom(room, Fake(), started=True, unsettled=unsettled)
    state = State(agent.state.settings, running=[running])
    known = door(state, calls=calls)
    known = known if caller is None else dataclasses.replace(known, caller=caller)
    return server.application(state, known)


@contextlib.asynccontextmanager
async def serving(
    agent: app.Agent, *routes: Route, **more: Any
) -> AsyncIterator[TestClient[Any, Any]]:
    """``more``: as of ``application``."""
    async with TestClient(TestServer(application(agent, *routes, **more))) as client:
        yield client
