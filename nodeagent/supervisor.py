"""Keeps one room at work: start, reconcile, and start anew what is sick.

A room that cannot start, fails or hangs does not touch the others: it is *degraded*. Readiness and
a finding say so, and it is tried again after growing pauses until its cause has gone. A component
whose start failed, or whose own work ended, is stopped and replaced by a new one: nobody has to
know what half a component can still do.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

import kit.errors
import kit.findings
import kit.tasks
from kit import processes
from kit.pause import Backoff
from nodeagent.state import RunningRoom, State

log = structlog.get_logger("agent")

RECONCILE_SECONDS = 5.0
START_DEADLINE_SECONDS = 60.0
# Longer than all calls of one reconcile may take together.
RECONCILE_DEADLINE_SECONDS = 300.0
# Below Kubernetes' default terminationGracePeriodSeconds of 30.
STOP_DEADLINE_SECONDS = 10.0
# Below the time after which a component that is not reconciled counts as dead.
LONGEST_PAUSE_SECONDS = 60.0
# So long the next room waits for this one's first start: one that hangs must not keep it from work.
ORDER_SECONDS = 10.0


class Supervisor:
    def __init__(self, state: State, running: RunningRoom) -> None:
        self.running = running
        self.tried = asyncio.Event()  # its first start has ended, well or not
        self._state = state
        self._new = True  # the component has not been started yet
        self._begun = False
        self._wake = asyncio.Event()
        self._backoff = Backoff(1.0, LONGEST_PAUSE_SECONDS)

    @property
    def name(self) -> str:
        return self.running.room.name

    def wake(self) -> None:
        """Reconcile or try again now: the settings have changed."""
        self._wake.set()

    async def follow(self, before: "Supervisor | None" = None) -> None:
        """Never ends. The first start waits for ``before``'s, at most ``ORDER_SECONDS``."""
        processes.in_share(self.name)
        if before is not None:
            await kit.tasks.until(before.tried, ORDER_SECONDS)
        while True:
            self._wake.clear()
            well = await self._step()
            self.tried.set()
            await kit.tasks.until(self._wake, RECONCILE_SECONDS if well else self._backoff.next())

    async def _step(self) -> bool:
        try:
            if not self.running.started:
                await self._start()
            await self._reconcile()
        except kit.errors.AgentError as error:
            await self._failed(error)
            return False
        except Exception as error:
            # A bug of one room is that room's trouble, too.
            if not isinstance(error, OSError):
                log.exception("component failed", component=self.name)
            cause = f"{type(error).__name__}: {error}"
            await self._failed(kit.errors.HostError(self.name, cause, "see the agent's log"))
            return False
        if self.running.trouble is not None:
            log.info("component works again", component=self.name)
        self.running.trouble = None
        self._backoff.reset()
        self._report()
        return True

    async def _start(self) -> None:
        if not self._new:
            self.running.component = self._state.build(self.running.room)
        self._new, self._begun = False, True
        async with self._within(START_DEADLINE_SECONDS, "start"):
            await self.running.component.start()
        self.running.started = self.running.unsettled = True

    async def _reconcile(self) -> None:
        section = getattr(self._state.settings, self.name)
        async with self._within(RECONCILE_DEADLINE_SECONDS, "reconcile"):
            refused = await self.running.component.reconcile(section)
        others = [r for r in self._state.refused if not r.startswith(f"{self.name}.")]
        self._state.refuse(others + [f"{self.name}.{r}" for r in refused])
        self.running.unsettled = False
        health = self.running.component.health()
        if not health.alive:
            self.running.started = False
            why = "; ".join(health.reasons) or "its work loop does not advance"
            raise kit.errors.HostError(self.name, why, "it is started anew; see the agent's log")

    @contextlib.asynccontextmanager
    async def _within(self, seconds: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.running.started = False
            why = f"it did not {what} within {seconds:g}s"
            raise kit.errors.HostError(self.name, why, "see the agent's log") from error

    async def _failed(self, error: kit.errors.AgentError) -> None:
        running = self.running
        if str(error) != str(running.trouble):
            log.error("component is degraded", component=self.name, error=str(error))
        running.trouble = error
        running.failures += 1
        self._report()
        if not running.started:
            await self.stop()

    def _report(self) -> None:
        trouble = self.running.trouble
        found = []
        if trouble is not None:
            found.append(
                kit.findings.Finding(
                    id=f"component-degraded/{self.name}",
                    rule="component-degraded",
                    severity=kit.findings.Severity.CRITICAL,
                    subject=self.name,
                    message=f"{trouble.thing}: {trouble.cause}",
                    advice=f"{trouble.remedy or 'see the log'}; it is tried again by itself, "
                    "'nodeagent doctor' says what else is missing",
                    evidence={"failures": str(self.running.failures)},
                )
            )
        self._state.findings.report(f"agent.{self.name}", found)

    async def stop(self) -> None:
        """End the component's own work. One that hangs must not keep the others from stopping."""
        if not self._begun:
            return
        self._begun = self.running.started = False
        try:
            async with asyncio.timeout(STOP_DEADLINE_SECONDS):
                await self.running.component.stop()
        except TimeoutError:
            log.error("component did not stop in time", component=self.name)
        except Exception:
            log.exception("component did not stop well", component=self.name)
