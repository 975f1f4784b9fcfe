"""Figures of the volume audit: ``python -m tests.bench.volume_audit [SECONDS]`` (root).

Writes build/bench/volume_audit.json: the soak (ten minutes by default, ``make soak``), the full
pass, idle cost, how soon a leak is found and freed, and a flood of log lines.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog

from tests.volumes.audit import churn, flood
from tests.volumes.audit import stage as stages

OUT = Path("build/bench/volume_audit.json")
IDLE_SECONDS = 120.0


async def _soak(folder: Path, seconds: float) -> dict[str, Any]:
    with stages.staged(folder) as stage:
        idle = IDLE_SECONDS if seconds >= 300 else 20.0
        return churn.as_json(
            await churn.soak(stage, seconds=seconds, processes=300, spaces=100, idle=idle)
        )


async def _accident(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds from the host's unmount to the finding, and to the freed device with the action."""
    found, freed = [], []
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
    return {"found_seconds": sorted(found), "freed_seconds": sorted(freed)}


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "soak": asyncio.run(_soak(Path(folder, "soak"), seconds)),
            "accident": asyncio.run(_accident(Path(folder, "accident"), 5)),
            "flood": asyncio.run(flood.flood(Path(folder), lines=1_000_000)),
        }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
