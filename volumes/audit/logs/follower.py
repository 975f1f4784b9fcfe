"""The agent's end of the log child: starts it, takes its lines, replaces it when it is stuck."""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import structlog

from volumes.audit.settings import LogSettings
from volumes.logs.patterns import Pattern, plain

log = structlog.get_logger("audit.logs")

# It speaks every half second; silence means a hung disk or a runaway pattern.
SILENCE_SECONDS = 30.0
RESTART_SECONDS = 10.0
END_SECONDS = 2.0
LONGEST_LINE = 8 * 2**20


# Kernel names of drivers whose devices are not called like the driver and a number.
_NAMES = {
    "sd": r"sd[a-z]+\d*",
    "virtblk": r"vd[a-z]+\d*",
    "device-mapper": r"dm-\d+",
    "mmc": r"mmcblk\d+(?:p\d+)?",
    "blkext": r"nvme\d+n\d+(?:p\d+)?",  # partitions of the others go by the other names
}


def device_names(drivers: tuple[str, ...]) -> str:
    """Regex of the kernel names that devices of these drivers (as in /proc/devices) have.

    By names and not by what is there now: a line may be about a device that has just gone.
    """
    each = (_NAMES.get(driver, rf"{re.escape(driver)}\d+(?:p\d+)?") for driver in drivers)
    return f"(?:{'|'.join(each)})"


class Follower:
    """Runs until cancelled. ``told`` gets the hits of each line, and none when a source can be read
    again or no more.
    """

    def __init__(
        self,
        settings: LogSettings,
        patterns: tuple[Pattern, ...],
        drivers: tuple[str, ...],
        told: Callable[[list[dict[str, Any]]], None],
        *,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._configuration = {
            "kernel": settings.kernel,
            "sources": [
                {"name": s.name, "files": s.files, "unit": s.unit} for s in settings.sources
            ],
            "patterns": plain(patterns),
            "devices": device_names(drivers),
            "lines_per_second": settings.lines_per_second,
            **(extra or {}),
        }
        self._told = told
        self._past: dict[str, dict[str, int]] = {}  # of children that have ended
        self._now: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str] = {}
        self.restarts = 0
        self.trouble = ""

    def counters(self) -> dict[str, dict[str, int]]:
        """By source: seen, dropped, lost, matched, squeezed since the agent began."""
        names = ("seen", "dropped", "lost", "matched", "squeezed")
        found = {}
        for source in sorted(self._past.keys() | self._now.keys()):
            past, now = self._past.get(source, {}), self._now.get(source, {})
            found[source] = {name: past.get(name, 0) + int(now.get(name, 0)) for name in names}
        return found

    def states(self) -> dict[str, str]:
        """Sources that cannot be read, and why."""
        return {name: state for name, state in self._states.items() if state}

    def _note(self, sources: dict[str, dict[str, Any]]) -> bool:
        """Take over what the child says of its sources; whether one can be read now or no more.

        A child that has just begun does not know yet: what its forerunner said holds so long.
        """
        self._now = sources
        before = self.states()
        known = {name: now["state"] for name, now in sources.items() if now["state"] is not None}
        self._states |= known
        return self.states() != before

    async def run(self) -> None:
        while True:
            try:
                await self._once()
            except (OSError, ValueError) as error:
                self.trouble = f"the log child failed: {error}"
            except TimeoutError:
                self.trouble = f"the log child was silent for {SILENCE_SECONDS:g}s and was replaced"
            log.warning("log child ended, it is started again", cause=self.trouble)
            self._count_gap()
            self._past = self.counters()
            self._now = {}
            self.restarts += 1
            await asyncio.sleep(RESTART_SECONDS)

    def _count_gap(self) -> None:
        """The next child begins at the ends of the logs: what comes until then is lost. Nobody
        knows how much it is, so each source that was followed has lost one."""
        for name, now in self._now.items():
            if not self._states.get(name):
                now["lost"] += 1

    async def _once(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "volumes.logs.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=LONGEST_LINE,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(self._configuration).encode() + b"\n")
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    line = await process.stdout.readline()
                if not line:
                    self.trouble = "the log child ended by itself"
                    return
                answer = json.loads(line)
                changed = self._note(answer["sources"])
                self.trouble = ""
                if answer["hits"] or changed:
                    self._told(answer["hits"])
        finally:
            try:
                process.kill()
            except ProcessLookupError:
                pass  # it has ended
            try:
                await asyncio.wait_for(process.wait(), END_SECONDS)
            except TimeoutError:
                log.warning("log child hangs in the kernel and is left behind", pid=process.pid)
