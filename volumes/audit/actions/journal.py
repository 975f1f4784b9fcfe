"""What was done, refused and tried dry: a bounded file of JSON lines, and the last ones at hand."""

import asyncio
import collections
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger("audit.actions")

LARGEST = 1 << 20  # bytes; then the file becomes .1 and a new one begins
LAST = 100
WRITE_SECONDS = 5.0


class Journal:
    """Invariant: at most two files of ``LARGEST`` bytes; an entry is on disk before we go on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: collections.deque[dict[str, Any]] = collections.deque(maxlen=LAST)

    async def write(self, entry: Mapping[str, Any]) -> None:
        """Logged, kept, and written; a disk that does not take it is said in the log."""
        self.last.append(dict(entry))
        log.warning("volume action", **entry)
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await asyncio.to_thread(self._append, json.dumps(entry) + "\n")
        except (OSError, TimeoutError) as error:
            log.error("the journal of actions cannot be written", error=str(error) or "timeout")

    def _append(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._path.exists() and self._path.stat().st_size > LARGEST:
            self._path.replace(self._path.with_suffix(".jsonl.1"))
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
