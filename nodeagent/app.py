"""The process: one root, named tasks, a staged stop.

``Agent.run`` is the root. It serves the admin API first, so that a node whose component hangs while
it starts can be asked why. Then it starts the components one after another in the registry's order,
each with a deadline. From then on one task for each component calls ``reconcile`` every few seconds
and when the settings change. No task ends by itself: the first that does, by an error or by a
signal, ends the process.

Components stop in reverse order, each with a deadline: a component that hangs must not keep the
others from stopping. What they have set up (mounts, BPF programs, containerd leases) stays in the
kernel and in the runtime.

A component's expected errors do not end the process: its reconcile is tried again after growing
pauses, and its health says what is wrong.
"""

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

import kit.errors
import kit.files
import kit.room
from nodeagent import configfile, configwatch, state
from nodeagent.api import listeners
from nodeagent.settings import Process, Settings

log = structlog.get_logger("agent")

RECONCILE_SECONDS = 5.0
START_DEADLINE_SECONDS = 60.0
# Below Kubernetes' default terminationGracePeriodSeconds of 30.
STOP_DEADLINE_SECONDS = 10.0


@contextlib.contextmanager
def _only_one(state_dir: Path) -> Iterator[None]:
    """Hold the lock of ``state_dir``: two agents with one would undo each other's work."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = kit.files.lock(state_dir / "lock", 0)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise kit.errors.RefusedError(
                f"state_dir {state_dir}",
                "another agent runs with it",
                "stop that agent, or give this one its own state_dir, store and views",
            ) from error
        raise kit.errors.HostError(
            f"state_dir {state_dir}", f"cannot be written ({error.strerror})", "make it writable"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


class Agent:
    """Runs the components of one settings file until a signal ends it."""

    def __init__(self, config: Path, settings: Settings) -> None:
        self.config = config
        self.state = state.build(settings)
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; AgentError when something cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        with _only_one(self.state.settings.state_dir):
            started: list[kit.room.Component[Any]] = []
            async with listeners.serving(self.state):
                try:
                    for component in self.state.components:
                        await self._start(component)
                        started.append(component)
                    log.info(
                        "agent started",
                        components=[c.name for c in started],
                        admin=str(self.state.settings.admin.socket),
                        metrics=self.state.settings.admin.metrics,
                    )
                    await self._work()
                finally:
                    for component in reversed(started):
                        await self._stop(component)
        log.info("agent stopped; views and mounts stay in place")

    async def _work(self) -> None:
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._reconcile_forever(component), name=component.name)
            for component in self.state.components
        ]
        tasks.append(asyncio.create_task(self._follow_settings(), name="settings"))
        tasks.append(asyncio.create_task(self._stopping.wait(), name="stop"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # its error ends the agent
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, component: kit.room.Component[Any]) -> None:
        try:
            async with asyncio.timeout(START_DEADLINE_SECONDS) as limit:
                await component.start()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise kit.errors.HostError(
                component.name,
                f"it did not start within {START_DEADLINE_SECONDS:g}s",
                "see the log for what it waits for",
            ) from error

    async def _stop(self, component: kit.room.Component[Any]) -> None:
        try:
            async with asyncio.timeout(STOP_DEADLINE_SECONDS):
                await component.stop()
        except TimeoutError:
            log.error("component did not stop in time", component=component.name)

    async def _reconcile_forever(self, component: kit.room.Component[Any]) -> None:
        failures = 0
        while True:
            section = getattr(self.state.settings, component.name)
            try:
                refused = await component.reconcile(section)
                failures = 0
                self._note_refused(component.name, refused)
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                failures += 1
                if failures == 1:
                    log.error("reconcile failed", component=component.name, error=str(error))
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RECONCILE_SECONDS * 2**failures, 300.0)):
                    await self._wake.wait()

    def _note_refused(self, name: str, refused: Any) -> None:
        others = [r for r in self.state.refused if not r.startswith(f"{name}.")]
        now = others + [f"{name}.{r}" for r in refused]
        for setting in set(now) - set(self.state.refused):
            log.warning("setting needs a restart of the agent to change", setting=setting)
        self.state.refused = now

    async def _follow_settings(self) -> None:
        async for _ in configwatch.changes(self.config):
            try:
                new = configfile.load(self.config)
            except kit.errors.SettingsError as error:
                self.state.config_error = str(error)
                log.error(
                    "settings file is unusable; the old settings stay in force", error=str(error)
                )
                continue
            self.state.config_error = ""
            self._apply(new)

    def _apply(self, new: Settings) -> None:
        """Adopt what can change while running; note in ``state.refused`` what cannot."""
        refused = [
            name
            for name in Process.model_fields
            if getattr(new, name) != getattr(self.state.settings, name)
        ]
        keep: dict[str, Any] = {name: getattr(self.state.settings, name) for name in refused}
        running = {component.name for component in self.state.components}
        for name in Settings.model_fields:
            if name in Process.model_fields:
                continue
            if (getattr(new, name) is not None) != (name in running):
                refused.append(name)
                keep[name] = getattr(self.state.settings, name)
        self.state.settings = new.model_copy(update=keep)
        self.state.refused = [r for r in self.state.refused if "." in r] + refused
        log.info("settings reloaded", needs_restart=refused)
        self._wake.set()
