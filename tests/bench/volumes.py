"""What the guard costs: device opens with and without it, probes, and the delay of a new volume."""

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from tests.bench import harness
from tests.testbed import blockdev, cell, formatters, waiting
from tests.testbed.agent import Agent
from volumes import settings
from volumes.guard import kernel
from volumes.probe import examine, prober

MOST_ADDED_US = 1.0
KUBELET_RETRY_SECONDS = 0.5
PROBE_SECONDS = 3.0  # then it would be a timeout
SIZE = 320 * blockdev.MiB


def _opens(path: str, flags: int, opens: int) -> float:
    """Seconds per open and close."""
    began = time.perf_counter()
    for _ in range(opens):
        os.close(os.open(path, flags))
    return (time.perf_counter() - began) / opens


def _opens_inside(where: cell.Cell, path: str, flags: int, opens: int) -> float:
    """Like _opens, by a child in the guarded cgroup whose name may write."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            (where.path / "cgroup.procs").write_text("0")
            Path("/proc/self/comm").write_text("mount")
            os.write(write, repr(_opens(path, flags, opens)).encode())
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


def _cost_of_opens(place: harness.Workplace, where: cell.Cell, device: str) -> harness.Results:
    """With and without the program, alternately in one run, so that both see the same machine."""
    enforce = kernel.wanted(
        settings.GuardSettings(drivers=("loop",)), kernel.Mode.ENFORCE, {7: "loop"}
    )
    kinds = {
        "open_guarded_write": (device, os.O_RDWR),  # by a named program
        "open_guarded_read": (device, os.O_RDONLY),
        "open_unguarded_read": ("/dev/zram0", os.O_RDONLY),
        "open_character_write": ("/dev/null", os.O_WRONLY),
    }
    kinds = {name: value for name, value in kinds.items() if _opens_at_all(value[0])}
    times: dict[str, dict[str, list[float]]] = {name: {"without": [], "with": []} for name in kinds}
    guard = where.guard()
    rounds, opens = place.size(9, 1), place.size(20_000, 100)
    for _ in range(rounds):
        for state in ("without", "with"):
            if state == "with":
                guard.apply(enforce)
            else:
                guard.detach()
            for name, (path, flags) in kinds.items():
                times[name][state].append(_opens_inside(where, path, flags, opens))
    guard.detach()
    guard.close()
    for name, each in times.items():
        without, with_it = (1e6 * min(each[state]) for state in ("without", "with"))
        # The least of each: other work on the machine only ever adds.
        note = f"added; {without:.2f} without, {with_it:.2f} with the program, least of {rounds}"
        yield name, harness.at_most([with_it - without], MOST_ADDED_US, "µs", note, rounds)


async def _probes(device: str, probes: int) -> list[float]:
    """Seconds for each of ``probes`` verdicts on a blank device."""
    look = prober.Prober(deadline=waiting.limit(30))
    try:
        await look.warm()
        times = []
        for _ in range(probes):
            began = time.perf_counter()
            found = await look.probe(device)
            times.append(time.perf_counter() - began)
        if found.verdict is not examine.Kind.BLANK_VERIFIED:
            raise RuntimeError(f"a blank device was called {found}")
        return times
    finally:
        await look.close()


def _first_mounts(where: cell.Cell, folder: Path, mounts: int) -> harness.Results:
    """From attaching a blank device to its lease, and to mounted by kubelet's retries, against the
    same without a guard."""
    leases: list[float] = []
    with cell.agent(folder, where) as agent:
        guarded = [_first_mount(folder, n, where.run, agent, leases) for n in range(mounts)]
    plain = [_first_mount(folder, mounts + n, _unguarded) for n in range(mounts)]
    note = "kubelet comes again after 0.5"
    yield "blank_lease_after", harness.at_most(leases, KUBELET_RETRY_SECONDS, "s", note)
    note = f"one retry; {statistics.median(plain):.3f} without a guard"
    yield "blank_mounted_after", harness.at_most(guarded, 2 * KUBELET_RETRY_SECONDS, "s", note)


def _unguarded(*command: str) -> Any:
    return blockdev.run(*command, check=False)


def _first_mount(
    folder: Path,
    number: int,
    run: formatters.Run,
    agent: Agent | None = None,
    leases: list[float] | None = None,
) -> float:
    """Seconds; where an agent guards, what it says of the time to the lease goes to ``leases``."""
    image, target = folder / f"image{number}", folder / "mnt"
    target.mkdir(exist_ok=True)
    blockdev.blank(image, SIZE)
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
            leases.append(agent.guarded(device)["lease_after_seconds"])
    return took


def run(place: harness.Workplace) -> harness.Results:
    with place.room("volumes") as folder, cell.cell(folder) as where:
        image = blockdev.blank(folder / "image", SIZE)
        with blockdev.loop(image) as device:
            yield from _cost_of_opens(place, where, device)
            seconds = asyncio.run(_probes(device, place.size(10, 1)))
            yield "probe_blank", harness.at_most(seconds, PROBE_SECONDS, "s", "320 MiB")
        yield from _first_mounts(where, folder, place.size(10, 1))


GROUPS = {"guard": run}
