"""The volume audit: no false findings under churn, its cost, how soon a leak is found and freed.

SOAK_SECONDS (60) is how long the churn lasts; ``make soak`` asks for ten minutes.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from tests.bench import harness
from tests.volumes.audit import churn, flood
from tests.volumes.audit import stage as stages


async def _accident(folder: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from the host's unmount to the finding, and to the freed device with the action."""
    found: list[float] = []
    freed: list[float] = []
    for number in range(rounds):
        with stages.staged(folder / str(number)) as stage:
            rootfs = stage.folder / "exporter"
            rootfs.mkdir()
            device = stage.loop()
            target, _ = stage.staged(device, options=("-o", "ro"))
            stage.holder("container", rootfs, "private", stage.folder)
            changes: dict[str, Any] = {"settle": "1s", "actions": {"detach_leaked": "on"}}
            async with stages.watching(stage, stages.settings(stage, **changes)) as watch:
                await asyncio.sleep(2)
                began = time.monotonic()
                stages.run("umount", target)
                await watch.finding(device, "leaked-mount")
                found.append(time.monotonic() - began)

                def is_free(name: str = device) -> bool:
                    return not stages.active(name)

                await watch.until(is_free, "freed")
                freed.append(time.monotonic() - began)
    return found, freed


def soak(place: harness.Workplace) -> harness.Results:
    seconds = place.size(float(os.environ.get("SOAK_SECONDS", "60")), 2.0)
    processes, spaces = place.size(300, 10), place.size(100, 5)
    idle = place.size(120.0, 1.0)

    async def measured(folder: Path) -> churn.Result:
        with stages.staged(folder) as stage:
            return await churn.soak(
                stage, seconds=seconds, processes=processes, spaces=spaces, idle=idle
            )

    with place.room("audit") as folder:
        result = asyncio.run(measured(folder / "soak"))
    if not result.leak_found:
        raise RuntimeError("a leak after the churn was not found")
    note = f"{result.seconds:.0f} s, {result.mounts} mounts, {result.looks} looks"
    false = len(result.false_findings)
    yield "audit_false_findings", harness.at_most([false], 1, "findings", note)
    note = f"{result.processes} processes, {result.namespaces} namespaces"
    yield "audit_full_pass", harness.at_most([result.full_pass_cpu_ms], 500, "ms of CPU", note)
    note = f"over {idle:.0f} s; {result.busy_cpu_percent:.1f} under churn"
    yield "audit_idle", harness.at_most([result.idle_cpu_percent], 0.5, "% of a core", note)


def accident(place: harness.Workplace) -> harness.Results:
    with place.room("audit") as folder:
        found, freed = asyncio.run(_accident(folder, place.rounds))
    yield "leak_found_after", harness.at_most(found, 5, "s", "after the host's unmount")
    yield "leak_freed_after", harness.at_most(freed, 5, "s", "with the action on")


def lines(place: harness.Workplace) -> harness.Results:
    number = place.size(1_000_000, 2_000)
    with place.room("audit") as folder:
        result = asyncio.run(flood.flood(folder, lines=number))
    rate = result["accounted_per_second"]
    if result["seen"] + result["dropped"] != number:
        raise RuntimeError(f"of {number} lines not all were accounted for: {result}")
    note = f"{rate:,} lines/s, every one accounted for"
    stall = result["longest_stall_of_the_loop_ms"]
    yield "log_flood_stall", harness.at_most([stall], 500, "ms", note)


GROUPS = {"soak": soak, "accident": accident, "lines": lines}
