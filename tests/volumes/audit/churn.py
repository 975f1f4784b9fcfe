"""A node as kubelet keeps it busy: many processes and namespaces, volumes staged, published and
taken down again all the time. Used by the test and by ``make soak``."""

import asyncio
import contextlib
import dataclasses
import os
import random
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testbed import blockdev, waiting
from tests.volumes.audit import stage as stages
from volumes.audit import status

# Containers: a namespace each that follows the host's, some with kubelet's directory, two
# processes in each. One parent starts them all, so that one kill ends them.
CROWD = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
spaces, processes = int(sys.argv[1]), int(sys.argv[2])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
libc.prctl(1, 9)
for number in range(processes):
    read, write = os.pipe()
    if os.fork() == 0:
        libc.prctl(1, 9)
        if number < spaces:
            if libc.unshare(0x20000): os._exit(1)
            libc.mount(b'none', b'/', None, (1 << 14) | (1 << 19), None)
            for extra in range(20):
                libc.mount(b'tmpfs', b'/mnt', b'tmpfs', 0, b'size=4k')
        os.write(write, b'x')
        time.sleep(3600)
        os._exit(0)
    os.read(read, 1)
    os.close(read); os.close(write)
print('ready', flush=True)
sys.stdin.read()
os.killpg(0, 9)
"""


@dataclass
class Result:
    seconds: float = 0.0
    mounts: int = 0
    looks: int = 0
    namespaces: int = 0
    processes: int = 0
    full_pass_cpu_ms: float = 0.0
    busy_cpu_percent: float = 0.0  # of one core, agent and children, while the churn runs
    idle_cpu_percent: float = 0.0
    leak_found: bool = False
    leak_seconds: float = 0.0
    false_findings: list[dict[str, Any]] = field(default_factory=list)


class _Pods:
    """Stages, publishes and removes volumes as fast as one kubelet would."""

    def __init__(self, stage: stages.Stage, devices: list[str]) -> None:
        self._stage = stage
        self._devices = devices
        self.mounts = 0

    async def run(self, until: float, least: int) -> None:
        """Go on until that moment, and on a slow machine until ``least`` mounts are made."""
        await asyncio.gather(*(self._one(device, until, least) for device in self._devices))

    async def _one(self, device: str, until: float, least: int) -> None:
        while time.monotonic() < until or self.mounts < least:
            uid = str(uuid.uuid4())
            target, handle = await asyncio.to_thread(self._stage.staged, device, image=device)
            await asyncio.sleep(random.uniform(0.0, 1.5))
            published = await asyncio.to_thread(self._stage.published, target, handle, uid)
            self.mounts += 2
            reader = await asyncio.create_subprocess_exec("sleep", "600", cwd=published)
            await asyncio.sleep(random.uniform(0.1, 2.0))
            reader.kill()
            await reader.wait()
            await self._umount(published)
            await asyncio.sleep(random.uniform(0.0, 1.0))
            await self._umount(target)
            await asyncio.sleep(random.uniform(0.0, 0.5))

    async def _umount(self, path: Path) -> None:
        process = await asyncio.create_subprocess_exec("umount", str(path))
        assert await process.wait() == 0, path


def _session(pid: int) -> int:
    """0 when the process has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def cpu(pids: list[int]) -> float:
    """Seconds of CPU of these processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def soak(
    stage: stages.Stage,
    *,
    seconds: float,
    processes: int,
    spaces: int,
    mounts: int = 1,
    idle: float = 0.0,
) -> Result:
    """Run the churn for ``seconds`` and at least ``mounts`` mounts, and watch it; then, for
    ``idle`` seconds, nothing but the crowd."""
    stage.share_kubelet()
    devices = [stage.loop() for _ in range(4)]
    apart = ("unshare", "--mount", str(blockdev.APART), str(stage.folder), "--")
    crowd = subprocess.Popen(
        [*apart, sys.executable, "-c", CROWD, str(spaces), str(processes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    stage.processes.append(crowd)
    assert crowd.stdout is not None and crowd.stdin is not None
    result = Result()
    try:
        assert crowd.stdout.readline() == "ready\n"
        defaults = stages.settings(stage, settle="1s", clear_after="5s")
        async with stages.watching(stage, defaults) as watch:
            pods = _Pods(stage, devices)
            seen: dict[str, dict[str, Any]] = {}

            async def look_on() -> None:
                while True:
                    for found in map(vars, status.findings(watch.audit)):
                        own = not stage.is_foreign(found) or _session(found["pid"]) == crowd.pid
                        if found["device"] in devices and own:
                            seen.setdefault(found["id"], found)
                    await asyncio.sleep(0.1)

            began, before = time.monotonic(), watch.audit.scanner.cpu_seconds
            looking = asyncio.create_task(look_on())
            try:
                await pods.run(began + seconds, mounts)
            finally:
                looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking  # what it failed of, if it did
            result.seconds = time.monotonic() - began
            result.busy_cpu_percent = (
                (watch.audit.scanner.cpu_seconds - before) / result.seconds * 100
            )
            result.mounts = pods.mounts
            # Devices are read-only-used, idle and so on by turns; only what claims a leak, a busy
            # mount or a double mapping would be false here.
            telling = ("leaked-mount", "busy-mount", "mapped-twice", "unmap-failing")
            result.false_findings = [f for f in seen.values() if f["rule"] in telling]
            inventory = await watch.audit.round(full=True)
            assert inventory is not None
            result.full_pass_cpu_ms = inventory.cpu * 1000
            result.namespaces, result.processes = inventory.namespaces, inventory.processes
            if idle:
                result.idle_cpu_percent = await _idle(watch, idle)
            await _leak(stage, watch, devices[0], result)
            result.looks = watch.audit.scanner.scans
    finally:
        crowd.stdin.close()
        crowd.wait(timeout=waiting.limit(30))
    return result


async def _idle(watch: stages.Watching, seconds: float) -> float:
    """Share of a core that looks and the agent's own loop take while nothing happens."""
    own = time.process_time()
    looks = watch.audit.scanner.cpu_seconds
    await asyncio.sleep(seconds)
    used = time.process_time() - own + watch.audit.scanner.cpu_seconds - looks
    return used / seconds * 100


async def _leak(stage: stages.Stage, watch: stages.Watching, device: str, result: Result) -> None:
    target, _ = await asyncio.to_thread(stage.staged, device)
    pid = await asyncio.to_thread(stage.chrooted)
    stages.run("umount", target)
    began = time.monotonic()

    def is_found() -> bool:
        # A process of somebody else that copied the host's mounts just now is a leak of its own.
        return pid in [found["pid"] for found in watch.found(device, "leaked-mount")]

    await watch.until(is_found, f"the leak of process {pid}")
    result.leak_seconds = time.monotonic() - began
    result.leak_found = True


def as_json(result: Result) -> dict[str, Any]:
    return dataclasses.asdict(result)
