"""When images were last used, kept in the runtime so that it outlives the agent."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping

from preheat.image import manifest
from preheat.runtimes import base, containerd

NOTED_EVERY_SECONDS = 600.0


class Uses:
    """``used_bytes``: of images pinned by us that containers then used, since the agent's start."""

    def __init__(self, runtime: containerd.Containerd) -> None:
        self._runtime = runtime
        self._before: set[str] | None = None  # top digests in use at the last cycle
        self.used_bytes = 0

    async def note(
        self, inventory: base.Inventory, shapes: Mapping[str, manifest.Shape]
    ) -> base.Inventory:
        """Store uses in the runtime: at first sight, now and then, and when the last one ends.

        Returns the inventory with them: what is in use, or was a cycle ago, was last used now.
        """
        now = time.time()
        using = {d for d, shape in shapes.items() if shape.image_id in inventory.in_use}
        # What an earlier agent noted was counted by it.
        before = set(inventory.last_used) & using if self._before is None else self._before
        ours = {hold.target.digest for hold in inventory.held("pin") if hold.target}
        self.used_bytes += sum(shapes[digest].bytes_total for digest in (using - before) & ours)
        noted = (using | before) & set(shapes)
        for digest in noted:
            ended = digest not in using
            if ended or now - inventory.last_used.get(digest, 0.0) > NOTED_EVERY_SECONDS:
                with contextlib.suppress(base.RuntimeCallError):
                    await self._runtime.note_use(digest, now)
        self._before = using
        last_used = dict(inventory.last_used) | dict.fromkeys(noted, now)
        return dataclasses.replace(inventory, last_used=last_used)
