"""Carries plans out: modes, limits, a new scan before each action, and the journal of actions.

Invariant: an action is in the journal as ``begun`` before it starts and with its outcome after it,
so one that the agent's end interrupted can be recognised.
"""

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
from volumes.audit.actions import executors, plan
from volumes.audit.actions.plan import Plan
from volumes.audit.settings import ActionSettings

log = structlog.get_logger("audit.actions")

DEADLINE_SECONDS = 30.0
_RETRY_SECONDS = 60.0
_REPEAT_SECONDS = 3600.0  # a refusal or a dry run is not reported again sooner
_WRITE_SECONDS = 5.0
_MOST_LAST = 100
_EXECUTORS: Mapping[str, Callable[..., int]] = {
    plan.DETACH: executors.detach,
    plan.UNMAP: executors.unmap,
    plan.READ_ONLY: executors.set_read_only,
}


def modes(settings: ActionSettings) -> dict[str, str]:
    """Each action's mode: off, dry-run or on."""
    return {
        plan.DETACH: settings.detach_leaked,
        plan.UNMAP: settings.unmap_orphan,
        plan.READ_ONLY: settings.set_readonly,
    }


class Runner:
    """Carries plans out, each kind at most ``per_hour`` times an hour."""

    def __init__(self, state_dir: Path) -> None:
        self.last: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_LAST)
        self.counts: dict[tuple[str, str], int] = {}  # (action, outcome)
        self._path = state_dir / "volumes" / "actions.jsonl"
        self._not_before: dict[tuple[str, str], float] = {}
        self._done: dict[str, list[float]] = {}

    def due(self, plans: list[Plan], settings: ActionSettings) -> list[Plan]:
        """Plans that the settings ask for and that were not tried a moment ago. In mode dry-run
        also refused ones, so that the journal says why."""
        now = time.monotonic()
        self._not_before = {key: until for key, until in self._not_before.items() if now < until}
        mode = modes(settings)
        return [
            step
            for step in plans
            if mode[step.action] != "off"
            and (step.action, step.finding) not in self._not_before
            and (not step.refusal or mode[step.action] == "dry-run")
        ]

    async def run(
        self,
        step: Plan,
        settings: ActionSettings,
        again: Callable[[], Awaitable[list[Plan]]],
        *,
        dry_run: bool | None = None,
        by: str = "audit",
    ) -> dict[str, Any]:
        """Carry one plan out, or say what would be done; returns the journal entry. ``again``
        scans and plans once more."""
        key = step.action, step.finding
        self._not_before[key] = time.monotonic() + _RETRY_SECONDS
        dry = modes(settings)[step.action] != "on" if dry_run is None else dry_run
        entry: dict[str, Any] = {
            "time": time.time(),
            "action": step.action,
            "finding": step.finding,
            "device": step.device,
            "what": step.what,
            "by": by,
            "dry_run": dry,
        }
        fresh = next((p for p in await again() if (p.action, p.finding) == key), None)
        if fresh is None:
            return await self._finish(entry, "gone", "the trouble is over")
        if fresh.refusal:
            self._not_before[key] = time.monotonic() + _REPEAT_SECONDS
            return await self._finish(entry, "refused", fresh.refusal)
        entry["what"] = fresh.what
        if dry:
            self._not_before[key] = time.monotonic() + _REPEAT_SECONDS
            return await self._finish(entry, "dry-run", "would be done")
        if not self._within_limit(step.action, settings.per_hour):
            return await self._finish(entry, "limited", f"{settings.per_hour} in this hour already")
        return await self._carry_out(fresh, entry)

    async def _carry_out(self, step: Plan, entry: dict[str, Any]) -> dict[str, Any]:
        await self._write(entry | {"outcome": "begun", "detail": ""})
        try:
            done = await kit.child.call(
                _EXECUTORS[step.action], *step.arguments, deadline=DEADLINE_SECONDS
            )
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            return await self._finish(entry, "failed", str(error))
        if not done:
            return await self._finish(entry, "gone", "nothing was left to do")
        return await self._finish(entry, "done", f"{done}")

    def _within_limit(self, action: str, per_hour: int) -> bool:
        now = time.monotonic()
        recent = [at for at in self._done.get(action, []) if now - at < 3600]
        if len(recent) >= per_hour:
            return False
        self._done[action] = [*recent, now]
        return True

    async def _finish(self, entry: dict[str, Any], outcome: str, detail: str) -> dict[str, Any]:
        entry |= {"outcome": outcome, "detail": detail}
        self.counts[entry["action"], outcome] = self.counts.get((entry["action"], outcome), 0) + 1
        await self._write(entry)
        return entry

    async def _write(self, entry: Mapping[str, Any]) -> None:
        """To the log, to ``last`` and to the journal. A disk that fails is logged, not raised."""
        self.last.append(dict(entry))
        log.warning("volume action", **entry)
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await asyncio.to_thread(kit.files.append, self._path, entry)
        except (OSError, TimeoutError) as error:
            log.error("cannot write the journal of actions", error=str(error) or "timeout")
