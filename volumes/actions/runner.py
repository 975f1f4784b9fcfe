"""Deciding whether a plan is carried out, and doing it: modes, limits, journal."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import structlog

import kit.child
import kit.errors
from kit.findings import Finding, Severity
from volumes.actions import hands, plan
from volumes.actions.journal import Journal
from volumes.actions.plan import Plan
from volumes.audit.settings import ActionSettings

log = structlog.get_logger("audit.actions")

DEADLINE_SECONDS = 30.0
RETRY_SECONDS = 60.0
SAID_SECONDS = 3600.0  # a refusal or a dry run need not be said again sooner
TAINT_KEY = "nodeagent/volume-critical"
_HANDS: Mapping[str, Callable[..., int]] = {
    plan.DETACH: hands.detach,
    plan.UNMAP: hands.unmap,
    plan.READ_ONLY: hands.set_read_only,
}
_ORDER = {
    plan.DETACH: ("way", "namespace_id", "inode", "copies"),
    plan.UNMAP: ("name", "driver", "device", "diskseq", "mapping"),
    plan.READ_ONLY: ("path", "device", "diskseq"),
}


class Taints(Protocol):
    """The port to the node's taints; comes with Kubernetes."""

    async def set(self, key: str, wanted: bool, reason: str) -> None:
        """Put the taint on or take it off. AgentError when it cannot."""


class Runner:
    """Carries plans out, each kind at most ``per_hour`` times."""

    def __init__(self, state_dir: Path, taints: Taints | None = None) -> None:
        self.journal = Journal(state_dir / "volumes" / "actions.jsonl")
        self._taints = taints
        # What the taint was last said or made to be, and in which mode; None: not known yet.
        self._tainted: tuple[str, bool] | None = None
        self._tried: dict[tuple[str, str], float] = {}
        self._done: dict[str, list[float]] = {}
        self.counts: dict[tuple[str, str], int] = {}

    @staticmethod
    def mode(settings: ActionSettings, action: str) -> str:
        return str(
            {
                plan.DETACH: settings.detach_leaked,
                plan.UNMAP: settings.unmap_orphan,
                plan.READ_ONLY: settings.set_readonly,
                plan.TAINT: settings.taint,
            }[action]
        )

    def due(self, plans: list[Plan], settings: ActionSettings) -> list[Plan]:
        """Plans that the settings ask for and that were not tried just now. Refused ones too."""
        now = time.monotonic()
        self._tried = {key: until for key, until in self._tried.items() if now < until}
        return [
            step
            for step in plans
            if self.mode(settings, step.action) != "off"
            and (step.action, step.finding) not in self._tried
            and (not step.refusal or self.mode(settings, step.action) == "dry-run")
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
        """Carry one plan out, or say what would be done. Looks again just before (``again``)."""
        self._tried[step.action, step.finding] = time.monotonic() + RETRY_SECONDS
        dry = self.mode(settings, step.action) != "on" if dry_run is None else dry_run
        entry: dict[str, Any] = {
            "time": time.time(),
            "action": step.action,
            "finding": step.finding,
            "device": step.device,
            "what": step.what,
            "by": by,
            "dry_run": dry,
        }
        fresh = next(
            (p for p in await again() if (p.action, p.finding) == (step.action, step.finding)), None
        )
        if fresh is None:
            return await self._tell(entry, "gone", "the trouble is over")
        if fresh.refusal:
            self._tried[step.action, step.finding] = time.monotonic() + SAID_SECONDS
            return await self._tell(entry, "refused", fresh.refusal)
        entry["what"] = fresh.what
        if dry:
            self._tried[step.action, step.finding] = time.monotonic() + SAID_SECONDS
            return await self._tell(entry, "dry-run", "would be done")
        if not self._within_limit(step.action, settings.per_hour):
            return await self._tell(entry, "limited", f"{settings.per_hour} in this hour already")
        return await self._carry_out(fresh, entry)

    async def _carry_out(self, step: Plan, entry: dict[str, Any]) -> dict[str, Any]:
        arguments = [step.arguments[name] for name in _ORDER[step.action]]
        # An agent that ends in the middle of it must not leave a deed that nobody wrote down.
        await self.journal.write(entry | {"outcome": "begun", "detail": ""})
        try:
            done = await kit.child.call(_HANDS[step.action], *arguments, deadline=DEADLINE_SECONDS)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            return await self._tell(entry, "failed", str(error))
        if not done:
            return await self._tell(entry, "gone", "nothing was there any more")
        return await self._tell(entry, "done", f"{done}")

    def _within_limit(self, action: str, per_hour: int) -> bool:
        now = time.monotonic()
        recent = [at for at in self._done.get(action, []) if now - at < 3600]
        if len(recent) >= per_hour:
            return False
        self._done[action] = [*recent, now]
        return True

    async def _tell(self, entry: dict[str, Any], outcome: str, detail: str) -> dict[str, Any]:
        entry |= {"outcome": outcome, "detail": detail}
        self.counts[entry["action"], outcome] = self.counts.get((entry["action"], outcome), 0) + 1
        await self.journal.write(entry)
        return entry

    async def taint(self, found: list[Finding], settings: ActionSettings) -> None:
        """Keep the node's taint as the critical findings are. Never raises.

        Called after a round that saw the node. What an earlier agent left is not known: the first
        round sets it either way.
        """
        critical = [f for f in found if f.severity is Severity.CRITICAL]
        mode = str(settings.taint)
        was_on = self._tainted == ("on", True)
        wanted = bool(critical) and mode != "off"
        if self._tainted == (mode, wanted) or (mode == "off" and not was_on):
            return
        entry: dict[str, Any] = {
            "time": time.time(),
            "action": plan.TAINT,
            "finding": critical[0].id if critical else "",
            "device": "",
            "what": f"{'put on' if wanted else 'take off'} the taint {TAINT_KEY}",
            "by": "audit",
            "dry_run": mode == "dry-run",
        }
        first, self._tainted = self._tainted is None, (mode, wanted)
        if mode == "dry-run" or self._taints is None:
            if first and not wanted:
                return  # nothing would be done
            if mode == "dry-run":
                await self._tell(entry, "dry-run", "would be done")
            else:
                await self._tell(entry, "failed", "no Kubernetes API: the node cannot be tainted")
            return
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await self._taints.set(TAINT_KEY, wanted, entry["finding"])
        except (kit.errors.AgentError, TimeoutError) as error:
            self._tainted = None  # tried again with the next look
            await self._tell(entry, "failed", str(error))
            return
        if wanted or not first:
            await self._tell(entry, "done", "")
