"""The agent's end of the log child: starts it, takes its reports, replaces it when it is stuck."""

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import structlog

import kit.errors
import kit.line_worker
from volumes.audit.logs import sources
from volumes.audit.logs.matcher import Counters, Hit
from volumes.audit.logs.patterns import Pattern, expressions
from volumes.settings import LogSettings

log = structlog.get_logger("audit.logs")

# The child reports several times in it; silence means a hung disk or a runaway regular expression.
SILENCE_SECONDS = 30.0
RESTART_SECONDS = 10.0
# After so many children in a row that ended without a word, the next record of the kernel's log is
# left out: they may fail at it.
_SILENT_CHILDREN = 2
_LARGEST_REPORT = 8 * 2**20

# Kernel names of devices that are not named after their driver.
_NAMES = {
    "sd": r"sd[a-z]+\d*",
    "virtblk": r"vd[a-z]+\d*",
    "device-mapper": r"dm-\d+",
    "mmc": r"mmcblk\d+(?:p\d+)?",
    "blkext": r"nvme\d+n\d+(?:p\d+)?",  # partitions of others are matched by the other names
}


def device_names(drivers: Sequence[str]) -> str:
    """Regex of the kernel names of devices of these drivers (as in /proc/devices).

    It is not made of the devices that exist: a line may be about one that was just detached.
    """
    each = (_NAMES.get(driver, rf"{re.escape(driver)}\d+(?:p\d+)?") for driver in drivers)
    return f"(?:{'|'.join(each)})"


def configuration(
    settings: LogSettings, patterns: Sequence[Pattern], drivers: Sequence[str]
) -> sources.Configuration:
    return sources.Configuration(
        kernel=settings.kernel,
        sources=tuple(sources.FollowedLog(s.name, s.files, s.unit) for s in settings.sources),
        expressions=expressions(patterns),
        # What lies on a watched device may be named in its place (patterns.join).
        devices=device_names((*drivers, "device-mapper")),
        lines_per_second=settings.lines_per_second,
        namespaces=settings.namespaces,
    )


class LogFollower:
    """Runs until cancelled. ``report`` gets new hits; it gets none of them when a source became
    readable or unreadable."""

    def __init__(
        self, configuration: sources.Configuration, report: Callable[[Sequence[Hit]], None]
    ) -> None:
        self._configuration = configuration
        self._report = report
        self._past: dict[str, Counters] = {}  # of children that ended
        self._now: Mapping[str, sources.SourceReport] = {}
        self._states: dict[str, str] = {}
        self._kernel_read: int | None = None
        self._silent = 0  # children in a row that said nothing
        self.restarts = 0
        self.trouble = ""

    def counters(self) -> dict[str, Counters]:
        """Counters of each source since the agent started."""
        return {
            name: _sum(
                self._past.get(name, Counters()),
                self._now[name].counters if name in self._now else Counters(),
            )
            for name in sorted(self._past.keys() | self._now.keys())
        }

    def states(self) -> dict[str, str]:
        """Sources that cannot be read, and why."""
        return {name: state for name, state in self._states.items() if state}

    async def run(self) -> None:
        while True:
            try:
                await self._listen()
            except (OSError, ValueError, kit.line_worker.ChildError) as error:
                self.trouble = f"the log child failed: {error}"
            except kit.errors.AgentError as error:
                self.trouble = f"the log child was replaced: {error.cause}"
            log.warning("log child ended, starting it again", cause=self.trouble)
            self._count_gap()
            self.restarts += 1
            await asyncio.sleep(RESTART_SECONDS)

    async def _listen(self) -> None:
        self._silent += 1
        child = kit.line_worker.LineWorker(
            f"{sources.__name__}:{sources.main.__name__}",
            sources.Report,
            about="log child",
            largest=_LARGEST_REPORT,
        )
        try:
            wanted = dataclasses.replace(
                self._configuration,
                heartbeat=SILENCE_SECONDS / 6,
                kernel_after=self._kernel_read,
            )
            async for report in child.listen(wanted, SILENCE_SECONDS):
                changed = self._take(report.sources)
                self._kernel_read, self._silent = report.kernel_read, 0
                self.trouble = ""
                if report.hits or changed:
                    self._report(report.hits)
        finally:
            await child.close()

    def _take(self, reports: Mapping[str, sources.SourceReport]) -> bool:
        """Take over the sources' reports; whether one became readable or unreadable.

        A child that just started does not know the states: those of the last child still count.
        """
        self._now = reports
        before = self.states()
        self._states |= {n: each.state for n, each in reports.items() if each.state is not None}
        return self.states() != before

    def _count_gap(self) -> None:
        """The next child starts at the ends of the logs. What is written until then is lost, and
        nobody knows how much: each source that was readable has lost one. Of the kernel's log the
        next child reads on where this one stopped, and counts itself what was overwritten."""
        past = self.counters()
        losing = {name for name in self._now if not self._states.get(name)}
        if self._kernel_read is not None:
            losing.discard("kernel")
            if self._silent >= _SILENT_CHILDREN:
                self._kernel_read = None
                losing.add("kernel")
        for name in losing:
            past[name] = _sum(past.get(name, Counters()), Counters(lost=1))
        self._past, self._now = past, {}


def _sum(one: Counters, other: Counters) -> Counters:
    names = [each.name for each in dataclasses.fields(Counters)]
    return Counters(**{name: getattr(one, name) + getattr(other, name) for name in names})
