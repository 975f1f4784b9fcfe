"""The agent's life with made-up components, and settings that change."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.processes
import kit.room
import kit.settings
from nodeagent import app, configfile, logs, rooms, supervisor, watchdog
from nodeagent.settings import Settings
from nodeagent.state import RunningRoom
from tests.testbed import waiting


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
    found = agent.state.findings.current()
    assert sorted(each.subject for each in found) == ["admin", "state_dir"]
    assert {each.rule for each in found} == {"needs-restart"}
    agent._apply(old)
    assert agent.state.refused == []
    assert agent.state.findings.current() == []


def test_rooms_keep_the_node_and_the_cluster_that_are_in_force(agent: app.Agent) -> None:
    """What is said to need a restart needs one everywhere: no agent has two names."""
    old = agent.state.settings
    assert old.cache is not None
    text = "node: other\nkubernetes: {kubeconfig: /elsewhere}\nkubelet: {root_dir: /data/kubelet}\n"
    new = configfile.parse(f"{text}cache: {{}}\n", "x")
    assert new.cache.this_node.name == "other"
    agent._apply(new.model_copy(update={"admin": old.admin, "state_dir": old.state_dir}))
    here = agent.state.settings.cache.this_node
    assert (here.name, here.cluster) == (old.this_node.name, old.this_node.cluster)
    assert here.kubelet.root_dir == Path("/data/kubelet")
    assert sorted(agent.state.refused) == ["kubernetes", "node"]


def test_a_room_that_is_absent_has_the_files_node() -> None:
    settings = configfile.parse("node: n7\nkubelet: {root_dir: /k}\n", "x")
    for room in rooms.ROOMS:
        here = settings.room(room).this_node
        assert (here.name, here.kubelet.root_dir) == ("n7", Path("/k"))


async def test_a_slip_in_the_settings_is_a_finding_until_it_is_mended(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, seen = agent.config.read_text(), list[list[tuple[str, str]]]()

    async def changes(*_: object) -> AsyncIterator[bytes | None]:
        for text in (good + "a_key_of_later: 1\n", good, None, good):
            if text is None:
                agent.config.unlink()
            else:
                agent.config.write_text(text)
            yield configfile.look(agent.config)
            found = agent.state.findings.current()
            seen.append([(each.rule, each.message) for each in found])

    monkeypatch.setattr(configfile, "changes", changes)
    await agent._follow_settings()
    ((rule, message),) = seen[0]
    assert rule == "settings-unusable" and "a_key_of_later" in message
    assert seen[1] == seen[3] == []
    ((rule, message),) = seen[2]
    assert rule == "settings-unusable" and "there is no such settings file" in message
    loaded = configfile.Loaded(agent.state.settings, problem="x: a slip")
    started = app.Agent(agent.config, loaded)
    assert [each.rule for each in started.state.findings.current()] == ["settings-unusable"]


async def test_what_grows_with_others_texts_is_done_beside_the_loop(
    agent: app.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with many mistakes, and many objects: their authors are not to stop the loop."""
    threads: dict[str, bool] = {}
    good = agent.state.settings

    def beside(what: str) -> Settings:
        threads[what] = threading.current_thread() is not threading.main_thread()
        return good

    async def changes(*_: object) -> AsyncIterator[bytes | None]:
        yield b""

    monkeypatch.setattr(configfile, "changes", changes)
    monkeypatch.setattr(configfile, "load", lambda *_: beside("file"))
    monkeypatch.setattr(agent, "_merged", lambda: beside("objects"))
    await agent._follow_settings()
    assert threads == {"file": True, "objects": True}
    threads.clear()
    await agent._renew()
    assert threads == {"objects": True}


def test_apply_refuses_a_new_or_lost_section(agent: app.Agent) -> None:
    agent._apply(configfile.parse("", "x"))
    assert "cache" in agent.state.refused
    assert agent.state.settings.cache is not None


