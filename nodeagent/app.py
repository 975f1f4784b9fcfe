"""The process: one root, named tasks, a staged stop.

``Agent.run`` is the root. It serves the admin API first, so that a node whose component hangs while
it starts can be asked why. Then one task for each room (``nodeagent.supervisor``) starts its
component, in the registry's order, and calls ``reconcile`` every few seconds and when the settings
change. A sick room leaves the others standing. No task ends by itself: the first that does, by an
error or by a signal, ends the process. A stuck loop ends it too (``nodeagent.watchdog``).

Components stop in reverse order, each with a deadline. What they have set up (mounts, BPF programs,
containerd leases) stays in the kernel and in the runtime.
"""

import asyncio
import contextlib
import errno
import itertools
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric

import kit.child
import kit.errors
import kit.files
import kit.findings
import kit.tasks
from linux import nvml
from nodeagent import configfile, events, gpus, memory, state, supervisor, watchdog
from nodeagent.api import listeners
from nodeagent.cluster import service
from nodeagent.settings import Process, Settings

log = structlog.get_logger("agent")

KEEP_SECONDS = 5.0  # to copy the settings file to the disk of the state


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
    with kit.files.closing(descriptor):
        yield


def _unusable(problem: str) -> kit.findings.Finding:
    return kit.findings.Finding(
        id="settings-file",
        rule="settings-unusable",
        severity=kit.findings.Severity.WARNING,
        subject="settings",
        message=f"the settings file cannot be used, and the last good settings stay in force: "
        f"{problem}",
        advice="correct the file ('nodeagent config check' shows each mistake); it is taken over "
        "by itself",
    )


class Agent:
    """Runs the components of one settings file until a signal ends it.

    ``last_good``: where a copy of good settings is kept.
    """

    def __init__(
        self, config: Path, loaded: configfile.Loaded, last_good: Path | None = None
    ) -> None:
        self.config = config
        self._last_good = last_good
        self._file = loaded.settings
        self._data = loaded.data  # of the settings file, as it was last judged
        asked = self._file.kubernetes
        self._cluster = (
            None if asked is None or not asked.objects else service.Cluster(asked, self._file)
        )
        self.state = state.build(self._merged())
        self._judge(loaded.problem)
        self.state.metrics.append(self._figures)
        self._supervisors: list[supervisor.Supervisor] = []
        self._stopping = asyncio.Event()
        self._renewing = asyncio.Lock()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; AgentError when the process itself cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        with _only_one(self.state.settings.state_dir):
            self._supervisors = [
                supervisor.Supervisor(self.state, each) for each in self.state.running
            ]
            async with watchdog.watching(), listeners.serving(self.state):
                try:
                    await self._work()
                finally:
                    for each in reversed(self._supervisors):
                        await each.stop()
        log.info("agent stopped; views and mounts stay in place")

    async def _work(self) -> None:
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(each.follow(before), name=each.name)
            for before, each in itertools.pairwise([None, *self._supervisors])
            if each is not None
        ]
        tasks.append(asyncio.create_task(self._follow_settings(), name="settings"))
        telling = events.watch(self.state.running, self.state.findings.journal)
        tasks.append(asyncio.create_task(telling, name="events"))
        tasks.append(asyncio.create_task(memory.follow(self.state), name="state directory"))
        self.state.metrics.append(gpus.stalls)
        if nvml.installed():
            found = gpus.Gpus()
            self.state.metrics.append(found.metrics)
            tasks.append(asyncio.create_task(found.follow(), name="gpus"))
        if self._cluster is not None:
            following = self._cluster.follow(self.state, self._renew)
            tasks.append(asyncio.create_task(following, name="cluster"))
        tasks.append(asyncio.create_task(self._stopping.wait(), name="stop"))
        announcing = asyncio.create_task(self._announce(), name="announce")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # its error ends the agent
        finally:
            await kit.tasks.end(announcing, *tasks)

    async def _announce(self) -> None:
        for each in self._supervisors:
            await each.tried.wait()
        log.info(
            "agent started",
            components=[each.room.name for each in self.state.running if each.started],
            degraded=[each.room.name for each in self.state.running if each.trouble is not None],
            admin=str(self.state.settings.admin.socket),
            metrics=self.state.settings.admin.metrics,
        )

    async def _keep(self) -> None:
        if self._last_good is None or self.state.config_error or self._data is None:
            return
        copy = str(self._last_good), self._data.decode()
        try:
            await kit.child.call(kit.files.keep, *copy, deadline=KEEP_SECONDS)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            cause = getattr(error, "strerror", None) or error
            why = f"no copy of the settings is kept at {self._last_good} ({cause})"
            log.warning(why)

    async def _follow_settings(self) -> None:
        await self._keep()
        async for data in configfile.changes(self.config, self._data):
            self._data = data
            try:
                # Beside the loop: a large file with many mistakes takes seconds.
                new = await asyncio.to_thread(configfile.load, self.config, data)
            except kit.errors.SettingsError as error:
                self._judge(str(error))
                log.error(
                    "settings file is unusable; the old settings stay in force", error=str(error)
                )
                continue
            self._judge("")
            self._file = new
            await self._keep()
            await self._renew()

    def _judge(self, problem: str) -> None:
        """``problem``: why the file's latest content cannot be used; "" when it can."""
        self.state.config_error = problem
        self.state.findings.report("settings-file", [_unusable(problem)] if problem else [])

    def _figures(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "nodeagent_settings_in_force",
            "0: the settings file is unusable.",
            value=0.0 if self.state.config_error else 1.0,
        )

    def _merged(self) -> Settings:
        """The settings file with what objects of the cluster add."""
        return self._file if self._cluster is None else self._cluster.merged(self._file)

    async def _renew(self) -> None:
        """Adopt the file and the objects as they are now. How many objects there are is not ours to
        say, so they are merged beside the loop; one after another, for the latest has to win."""
        async with self._renewing:
            self._apply(await asyncio.to_thread(self._merged))

    def _apply(self, new: Settings) -> None:
        """Adopt what can change while running; note in ``state.refused`` what cannot."""
        refused = [
            name
            for name in Process.model_fields
            if name != "kubelet"  # rooms take it over
            and getattr(new, name) != getattr(self.state.settings, name)
        ]
        keep: dict[str, Any] = {name: getattr(self.state.settings, name) for name in refused}
        running = {each.room.name for each in self.state.running}
        for name in Settings.model_fields:
            if name in Process.model_fields:
                continue
            if (getattr(new, name) is not None) != (name in running):
                refused.append(name)
                keep[name] = getattr(self.state.settings, name)
        # Rooms go on with the name and the cluster that are in force, as the process does.
        self.state.settings = new.model_copy(update=keep).placed()
        self.state.refuse([r for r in self.state.refused if "." in r] + refused)
        log.info("settings reloaded", needs_restart=refused)
        for each in self._supervisors:
            each.wake()
