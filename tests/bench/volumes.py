"""What the guard costs: device opens with and without it, probes, and the delay of a new volume.

python -m tests.bench.volumes [OUTPUT]      (root; default output build/bench/volumes.json)
"""

import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.testbed import blockdev, cell, formatters
from volumes import settings
from volumes.guard import kernel, layout
from volumes.probe import prober

OPENS = 20_000
ROUNDS = 9
SIZE = 320 * blockdev.MiB


def _opens(path: str, flags: int) -> float:
    """Seconds per open and close."""
    began = time.perf_counter()
    for _ in range(OPENS):
        os.close(os.open(path, flags))
    return (time.perf_counter() - began) / OPENS


def _opens_inside(where: cell.Cell, path: str, flags: int) -> float:
    """Like _opens, by a child in the guarded cgroup whose name may write."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            (where.path / "cgroup.procs").write_text("0")
            Path("/proc/self/comm").write_text("mount")
            os.write(write, repr(_opens(path, flags)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        value = float(stream.read())
    os.waitpid(child, 0)
    return value


def _opens_at_all(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


def cost_of_opens(where: cell.Cell, device: str) -> dict[str, Any]:
    """With and without the program, alternately in one run, so that both see the same machine."""
    enforce = kernel.wanted(
        settings.GuardSettings(drivers=("loop",)), layout.Mode.ENFORCE, {7: "loop"}
    )
    kinds = {
        "guarded device, write open by a named program": (device, os.O_RDWR),
        "guarded device, read open": (device, os.O_RDONLY),
        "unguarded device (/dev/zram0), read open": ("/dev/zram0", os.O_RDONLY),
        "character device (/dev/null), write open": ("/dev/null", os.O_WRONLY),
    }
    kinds = {name: value for name, value in kinds.items() if _opens_at_all(value[0])}
    times: dict[str, dict[str, list[float]]] = {name: {"without": [], "with": []} for name in kinds}
    guard = where.guard()
    for _ in range(ROUNDS):
        for state in ("without", "with"):
            if state == "with":
                guard.apply(enforce)
            else:
                guard.detach()
            for name, (path, flags) in kinds.items():
                times[name][state].append(_opens_inside(where, path, flags))
    guard.detach()
    guard.close()
    # The least of each: other work on the machine only ever adds.
    return {
        name: {
            "without_us": round(min(each["without"]) * 1e6, 3),
            "with_us": round(min(each["with"]) * 1e6, 3),
            "added_us": round((min(each["with"]) - min(each["without"])) * 1e6, 3),
        }
        for name, each in times.items()
    }


async def probe_times(device: str) -> dict[str, Any]:
    look = prober.Prober(deadline=30)
    try:
        await look.warm()
        times = []
        for _ in range(10):
            began = time.perf_counter()
            found = await look.probe(device)
            times.append(time.perf_counter() - began)
        return {
            "verdict": str(found.verdict),
            "bytes_read": found.bytes_read,
            "median_ms": round(statistics.median(times) * 1e3, 1),
            "max_ms": round(max(times) * 1e3, 1),
        }
    finally:
        await look.close()


def first_mount(where: cell.Cell, folder: Path) -> dict[str, Any]:
    """From attaching a blank device to its lease, and to mounted by kubelet's retries, against the
    same without a guard."""
    leases: list[float] = []
    with cell.agent(folder, where) as agent:
        guarded = [_first_mount(folder, n, where.run, agent, leases) for n in range(10)]
    plain = [_first_mount(folder, number, _unguarded) for number in range(10, 20)]
    return {
        "lease_after_ms": [round(v * 1e3) for v in sorted(leases)],
        "mounted_after_ms_guarded_median": round(statistics.median(guarded) * 1e3),
        "mounted_after_ms_guarded_max": round(max(guarded) * 1e3),
        "mounted_after_ms_unguarded_median": round(statistics.median(plain) * 1e3),
    }


def _unguarded(*command: str) -> Any:
    return blockdev.run(*command, check=False)


def _first_mount(
    folder: Path,
    number: int,
    run: formatters.Run,
    agent: cell.Agent | None = None,
    leases: list[float] | None = None,
) -> float:
    """Seconds; where an agent guards, what it says of the time to the lease goes to ``leases``."""
    image, target = folder / f"image{number}", folder / "mnt"
    target.mkdir(exist_ok=True)
    with image.open("wb") as stream:
        stream.truncate(SIZE)
    with blockdev.loop(image) as device:
        began = time.perf_counter()
        delay = 0.5
        for _ in range(6):
            outcome = formatters.kubelet(run, device, "ext4", str(target), lambda: None)
            if outcome.mounted:
                break
            time.sleep(delay)  # kubelet's back-off
            delay *= 2
        took = time.perf_counter() - began
        assert outcome.mounted, outcome
        blockdev.run("umount", str(target))
        if agent is not None and leases is not None:
            leases.append(agent.device(device)["lease_after_seconds"])
    return took


def main() -> None:
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "build/bench/volumes.json")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with cell.cell(folder) as where:
            image = folder / "image"
            with image.open("wb") as stream:
                stream.truncate(SIZE)
            result: dict[str, Any] = {"kernel": platform.release(), "cpus": os.cpu_count()}
            with blockdev.loop(image) as device:
                result["opens"] = cost_of_opens(where, device)
                result["probe of a blank 320 MiB device"] = asyncio.run(probe_times(device))
            result["first mount"] = first_mount(where, folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