class Fake:
    """A component that notes what is asked of it. It hangs in ``hang`` and fails with ``fail``."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name = name
        self.hang = ""
        self.fail: Exception | None = None
        self.alive = True
        self.begun = asyncio.Event()
        self._order = order

    async def _do(self, what: str) -> None:
        self._order.append(f"{what} {self.name}")
        if self.hang == what:
            await asyncio.Event().wait()
        if self.fail is not None and what == "start":
            raise self.fail

    async def start(self) -> None:
        self.begun.set()
        await self._do("start")

    async def stop(self) -> None:
        await self._do("stop")

    async def reconcile(self, settings: Any) -> list[str]:
        return []

    def health(self) -> kit.room.Health:
        return kit.room.Health(alive=self.alive, ready=self.alive)

    def metrics(self) -> list[Any]:
        return []


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pause of the supervisors is short."""
    monkeypatch.setattr(supervisor, "RECONCILE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "ORDER_SECONDS", 0.05)


def running(agent: app.Agent, *components: Fake) -> app.Agent:
    """``agent`` with these components; a new start gets the same one again."""

    def room(component: Fake) -> kit.room.Room:
        return kit.room.Room(component.name, "", kit.settings.Section, lambda *_: component)

    state = agent.state
    state.running = [RunningRoom(room(component), component) for component in components]
    sections = {component.name: None for component in components}
    state.settings = state.settings.model_copy(update=sections)
    return agent


@contextlib.asynccontextmanager
async def at_work(agent: app.Agent) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(agent.run())
    try:
        yield task
    finally:
        agent._stopping.set()
        await asyncio.wait_for(task, waiting.limit(60))


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(waiting.limit(60)):
        while not true():
            await asyncio.sleep(0.001)


def ready(agent: app.Agent) -> dict[str, bool]:
    return {each.room.name: each.health().ready for each in agent.state.running}


async def test_run_starts_in_order_and_stops_in_reverse(agent: app.Agent, order: list[str]) -> None:
    last = Fake("b", order)
    async with at_work(running(agent, Fake("a", order), last)):
        await last.begun.wait()
    assert order == ["start a", "start b", "stop b", "stop a"]


async def test_component_that_hangs_does_not_keep_others_from_stopping(
    agent: app.Agent, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_DEADLINE_SECONDS", 0.05)
    last = Fake("b", order)
    last.hang = "stop"
    async with at_work(running(agent, Fake("a", order), last)):
        await last.begun.wait()
    assert order[-2:] == ["stop b", "stop a"]


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (kit.errors.HostError("the disk", "it is gone", "mount it"), "the disk: it is gone"),
        (KeyError("x"), "a: KeyError: 'x'"),
        (OSError(5, "no disk"), "a: OSError: [Errno 5] no disk"),
    ],
)
async def test_component_that_cannot_start_leaves_the_others_at_work_and_heals(
    agent: app.Agent, order: list[str], fail: Exception, said: str
) -> None:
    sick, well = Fake("a", order), Fake("b", order)
    sick.fail = fail
    async with at_work(running(agent, sick, well)):
        await until(lambda: ready(agent) == {"a": False, "b": True})
        (found,) = agent.state.findings.current()
        assert found.id == "component-degraded/a"
        assert found.message == said
        await until(lambda: agent.state.running[0].failures >= 3)
        assert order.count("start b") == 1
        sick.fail = None
        await until(lambda: all(ready(agent).values()))
        assert agent.state.findings.current() == []
    # Every failed start is cleaned up before the next.
    mine = [each for each in order if each.endswith(" a")]
    assert mine == ["start a", "stop a"] * (len(mine) // 2)


async def test_component_that_hangs_at_its_start_keeps_nobody_waiting(
    agent: app.Agent, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_DEADLINE_SECONDS", 0.2)
    sick, well = Fake("a", order), Fake("b", order)
    sick.hang = "start"
    async with at_work(running(agent, sick, well)):
        await until(lambda: ready(agent) == {"a": False, "b": True})
        await until(lambda: agent.state.running[0].trouble)
        assert "it did not start within" in str(agent.state.running[0].trouble)
        sick.hang = ""
        await until(lambda: all(ready(agent).values()))


async def test_component_whose_work_ended_is_started_anew(
    agent: app.Agent, order: list[str]
) -> None:
    sick = Fake("a", order)
    async with at_work(running(agent, sick)):
        await until(lambda: all(ready(agent).values()))
        sick.alive = False
        await until(lambda: agent.state.running[0].trouble)
        sick.alive = True
        await until(lambda: all(ready(agent).values()))
    assert order[:3] == ["start a", "stop a", "start a"]


async def test_second_agent_of_a_state_dir_is_refused(agent: app.Agent, order: list[str]) -> None:
    component = Fake("a", order)
    async with at_work(running(agent, component)):
        await component.begun.wait()
        with pytest.raises(kit.errors.RefusedError, match="another agent runs with it"):
            await agent.run()


STUCK = """
import asyncio, time
from nodeagent import watchdog
watchdog.ROUND_SECONDS, watchdog.ROUNDS = 0.05, 4

async def main():
    async with watchdog.watching():
        await asyncio.sleep(0.5)
        print("still here", flush=True)
        open("{fifo}").read()  # nobody writes: the loop is blocked for ever

asyncio.run(main())
"""


async def test_stuck_loop_ends_the_process_and_says_where(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    done = await kit.processes.run(
        [sys.executable, "-c", STUCK.format(fifo=fifo)], about="a stuck loop",
        deadline=waiting.limit(30),
        environment={**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[1])},
    )  # fmt: skip
    assert done.out == b"still here\n"
    assert done.code == watchdog.EXIT_CODE
    assert b"the event loop has been stuck" in done.err
    assert b"in main" in done.err


UNREAD = """
import asyncio, os, sys
import structlog
from nodeagent import logs, watchdog
watchdog.ROUND_SECONDS, watchdog.ROUNDS, watchdog.LAST_WORDS_SECONDS = 0.05, 30, 0.2

async def main():
    logs.configure()
    log = structlog.get_logger("agent")
    async with watchdog.watching():
        for number in range(logs.MOST_WAITING_LINES + 1000):  # the pipe has room for some
            log.info("a line", number=number, text="x" * 200)
            if number % 100 == 0:
                await asyncio.sleep(0)  # a slow machine is no blocked loop
        await asyncio.sleep(0.5)
        print("still here", flush=True)
        open("{fifo}").read()  # nobody writes: the loop is blocked for ever

asyncio.run(main())
"""


async def test_a_log_that_nobody_reads_stops_neither_the_loop_nor_its_watchdog(
    tmp_path: Path,
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    unread, full = os.pipe()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", UNREAD.format(fifo=fifo), stdout=asyncio.subprocess.PIPE, stderr=full,
        env={**os.environ, "PYTHONPATH": str(Path(app.__file__).parents[1])},
    )  # fmt: skip
    try:
        async with asyncio.timeout(waiting.limit(60)):
            out, _ = await child.communicate()
    finally:
        os.close(unread)
        os.close(full)
        if child.returncode is None:
            child.kill()
    assert out == b"still here\n"
    assert child.returncode == watchdog.EXIT_CODE


async def test_systemd_hears_that_the_loop_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setblocking(False)
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with watchdog.watching(), asyncio.timeout(waiting.limit(30)):
            said = await asyncio.get_running_loop().sock_recv(systemd, 100)
    assert said == b"WATCHDOG=1"


async def test_what_the_log_lost_is_counted_and_the_rest_is_whole() -> None:
    unread, full = os.pipe()
    drain = logs.Drain(full, most=10)
    for number in range(3000):
        drain.write(f"line {number} " + "x" * 100 + "\n")
    written, read = 3000, b""
    lost, lines = 0, list[str]()
    while lost + len(lines) < written:
        drain.write(f"line {written} " + "x" * 100 + "\n")
        written += 1
        read += await asyncio.to_thread(os.read, unread, 65536)
        *whole, read = read.split(b"\n")
        for line in whole:
            if line.startswith(b"{"):
                lost += json.loads(line)["lines"]
            else:
                lines.append(line.decode())
    assert lost >= 3000 - 65536 // 100 - 20
    assert all(re.fullmatch("line [0-9]+ x{100}", line) for line in lines)
    assert lost + len(lines) == written
