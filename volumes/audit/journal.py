"""The journal of what the audit does to the node: actions and steps of repairs, one JSON line each.

Whatever is done is written as ``begun`` before it starts and with its outcome after it, so one that
the agent's end interrupted can be recognised. Two files of at most 1 MiB.
"""

import asyncio
import collections
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

import kit.files
import kit.threads

log = structlog.get_logger("audit.actions")

_WRITE_SECONDS = 5.0
_READ_SECONDS = 10.0
_MOST_LAST = 100


class ActionJournal:
    def __init__(self, state_dir: Path) -> None:
        self.last: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_LAST)
        self._path = state_dir / "volumes" / "actions.jsonl"

    async def write(self, entry: Mapping[str, Any]) -> bool:
        """To the log, to ``last`` and to the file; False when the disk failed, which is logged."""
        self.last.append(dict(entry))
        log.warning("volume action", **entry)
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await kit.threads.STATE.call(kit.files.append, self._path, entry)
        except (OSError, TimeoutError) as error:
            log.error("cannot write the journal of actions", error=str(error) or "timeout")
            return False
        return True

    async def recall(self) -> list[dict[str, Any]] | None:
        """As ``read``; None when the disk does not answer, which is logged."""
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await kit.threads.STATE.call(self.read)
        except TimeoutError as error:
            log.error("cannot read the journal of actions", error=str(error) or "timeout")
            return None

    def read(self) -> list[dict[str, Any]]:
        """What earlier agents wrote, the oldest first. Blocks. Damaged lines are left out."""
        found = []
        for file in (self._path.with_name(f"{self._path.name}.1"), self._path):
            with contextlib.suppress(OSError):
                found += kit.files.entries(file.read_bytes().splitlines())
        return found
