"""The agent's life with made-up components, and settings that change."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.room
import kit.settings
from nodeagent import app, configfile


def test_apply_keeps_settings_that_need_a_restart(agent: app.Agent) -> None:
    old = agent.state.settings
    assert old.cache is not None
    new = old.model_copy(
        update={
            "admin": old.admin.model_copy(update={"metrics": "127.0.0.1:2"}),
            "state_dir": Path("/elsewhere"),
            "cache": old.cache.model_copy(update={"budget": 2**30}),
        }
    )
    agent._apply(new)
    assert agent.state.settings.cache is not None
    assert agent.state.settings.cache.budget == 2**30
    assert agent.state.settings.admin == old.admin
    assert agent.state.settings.state_dir == old.state_dir
    assert sorted(agent.state.refused) == ["admin", "state_dir"]
    agent._apply(old)
    assert agent.state.refused == []


def test_apply_refuses_a_new_or_lost_section(agent: app.Agent) -> None:
    agent._apply(configfile.parse("", "x"))
    assert "cache" in agent.state.refused
    assert agent.state.settings.cache is not None


class Slow:
    """A component that notes what is asked of it, and never returns from ``hang``."""

    def __init__(self, name: str, order: list[str], hang: str = "") -> None:
        self.name = name
        self._order = order
        self._hang = hang
        self.begun = asyncio.Event()

    async def _do(self, what: str) -> None:
        self._order.append(f"{what} {self.name}")
        if self._hang == what:
            await asyncio.Event().wait()

    async def start(self) -> None:
        self.begun.set()
        await self._do("start")

    async def stop(self) -> None:
        await self._do("stop")

    async def reconcile(self, settings: Any) -> list[str]:
        return []

    def health(self) -> kit.room.Health:
        return kit.room.Health(alive=True, ready=True)

    def metrics(self) -> list[Any]:
        return []


@pytest.fixture
def order() -> list[str]:
    return []


def running(agent: app.Agent, *components: Slow) -> app.Agent:
    """``agent`` with these components."""
    room = kit.room.Room("cache", "", kit.settings.Section, lambda *_: components[0])
    state = agent.state
    state.running = [(room, component) for component in components]
    sections = {component.name: None for component in components}
    state.settings = state.settings.model_copy(update=sections)
    return agent


async def test_run_stops_in_reverse_order(agent: app.Agent, order: list[str]) -> None:
    last = Slow("b", order)
    task = asyncio.create_task(running(agent, Slow("a", order), last).run())
    await asyncio.wait_for(last.begun.wait(), 10)
    agent._stopping.set()
    await asyncio.wait_for(task, 10)
    assert order == ["start a", "start b", "stop b", "stop a"]


async def test_component_that_hangs_does_not_keep_others_from_stopping(
    agent: app.Agent, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "STOP_DEADLINE_SECONDS", 0.05)
    agent._stopping.set()
    await running(agent, Slow("a", order), Slow("b", order, "stop")).run()
    assert order[-2:] == ["stop b", "stop a"]


async def test_start_has_a_deadline(
    agent: app.Agent, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "START_DEADLINE_SECONDS", 0.05)
    components = [Slow("a", order), Slow("b", order, "start"), Slow("c", order)]
    with pytest.raises(kit.errors.HostError, match="b: it did not start within"):
        await running(agent, *components).run()
    assert order == ["start a", "start b", "stop a"]


async def test_second_agent_of_a_state_dir_is_refused(agent: app.Agent, order: list[str]) -> None:
    component = Slow("a", order)
    task = asyncio.create_task(running(agent, component).run())
    await asyncio.wait_for(component.begun.wait(), 10)
    with pytest.raises(kit.errors.RefusedError, match="another agent runs with it"):
        await agent.run()
    agent._stopping.set()
    await asyncio.wait_for(task, 10)
