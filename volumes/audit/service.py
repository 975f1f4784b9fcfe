"""The audit: scans the node, applies the rules, reports findings, and acts where it is allowed to.

One round is: a quick scan and whatever scans follow from it (scheduler), all rules over the result
(evaluate), the life of their findings (finding_state), the report, and the actions that are due
(actions). A round follows every change of mounts or block devices and every relevant log line, at
most one per ``settle``, and else a schedule.

Invariant: everything that can hang in the kernel runs in child processes: the scan, the log child,
one call for each cluster, one for each action.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

import kit.errors
import kit.findings
import kit.room
import kit.tasks
from ceph import protocol
from linux import netlink, syscalls
from volumes.audit import (
    actions,
    cluster_polling,
    evaluate,
    finding_state,
    repairer,
    scheduler,
)
from volumes.audit.inventory import scan
from volumes.audit.inventory.model import Inventory
from volumes.audit.logs import follower, matcher, patterns
from volumes.audit.rules.agent import LOG_PREFIX
from volumes.audit.rules.mappings import MAPPED_ELSEWHERE
from volumes.audit.types import GuardView, Scene
from volumes.ledger.witness import Witness
from volumes.node.watch import NodeWatch
from volumes.settings import AuditSettings, VolumesSettings

log = structlog.get_logger("audit")

ORIGIN = "volume-audit"
_DEBOUNCE_SECONDS = 0.2  # a burst of mounts is one change
# While kubelet has a mount namespace of its own, whose mounts are heard of a minute late at first.
_OWN_NAMESPACE_SECONDS = 5.0
_MOST_SCANS = 3  # of one round: quick, namespaces, open files
_MOST_FORMER = 64
_ALL_SECONDS = 1800.0  # between two readings of all devices, named by uevents or not
_MOST_CHANGED = 256  # devices; of more, all are read


class Audit:
    """``wanted``: with the guard's settings that are in force. ``guard`` returns the guard's state;
    it is called each round and must not block."""

    def __init__(
        self,
        wanted: VolumesSettings,
        witness: Witness,
        node: NodeWatch,
        *,
        state_dir: Path,
        reporter: kit.findings.Reporter,
        guard: Callable[[], GuardView | None],
    ) -> None:
        self.wanted = wanted
        self.settings = wanted.audit
        self.inventory: Inventory | None = None
        self.states: list[evaluate.RuleState] = []
        self.findings: list[kit.findings.Finding] = []
        self.scanner = scan.Scanner()
        self.clusters = cluster_polling.Poller(self.wake)
        self.runner = actions.Runner(state_dir)
        self.repairer = repairer.Repairer(wanted.repair, self.runner.journal, witness)
        self.follower: follower.LogFollower | None = None
        self._reporter = reporter
        self._guard = guard
        self._patterns = patterns.PatternFile()
        self._hits = patterns.PatternHits()
        self._memory = scheduler.ScanMemory()
        self._state: finding_state.State = {}
        self._former: dict[scheduler.Key, frozenset[str]] = {}
        self._blind = ""
        self._wake = asyncio.Event()
        self._round = asyncio.Lock()
        self._tasks: list[asyncio.Task[Any]] = []
        self._log_task: asyncio.Task[None] | None = None
        self._node = node
        self._changed: set[str] | None = None  # devices that uevents named; None: read all
        self._all_read = 0.0  # monotonic time
        self._advanced = 0.0  # monotonic time of the loop's last round

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """SettingsError for an unusable pattern file; HostError without the host's /proc. Nothing
        starts where the audit is disabled."""
        if not self.settings.enabled:
            return
        self._load_patterns(self.settings)
        self._node.devices.append(self._devices_changed)
        self._node.mounts.append(self._mounts_changed)
        await self._node.start(self)
        if self._node.blind:
            raise kit.errors.HostError(
                "/proc/1/mountinfo",
                f"cannot be read ({self._node.blind})",
                "run with the host's pid namespace (hostPID: true)",
            )
        self._advanced = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._loop(), name="audit"),
            asyncio.create_task(
                self.clusters.run(lambda: self.settings, lambda: self.wanted.clusters),
                name="audit clusters",
            ),
        ]
        self._follow_logs()

    def _load_patterns(self, settings: AuditSettings) -> None:
        self._patterns = patterns.read(settings.logs.patterns)

    def _follow_logs(self) -> None:
        if self._log_task is not None:
            self._log_task.cancel()
        self.follower = self._log_task = None
        if not (self.settings.logs.kernel or self.settings.logs.sources):
            return
        self.follower = follower.LogFollower(
            follower.configuration(
                self.settings.logs, tuple(self._patterns.by_id.values()), self.wanted.guard.drivers
            ),
            self._log_hits,
        )
        self._log_task = asyncio.create_task(self.follower.run(), name="audit logs")

    async def reconcile(self, wanted: VolumesSettings) -> Sequence[str]:
        """Take over new settings; all but ``enabled`` change while running. Raises what ended the
        loop."""
        before = self.settings
        refused = [] if wanted.audit.enabled is before.enabled else ["audit.enabled"]
        self.repairer.settings = wanted.repair
        if not before.enabled:
            return refused
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        new = wanted.audit.model_copy(update={"enabled": True}) if refused else wanted.audit
        now = await asyncio.to_thread(patterns.stamp, new.logs.patterns)
        other_patterns = now != self._patterns.stamp
        if other_patterns or (new, _beside(wanted)) != (before, _beside(self.wanted)):
            drivers_changed = wanted.guard.drivers != self.wanted.guard.drivers
            logs_changed = other_patterns or new.logs != before.logs or drivers_changed
            if logs_changed:
                self._load_patterns(new)
            self.settings, self.wanted = new, wanted
            if logs_changed:
                self._follow_logs()
            self.clusters.ask_soon()
            self.wake()
        return refused

    async def stop(self) -> None:
        """End the child processes. Findings stay as they were reported."""
        await self._node.stop(self)
        await kit.tasks.end(*self._tasks, self._log_task)
        self._tasks, self._log_task = [], None
        await self.scanner.close()

    def health(self) -> kit.room.Health:
        if not self.settings.enabled:
            return kit.room.Health(alive=True, ready=True)
        longest = self.settings.interval + _MOST_SCANS * self.settings.look_timeout + 60.0
        alive = bool(self._tasks) and not any(task.done() for task in self._tasks)
        alive = alive and time.monotonic() - self._advanced < longest
        reasons = [self._blind] if self._blind else []
        if self.follower is not None and self.follower.trouble:
            reasons.append(self.follower.trouble)
        return kit.room.Health(alive, alive and self.inventory is not None, reasons)

    # -- what starts a round -----------------------------------------------------------------------

    def wake(self) -> None:
        """Start a round soon."""
        self._wake.set()

    def _mounts_changed(self) -> None:
        self._memory = dataclasses.replace(self._memory, changed_at=time.time())
        self._wake.set()

    def _devices_changed(self, found: Sequence[netlink.Uevent] | None) -> None:
        """Note which devices the uevents name; None: some may be lost."""
        if found is None or self._changed is None:
            self._changed = None
        else:
            self._changed |= {event.name for event in found}
            if len(self._changed) > _MOST_CHANGED:
                self._changed = None
        self._wake.set()

    def _log_hits(self, found: Sequence[matcher.Hit]) -> None:
        self._note(found)
        self._wake.set()

    def _concerns(self, device: str) -> bool:
        """Whether a log line is about what the audit watches. One that names no device may be."""
        return not device or self.settings.watches(device)

    def _note(self, found: Sequence[matcher.Hit] = ()) -> None:
        """Add log hits, and drop old ones."""
        hold = self.settings.logs.hold
        about = [(hit, hit.groups.get("device", "")) for hit in found]
        found = [
            h for h, name in about if self._concerns(name) or name.startswith(patterns.MAPPING)
        ]
        hits = patterns.unmounted(self._hits, self.inventory)
        self._hits = patterns.note(hits, found, self._patterns.by_id, time.time(), hold)

    async def _loop(self) -> None:
        while True:
            self._advanced = time.monotonic()
            self._wake.clear()
            await self.round()
            now = time.time()
            pause = scheduler.next_round(
                self._memory,
                self.settings,
                now,
                finding_state.pending(self._state, now),
                finding_state.youngest(self._state, scheduler.RECHECKED, now),
                blind=bool(self._blind),
            )
            if self.inventory is not None and len(self.inventory.host_spaces) > 1:
                pause = min(pause, _OWN_NAMESPACE_SECONDS)
            settled = asyncio.create_task(asyncio.sleep(self.settings.settle))
            if await kit.tasks.until(self._wake, pause):  # else the schedule is due
                await asyncio.sleep(_DEBOUNCE_SECONDS)
            await settled  # however many changes there are

    # -- one round ---------------------------------------------------------------------------------

    async def round(self, *, full: bool = False) -> Inventory | None:
        """Scan, evaluate, report, act. ``full`` visits the mount namespaces in any case. None when
        the node could not be scanned."""
        async with self._round:
            if full:
                self._memory = dataclasses.replace(self._memory, deep_at=0.0)
            await self._scan()
            await self._evaluate()
            steps = self.plans() if not self._blind else []
            due = self.runner.due(steps, self.settings.actions)
        for step in due:
            await self.runner.run(step, self.settings.actions, self._plans_afresh)
            self.wake()
        look = self._look()
        if look is not None:
            if await self.repairer.ask_attached(look.inventory):
                self.wake()
            again = await self.repairer.work(look, self._look_afresh)
            if again is not None:
                asyncio.get_running_loop().call_later(again, self.wake)
        return None if self._blind else self.inventory

    async def _scan(self, depth: scheduler.Depth | None = None) -> None:
        """Run the requested scan, or the one that is due, and those that follow from it; blind
        unless all succeed."""
        fresh = False
        depth = depth or scheduler.first(self._memory, self.settings, time.time())
        try:
            for _ in range(_MOST_SCANS):
                began = time.time()
                new = await self.scanner.scan(self._request(depth), self.settings.look_timeout)
                self._memory = scheduler.fulfilled(self._memory, depth, began)
                fresh = fresh or new.deep
                merged = scheduler.merged(new, self.inventory)
                self.inventory = dataclasses.replace(merged, deep=fresh)  # of this round
                self._remember(self.inventory)
                scene = self._scene()
                depth, self._memory = scheduler.consider(
                    scene,
                    self.inventory,
                    self._memory,
                    fresh=fresh,
                    unconfirmed=finding_state.unconfirmed(self._state, scene.now),
                )
                if not depth:
                    break
            self._blind = ""
        except scan.BlindError as error:
            self._changed = None  # what uevents named was not read
            if not self._blind:
                log.warning("cannot scan the node", cause=str(error))
            self._blind = f"{error.thing}: {error.cause}"

    def _request(self, depth: scheduler.Depth) -> scan.Request:
        awake = self._wake.is_set()
        self._node.hear()  # which wakes; but what is heard here, this very scan reads
        if not awake:
            self._wake.clear()
        if depth.deep and time.monotonic() - self._all_read >= _ALL_SECONDS:
            self._changed = None
        changed = None if self._changed is None else tuple(sorted(self._changed))
        if changed is None:
            self._all_read = time.monotonic()
        self._changed = set() if self._node.hears_devices else None
        return scan.Request(
            drivers=self.wanted.guard.drivers,
            kubelet=str(self.wanted.this_node.kubelet.root_dir),
            proc="/proc",
            sys="/sys",
            containers=str(self.settings.containers),
            deep=depth.deep,
            users_of=depth.users_of,
            kubelet_set="root_dir" in self.wanted.this_node.kubelet.model_fields_set,
            changed=changed,
            names=self.settings.names,
        )

    def _remember(self, inventory: Inventory) -> None:
        """Where the host has had each device mounted, which tells what a leaked copy copies."""
        former = {}
        for device in inventory.devices:
            name = scheduler.key(device)
            targets = {place.target for place in inventory.on_host(device)}
            known = self._former.get(name, frozenset())
            former[name] = frozenset(sorted(known | targets)[:_MOST_FORMER])
        self._former = former
        self.clusters.want(inventory)

    def cluster_views(self) -> dict[str, protocol.ClusterView | str]:
        """The latest view of every configured cluster, or why there is none."""
        return {
            c.name: self.clusters.views.get(c.name, "not asked yet") for c in self.wanted.clusters
        }

    def _scene(self) -> Scene:
        try:
            clock = syscalls.clock_state()
        except OSError:
            clock = None
        return Scene(
            now=time.time(),
            settings=self.settings,
            inventory=self.inventory,
            blind=self._blind,
            clusters=self.cluster_views(),
            watched_by=self.clusters.watched_by,
            expected_versions={
                c.name: c.expected_version for c in self.wanted.clusters if c.expected_version
            },
            paths=self.clusters.paths,
            guard=self._guard(),
            clock=clock,
            unread_logs=self.follower.states() if self.follower else {},
            flooding_logs={name: patterns.quota(name) for name in sorted(self._hits.flooding)},
            logs=tuple(
                hit
                for hit in patterns.join(
                    patterns.frequent(self._hits, self._patterns.by_id),
                    self.inventory,
                    self.wanted.guard.drivers,
                )
                if self._concerns(hit.device)  # the setting may be newer than the line
            ),
            former=self._mounted_before(),
            detached=self.repairer.detached,
        )

    def _mounted_before(self) -> dict[str, frozenset[str]]:
        return {name: targets for (name, _, _), targets in self._former.items()}

    async def _evaluate(self) -> None:
        """With hundreds of volumes the rules take a while; the loop has uevents and leases to
        answer."""
        self._note()
        judged, self.states = await asyncio.to_thread(evaluate.evaluate, self._scene())
        known = {result.rule for result in judged}
        # A log line's rule vanishes with its hit: without this its finding would never clear.
        judged += [
            finding_state.Judged(rule, ())
            for rule in {entry.rule for entry in self._state.values()} - known
            if rule.startswith(LOG_PREFIX)
        ]
        clear_after = self.settings.clear_after
        self._state = finding_state.advance(self._state, judged, time.time(), clear_after)
        self.findings = finding_state.findings(self._state)
        self._reporter.report(ORIGIN, self.findings)
        if any(
            entry.rule == MAPPED_ELSEWHERE and (entry.waiting or entry.clearing)
            for entry in self._state.values()
        ):
            self.clusters.ask_soon()

    def plans(self) -> list[actions.ActionPlan]:
        """Every action for the current findings, also those that are refused."""
        if self.inventory is None:
            return []
        return actions.plans(self.findings, self.inventory, self._mounted_before())

    async def _plans_afresh(self) -> list[actions.ActionPlan]:
        """The plans after a scan of this moment; none when it fails."""
        async with self._round:
            await self._scan_anew(sorted({step.device for step in self.plans() if step.device}))
            return [] if self._blind else self.plans()

    def _look(self) -> repairer.Look | None:
        if self.inventory is None or self._blind:
            return None
        return repairer.Look(self.inventory, self.findings, self._guard())

    async def _look_afresh(self) -> repairer.Look | None:
        """After a scan of this moment that searched the users of broken devices."""
        async with self._round:
            before = self._look()
            if before is None:
                return None
            await self._scan_anew(self.repairer.users_of(before))
            return self._look()

    async def _scan_anew(self, users_of: Sequence[str]) -> None:
        """All of the node, with the users of these devices, and evaluate that."""
        self._changed = None
        await self._scan(scheduler.Depth(deep=True, users_of=tuple(users_of)))
        await self._evaluate()

    # -- for the API -------------------------------------------------------------------------------

    def age(self) -> float:
        """Seconds since the last scan; since 1970 when there was none."""
        return time.time() - (self.inventory.taken if self.inventory else 0.0)

    async def act(self, finding: str, *, dry_run: bool) -> dict[str, Any]:
        """Carry out the action for a finding. NotFoundError when there is none."""
        step = next((p for p in self.plans() if p.finding == finding), None)
        if step is None:
            raise kit.errors.NotFoundError(
                f"finding {finding}",
                "the agent has no action for it",
                "read its advice in 'nodeagent volume findings'",
            )
        result = await self.runner.run(
            step, self.settings.actions, self._plans_afresh, dry_run=dry_run, by="operator"
        )
        self.wake()
        return result

    async def audit_now(self) -> None:
        """A full round, clusters included."""
        if self.wanted.clusters:
            timeout = self.settings.cluster_timeout
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout + 5.0):
                    await self.clusters.ask(self.wanted.clusters, timeout)
        await self.round(full=True)


def _beside(wanted: VolumesSettings) -> tuple[object, ...]:
    """What the audit looks at beside its own section."""
    return wanted.clusters, wanted.guard.drivers, wanted.this_node.kubelet
