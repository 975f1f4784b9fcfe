"""What the audit may do by itself: detach leaked mounts. Off by default, checked again before each
action, journalled. (Broken mappings are the affair of ``repair``, the one way to unmap.)

``plans`` says which actions the current findings call for and what forbids each; it is pure.
``Runner`` carries a plan out: modes, limits, a new scan and a new plan immediately before it, and
the journal of actions.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
import kit.tasks
from kit.findings import Finding
from linux import blockdev
from volumes.audit import executors
from volumes.audit.inventory.model import Inventory
from volumes.audit.rules import mounting
from volumes.settings import ActionSettings

log = structlog.get_logger("audit.actions")

DETACH = "detach-leaked"
_RETRY_SECONDS = 60.0
_REPEAT_SECONDS = 3600.0  # a refusal or a dry run is not reported again sooner
_WRITE_SECONDS = 5.0  # for a line of the journal
_READ_SECONDS = 10.0
_MOST_LAST = 100


@dataclass(frozen=True)
class ActionPlan:
    """One action. ``refusal`` says why it must not be carried out; empty when it may."""

    finding: str  # id
    device: str
    what: str  # for people
    arguments: tuple[object, ...] = ()  # of executors.detach
    refusal: str = ""


def plans(
    found: list[Finding], inventory: Inventory, former: Mapping[str, frozenset[str]]
) -> list[ActionPlan]:
    """Every action for the findings. ``former``: where the host had each device mounted."""
    steps = []
    for finding in found:
        device = inventory.device(finding.evidence.get("device", ""))
        if device is None:
            continue
        if finding.rule == mounting.LEAKED_MOUNT and finding.evidence.get("kind") == "mount":
            steps.append(_detach(finding, device, inventory, former.get(device.name, frozenset())))
    return steps


def _detach(
    finding: Finding, device: blockdev.BlockDevice, inventory: Inventory, former: frozenset[str]
) -> ActionPlan:
    inode = finding.evidence.get("namespace", "")
    space = next((s for s in inventory.spaces if str(s.inode) == inode), None)
    every = [p for p in space.places if p.device in device.numbers] if space else []
    at_home = mounting.on_host(inventory, device)
    places = [place for place in every if place.device not in at_home]
    if space is None or not every:
        refusal = "it is no longer mounted there"
    elif not places:
        refusal = "the host has it mounted again"
    elif inventory.no_records:
        refusal = f"{inventory.no_records}, so nobody can tell whose volume it is"
    else:
        refusal = mounting.why_not_detach(inventory, device, space, places, former)
    owner = space.owner if space else None
    way = ""
    if owner is not None:
        task = f"/task/{owner.thread}" if owner.thread else ""
        way = f"/proc/{owner.pid}{task}/ns/mnt"
    targets = sorted({place.target for place in places})
    return ActionPlan(
        finding.id,
        device.name,
        f"unmount {', '.join(targets)} ({device.name}) in mount namespace {inode}",
        (
            way,
            space.id if space else 0,
            space.inode if space else 0,
            # The mounts' own numbers: a file system on a layer does not have the device's.
            [[*place.device, place.target] for place in places],
        ),
        refusal,
    )


# -- carrying out ------------------------------------------------------------------------------


class ActionJournal:
    """What the audit does to the node, actions and steps of repairs: one JSON line each, in two
    files of at most 1 MiB. Whatever is done is written as ``begun`` before it starts and with its
    outcome after it, so one that the agent's end interrupted can be recognised."""

    def __init__(self, state_dir: Path) -> None:
        self.last: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_LAST)
        self._path = state_dir / "volumes" / "actions.jsonl"

    async def write(self, entry: Mapping[str, Any]) -> bool:
        """To the log, to ``last`` and to the file; False when the disk failed, which is logged."""
        self.last.append(dict(entry))
        log.warning("volume action", **entry)
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await kit.tasks.STATE.call(kit.files.append, self._path, entry)
        except (OSError, TimeoutError) as error:
            log.error("cannot write the journal of actions", error=str(error) or "timeout")
            return False
        return True

    async def recall(self) -> list[dict[str, Any]] | None:
        """As ``read``; None when the disk does not answer, which is logged."""
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await kit.tasks.STATE.call(self.read)
        except TimeoutError as error:
            log.error("cannot read the journal of actions", error=str(error) or "timeout")
            return None

    def read(self) -> list[dict[str, Any]]:
        """What earlier agents wrote, the oldest first. Blocks. Damaged lines are left out."""
        found = []
        for file in (self._path.with_name(f"{self._path.name}.1"), self._path):
            with contextlib.suppress(OSError):
                found += kit.files.entries(file.read_bytes().splitlines())
        return found


