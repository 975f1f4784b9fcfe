"""The audit as the volumes room sees it: the shape of kit.room.Component."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import Metric

import kit.errors
import kit.findings
import kit.room
from linux import mountinfo, netlink, syscalls
from volumes.actions import plan, runner
from volumes.audit import attention, clusters, figures, judging, standing
from volumes.audit.settings import AuditSettings
from volumes.inventory import client, scan
from volumes.inventory.cluster import ClusterView
from volumes.inventory.model import Inventory
from volumes.logs import book, patterns
from volumes.logs import client as log_client
from volumes.rules.base import Claim, GuardView, Scene

log = structlog.get_logger("audit")

ORIGIN = "volume-audit"
HOST_TABLE = "/proc/1/mountinfo"
# A burst of mounts is one change.
DEBOUNCE_SECONDS = 0.2
# kubelet in a mount namespace of its own: its table is not pid 1's, which is all that is watched.
OWN_NAMESPACE_SECONDS = 5.0
MOST_LOOKS = 3  # of one round: quick, namespaces, open files
MOST_FORMER = 64


def _nothing() -> None:
    return None


class Audit:
    """Looks at the node, judges, reports, and acts where it may.

    ``guard`` and ``claims`` are asked each round and must not block; None means not known.
    """

    name = "audit"

    def __init__(
        self,
        settings: AuditSettings,
        *,
        drivers: Sequence[str],
        state_dir: Path,
        reporter: kit.findings.Reporter,
        guard: Callable[[], GuardView | None] = _nothing,
        claims: Callable[[], Mapping[str, Claim] | None] = _nothing,
        taints: runner.Taints | None = None,
        log_options: dict[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.drivers = tuple(drivers)
        self.inventory: Inventory | None = None
        self.states: list[judging.RuleState] = []
        self.findings: list[kit.findings.Finding] = []
        self.rounds = 0
        self.round_seconds = 0.0
        self._reporter = reporter
        self._guard = guard
        self._claims = claims
        self._log_options = log_options
        self.scanner = client.Scanner()
        self.clusters = clusters.Clusters(self.wake)
        self.runner = runner.Runner(state_dir, taints)
        self._patterns: dict[str, patterns.Pattern] = {}
        self._book = book.Book()
        self.follower: log_client.Follower | None = None
        self._memory = attention.Memory()
        self._standing: standing.Standing = {}
        self._former: dict[attention.Key, frozenset[str]] = {}
        self._blind = ""
        self._wake = asyncio.Event()
        self._round = asyncio.Lock()
        self._tasks: list[asyncio.Task[Any]] = []
        self._log_task: asyncio.Task[None] | None = None
        self._watch: mountinfo.Watch | None = None
        self._uevents: netlink.Uevents | None = None
        self._turned = 0.0  # monotonic: when the loop last went round

    # -- component -------------------------------------------------------------------------------

    async def start(self) -> None:
        """SettingsError for an unusable pattern file; HostError without the host's /proc."""
        self._load_patterns(self.settings)
        try:
            self._watch = mountinfo.Watch(HOST_TABLE, self._mounts_changed)
        except OSError as error:
            raise kit.errors.HostError(
                HOST_TABLE,
                f"cannot be read ({error.strerror})",
                "run with the host's pid namespace (hostPID: true)",
            ) from error
        self._listen()
        self._turned = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._loop(), name="audit"),
            asyncio.create_task(self.clusters.run(lambda: self.settings), name="audit clusters"),
        ]
        self._follow_logs()

    def _listen(self) -> None:
        try:
            self._uevents = netlink.Uevents()
            asyncio.get_running_loop().add_reader(self._uevents.fd, self._devices_changed)
        except OSError as error:
            log.warning("no uevents: devices are found by the slow pass", error=str(error))

    def _load_patterns(self, settings: AuditSettings) -> None:
        self._patterns = {p.id: p for p in patterns.load(settings.logs.patterns)}

    def _follow_logs(self) -> None:
        if self._log_task is not None:
            self._log_task.cancel()
        self.follower = log_client.Follower(
            self.settings.logs,
            tuple(self._patterns.values()),
            self.drivers,
            self._log_hits,
            extra=self._log_options,
        )
        self._log_task = asyncio.create_task(self.follower.run(), name="audit logs")

    async def reconcile(
        self, settings: AuditSettings, drivers: Sequence[str] | None = None
    ) -> Sequence[str]:
        """Everything changes while running. Raises what ended the work, if something did."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()
        new_drivers = self.drivers if drivers is None else tuple(drivers)
        if settings != self.settings or new_drivers != self.drivers:
            logs_changed = settings.logs != self.settings.logs or new_drivers != self.drivers
            if logs_changed:
                self._load_patterns(settings)
            self.settings, self.drivers = settings, new_drivers
            if logs_changed:
                self._follow_logs()
            self.clusters.ask_soon()
            self.wake()
        return ()

    async def stop(self) -> None:
        """Ends the children; findings stay as they were reported."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._uevents is not None:
            asyncio.get_running_loop().remove_reader(self._uevents.fd)
            self._uevents.close()
            self._uevents = None
        tasks = [*self._tasks, *([self._log_task] if self._log_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks, self._log_task = [], None
        await self.scanner.close()

    def health(self) -> kit.room.Health:
        longest = self.settings.interval + MOST_LOOKS * self.settings.look_timeout + 60.0
        alive = bool(self._tasks) and not any(task.done() for task in self._tasks)
        alive = alive and time.monotonic() - self._turned < longest
        reasons = [self._blind] if self._blind else []
        if self.follower is not None and self.follower.trouble:
            reasons.append(self.follower.trouble)
        return kit.room.Health(alive, alive and self.inventory is not None, reasons)

    def metrics(self) -> Iterable[Metric]:
        return figures.metrics(self)

    # -- what wakes it ---------------------------------------------------------------------------

    def wake(self) -> None:
        """Look soon."""
        self._wake.set()

    def _mounts_changed(self) -> None:
        self._memory = dataclasses.replace(self._memory, changed_at=time.time())
        self._wake.set()

    def _devices_changed(self) -> None:
        assert self._uevents is not None
        with contextlib.suppress(netlink.Overflow):  # the look sees everything anyway
            self._uevents.read()
        self._wake.set()

    def _log_hits(self, hits: list[dict[str, Any]]) -> None:
        self._book = book.note(
            self._book, hits, self._patterns, time.time(), self.settings.logs.hold
        )
        self._wake.set()

    # -- the work --------------------------------------------------------------------------------

    async def _loop(self) -> None:
        while True:
            self._turned = time.monotonic()
            self._wake.clear()
            await self.look()
            pause = attention.next_look(
                self._memory,
                self.settings,
                time.time(),
                standing.pending(self._standing, time.time()),
                self._youngest(),
                blind=bool(self._blind),
            )
            if self.inventory is not None and len(self.inventory.host_spaces) > 1:
                pause = min(pause, OWN_NAMESPACE_SECONDS)
            rest = asyncio.create_task(asyncio.sleep(self.settings.settle))
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
                await asyncio.sleep(DEBOUNCE_SECONDS)
            except TimeoutError:
                pass  # nothing happened, it is time
            await rest  # however many changes: one look in 'settle'

    def _youngest(self) -> float | None:
        ages = [
            time.time() - entry.since
            for entry in self._standing.values()
            if entry.raised and entry.rule in attention.RECHECKED
        ]
        return min(ages, default=None)

    async def look(self, *, full: bool = False) -> Inventory | None:
        """One round: look, judge, report, act. None when the node could not be looked at."""
        async with self._round:
            began = time.monotonic()
            if full:
                self._memory = dataclasses.replace(self._memory, deep_at=0.0)
            await self._see()
            self._judge()
            self.rounds += 1
            self.round_seconds = time.monotonic() - began
            steps = self._plans() if self.inventory is not None and not self._blind else []
            due = self.runner.due(steps, self.settings.actions)
        for step in due:
            await self.runner.run(step, self.settings.actions, self._plans_afresh)
            self.wake()
        if not self._blind:
            await self.runner.taint(self.findings, self.settings.actions)
        return None if self._blind else self.inventory

    async def _see(self, wish: attention.Wish = attention.QUICK) -> None:
        """The look that is wished for and those that follow from it; blind until all are done."""
        fresh = False
        try:
            for _ in range(MOST_LOOKS):
                request = scan.Request(
                    drivers=self.drivers,
                    kubelet=str(self.settings.kubelet),
                    proc="/proc",
                    sys="/sys",
                    containers=str(self.settings.containers),
                    deep=wish.deep,
                    users_of=wish.users_of,
                    kubelet_set="kubelet" in self.settings.model_fields_set,
                )
                began = time.time()
                new = await self.scanner.look(request, self.settings.look_timeout)
                self._memory = attention.fulfilled(self._memory, wish, began)
                fresh = fresh or new.deep
                merged = attention.merged(new, self.inventory)
                self.inventory = dataclasses.replace(merged, deep=fresh)  # of this round
                self._remember(self.inventory)
                scene = self._scene()
                wish, self._memory = attention.consider(
                    scene,
                    self.inventory,
                    self._memory,
                    self.settings,
                    fresh=fresh,
                    unconfirmed=standing.unconfirmed(self._standing, scene.now),
                )
                if not wish:
                    break
            self._blind = ""
        except client.BlindError as error:
            if not self._blind:
                log.warning("the node cannot be looked at", cause=str(error))
            self._blind = f"{error.thing}: {error.cause}"

    def _remember(self, inventory: Inventory) -> None:
        """Where the host had each device: what a leaked copy is a copy of."""
        former = {}
        for device in inventory.devices:
            name = attention.key(device)
            targets = {place.target for place in inventory.on_host(device)}
            known = self._former.get(name, frozenset())
            former[name] = frozenset(sorted(known | targets)[:MOST_FORMER])
        self._former = former
        self.clusters.want(inventory)

    def cluster_views(self) -> dict[str, ClusterView | str]:
        """Every cluster that is set: what it said last, or why it says nothing."""
        return {
            c.name: self.clusters.views.get(c.name, "not asked yet") for c in self.settings.clusters
        }

    def _scene(self) -> Scene:
        try:
            ticking = syscalls.clock_state()
        except OSError:
            ticking = None
        return Scene(
            now=time.time(),
            settings=self.settings,
            inventory=self.inventory,
            blind=self._blind,
            clusters=self.cluster_views(),
            watched_by=self.clusters.watched_by,
            paths=self.clusters.paths,
            guard=self._guard(),
            claims=self._claims(),
            clock=ticking,
            unread_logs=self.follower.states() if self.follower else {},
            logs=book.join(book.telling(self._book, self._patterns), self.inventory),
            former=self._mounted_before(),
        )

    def _mounted_before(self) -> dict[str, frozenset[str]]:
        return {name: targets for (name, _, _), targets in self._former.items()}

    def _judge(self) -> None:
        now = time.time()
        hold = self.settings.logs.hold
        self._book = book.note(self._book, (), self._patterns, now, hold)
        judged, self.states = judging.judge(self._scene())
        known = {result.rule for result in judged}
        # Rules that come from log lines vanish with their lines: let their findings clear.
        judged += [
            standing.Judged(rule, ())
            for rule in {entry.rule for entry in self._standing.values()} - known
            if rule.startswith("log-")
        ]
        self._standing = standing.advance(self._standing, judged, now, self.settings.clear_after)
        self.findings = standing.findings(self._standing)
        self._reporter.report(ORIGIN, self.findings)
        waiting = [
            e
            for e in self._standing.values()
            if not e.dormant and not e.stale and (not e.raised or e.gone is not None)
        ]
        if any(entry.rule == "mapped-elsewhere" for entry in waiting):
            self.clusters.ask_soon()

    def _plans(self) -> list[plan.Plan]:
        assert self.inventory is not None
        return plan.plans(
            self.findings,
            self.inventory,
            self._guard(),
            self._mounted_before(),
            self.settings.actions.orphan_after,
        )

    async def _plans_afresh(self) -> list[plan.Plan]:
        async with self._round:
            names = {step.device for step in self._plans() if step.device}
            await self._see(attention.Wish(deep=True, users_of=tuple(sorted(names))))
            self._judge()
            return self._plans() if self.inventory is not None and not self._blind else []

    def age(self) -> float:
        """Seconds since the node was looked at; since 1970 when it never was."""
        return time.time() - (self.inventory.taken if self.inventory else 0.0)

    # -- what people ask for ---------------------------------------------------------------------

    def plans(self) -> list[plan.Plan]:
        """What could be done about what stands now, refusals included."""
        return self._plans() if self.inventory is not None else []

    async def act(self, finding: str, *, dry_run: bool) -> dict[str, Any]:
        """What a person asks for; NotFoundError when nothing can be done about the finding."""
        step = next((p for p in self.plans() if p.finding == finding), None)
        if step is None:
            raise kit.errors.NotFoundError(
                f"finding {finding}",
                "nothing can be done about it by the agent",
                "see its advice in 'nodeagent volume findings'",
            )
        result = await self.runner.run(
            step, self.settings.actions, self._plans_afresh, dry_run=dry_run, by="operator"
        )
        self.wake()
        return result

    async def audit_now(self) -> None:
        """A full pass, clusters included."""
        if self.settings.clusters:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.cluster_timeout + 5.0):
                    await self.clusters.ask(self.settings)
        await self.look(full=True)
