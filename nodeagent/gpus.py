"""Whether the GPUs wait for data: how busy they are, and how long tasks wait for I/O.

GPUs are optional: they are asked where the extra ``nodeagent[gpu]`` is installed. Where that finds
none there are no series of them, and one line in the log says why.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog
from prometheus_client.core import Metric

import kit.errors
import kit.line_worker
import kit.pause
import kit.processes
from kit.metrics import counter, gauge
from linux import nvml

# How long tasks of this machine have waited, as the kernel counts it (PSI).

PRESSURE = Path("/proc/pressure/io")


def io_stalled(file: Path = PRESSURE) -> float | None:
    """Seconds since boot in which at least one task waited for I/O: a disk, or a network file
    system. None where the kernel does not count it (CONFIG_PSI, psi=1)."""
    try:
        for line in file.read_text(encoding="ascii").splitlines():
            kind, *fields = line.split()
            if kind == "some":
                return int(dict(field.split("=") for field in fields)["total"]) / 1e6
    except (OSError, ValueError, KeyError):
        pass
    return None


log = structlog.get_logger("agent")

ABOUT = "GPUs"
LOOK_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # of one look; the first one loads the driver's library
KEPT = 12  # looks: a minute, so that a scrape every half minute misses nothing
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 1800.0  # after a look that failed


def stalls(read: Callable[[], float | None] = io_stalled) -> Iterable[Metric]:
    """What the whole node waits for its disks and network file systems; on nodes without a GPU too.
    Nothing where the kernel does not count it."""
    if (seconds := read()) is not None:
        text = "Time in which a task of the node waited for I/O."
        yield counter("node_io_stalled_seconds", text, seconds)


class Gpus:
    def __init__(self) -> None:
        # An error ends the child: what it had loaded may be that of a driver that was replaced.
        self._worker = kit.line_worker.LineWorker(
            "linux.nvml:main", nvml.Sample, about=ABOUT, fatal=(kit.errors.HostError,),
            backoff=kit.pause.Backoff(FIRST_PAUSE, LONGEST_PAUSE),
        )  # fmt: skip
        self._looks: deque[float] = deque(maxlen=KEPT)
        self._count = 0
        self.reason = ""  # why nothing is known

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await asyncio.shield(self._worker.close())

    async def look(self) -> None:
        """Ask once. While a child of before hangs there is no other: it would hang beside it."""
        if kit.processes.hanging(ABOUT):
            return
        if not nvml.DEVICE.exists():  # a child that only finds that out is not worth its start
            self._note(f"NVIDIA's driver is not loaded here: no {nvml.DEVICE}")
            return
        try:
            found = await self._worker.ask(None, ANSWER_SECONDS)
        except (kit.errors.AgentError, kit.line_worker.ChildError, OSError, ValueError) as error:
            self._note(str(error))
            return
        self._count = found.gpus
        if not found.busy:
            self._note("no GPU tells how busy it is" if found.gpus else "there is none")
            return
        self._note("")
        self._looks.append(sum(found.busy) / len(found.busy))

    def _note(self, why: str) -> None:
        if why:
            self._looks.clear()
        if why != self.reason:
            log.info("gpu figures", gpus=self._count, absent=why)
        self.reason = why

    def metrics(self) -> Iterable[Metric]:
        """Nothing while nothing is known."""
        if not self._looks:
            return
        yield gauge("gpus", "GPUs.", self._count)
        text = "Mean load of the GPUs."
        yield gauge("gpu_busy_ratio", text, sum(self._looks) / len(self._looks))
