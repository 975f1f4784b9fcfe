"""What preheating leaves in the container runtime, and how it is taken out. In child processes.

Images stay: they are the runtime's. Pins, holds of pulls, notes and our labels go.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kit.traces import Trace
from preheat import component
from preheat.runtimes import base, containerd
from preheat.settings import PreheatSettings


@contextlib.asynccontextmanager
async def _runtime(settings: PreheatSettings, state_dir: str) -> AsyncIterator[base.Runtime]:
    made = component.runtime_of(settings, Path(state_dir))
    try:
        await made.connect()
        yield made
    finally:
        await made.close()


def find(section: dict[str, Any], state_dir: str) -> list[dict[str, Any]]:
    settings = PreheatSettings.model_validate(section)

    async def look() -> list[Trace]:
        async with _runtime(settings, state_dir) as runtime:
            inventory = await runtime.inventory()
            found = [Trace(hold.role, f"{hold.id} ({hold.ref})") for hold in inventory.holds]
            if partial := [d for d, ingest in inventory.ingests.items() if ingest.ours is not None]:
                found.append(Trace("partial layers", f"{len(partial)}"))
            if inventory.last_used:
                found.append(
                    Trace("labels", f"{containerd.LAST_USED} ({len(inventory.last_used)})")
                )
            return found

    found = asyncio.run(look())
    if settings.runtime == "crio":
        files = (settings.crio.drop_in, Path(state_dir) / component.CRIO_STATE)
        found += [Trace("file", str(path)) for path in files if path.exists()]
    return [trace.as_json() for trace in found]


def remove(section: dict[str, Any], state_dir: str, kind: str, name: str) -> None:
    settings = PreheatSettings.model_validate(section)
    if kind == "file":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        return

    async def take() -> None:
        async with _runtime(settings, state_dir) as runtime:
            inventory = await runtime.inventory()
            match kind:
                case "partial layers":
                    await runtime.drop_partials(frozenset(inventory.ingests), ours_only=True)
                case "labels":
                    for digest in inventory.last_used:
                        await runtime.note_use(digest, None)
                case _:
                    for hold in inventory.holds:
                        if hold.id == name.partition(" ")[0]:
                            await (runtime.unpin(hold) if kind == "pin" else runtime.end(hold))

    asyncio.run(take())