class Runner:
    """Carries plans out, at most ``per_hour`` of them an hour."""

    def __init__(self, state_dir: Path) -> None:
        self.journal = ActionJournal(state_dir)
        self.last = self.journal.last
        self.counts: dict[tuple[str, str], int] = {}  # (action, outcome)
        self._not_before: dict[str, float] = {}
        self._done: list[float] = []

    def due(self, plans: list[ActionPlan], settings: ActionSettings) -> list[ActionPlan]:
        """Plans that the settings ask for and that were not tried a moment ago. In mode dry-run
        also refused ones, so that the journal says why."""
        now = time.monotonic()
        self._not_before = {key: until for key, until in self._not_before.items() if now < until}
        mode = settings.detach_leaked
        return [
            step
            for step in plans
            if mode != "off"
            and step.finding not in self._not_before
            and (not step.refusal or mode == "dry-run")
        ]

    async def run(
        self,
        step: ActionPlan,
        settings: ActionSettings,
        again: Callable[[], Awaitable[list[ActionPlan]]],
        *,
        dry_run: bool | None = None,
        by: str = "audit",
    ) -> dict[str, Any]:
        """Carry one plan out, or say what would be done; returns the journal entry. ``again``
        scans and plans once more."""
        self._not_before[step.finding] = time.monotonic() + _RETRY_SECONDS
        dry = settings.detach_leaked != "on" if dry_run is None else dry_run
        entry: dict[str, Any] = {
            "time": time.time(),
            "action": DETACH,
            "finding": step.finding,
            "device": step.device,
            "what": step.what,
            "by": by,
            "dry_run": dry,
        }
        fresh = next((p for p in await again() if p.finding == step.finding), None)
        if fresh is None:
            return await self._finish(entry, "gone", "the trouble is over")
        if fresh.refusal:
            self._not_before[step.finding] = time.monotonic() + _REPEAT_SECONDS
            return await self._finish(entry, "refused", fresh.refusal)
        entry["what"] = fresh.what
        if dry:
            self._not_before[step.finding] = time.monotonic() + _REPEAT_SECONDS
            return await self._finish(entry, "dry-run", "would be done")
        if not self._within_limit(settings.per_hour):
            return await self._finish(entry, "limited", f"{settings.per_hour} in this hour already")
        return await self._carry_out(fresh, entry)

    async def _carry_out(self, step: ActionPlan, entry: dict[str, Any]) -> dict[str, Any]:
        await self.journal.write(entry | {"outcome": "begun", "detail": ""})
        try:
            done = await kit.child.call(
                executors.detach, *step.arguments, deadline=executors.DEADLINE_SECONDS
            )
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            return await self._finish(entry, "failed", str(error))
        if not done:
            return await self._finish(entry, "gone", "nothing was left to do")
        return await self._finish(entry, "done", f"{done}")

    def _within_limit(self, per_hour: int) -> bool:
        now = time.monotonic()
        self._done = [at for at in self._done if now - at < 3600]
        if len(self._done) >= per_hour:
            return False
        self._done.append(now)
        return True

    async def _finish(self, entry: dict[str, Any], outcome: str, detail: str) -> dict[str, Any]:
        entry |= {"outcome": outcome, "detail": detail}
        self.counts[DETACH, outcome] = self.counts.get((DETACH, outcome), 0) + 1
        await self.journal.write(entry)
        return entry
