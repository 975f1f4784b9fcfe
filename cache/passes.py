"""A pass as the agent sees it: a process that is told what to do and says how far it is."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog

log = structlog.get_logger("pass")

# A pass that neither lists, copies nor commits for so long hangs on its source: it is ended and
# tried again later, so that another dataset can go on.
STALL_SECONDS = 60.0
# Making a batch durable waits for all that is dirty on the SSD, somebody else's writes included.
SYNC_SECONDS = 600.0
# What a cancelled pass may take to commit what it has staged.
CANCEL_SECONDS = 8.0
_LONGEST_LINE = 1024 * 1024


class Pass:
    """One process of cache.fill. ``ended`` resolves to the last event it said."""

    def __init__(self, module: str, task: dict[str, Any], heard: Callable[[dict[str, Any]], None]):
        self._module = module
        self._task = task
        self._heard = heard
        self._process: asyncio.subprocess.Process | None = None
        self._last_words: dict[str, Any] = {"event": "end", "result": "failed", "why": ""}
        self._progress: dict[str, Any] = {}
        self._moved = time.monotonic()
        self._patience = STALL_SECONDS
        self.ended: asyncio.Task[dict[str, Any]] | None = None

    async def start(self) -> None:
        """Start it and give it its task. OSError when no process can be had."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )  # fmt: skip
        self.tell(self._task)
        self.ended = asyncio.create_task(self._follow(), name=self._module)

    def tell(self, command: dict[str, Any]) -> None:
        """A command; lost without harm when the pass has just ended."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
                self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _follow(self) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        stalled = asyncio.create_task(self._watch_for_stall())
        try:
            async for line in process.stdout:
                event = json.loads(line)
                self._note(event)
                if event["event"] == "end":
                    self._last_words = event
                else:
                    self._heard(event)
        finally:
            stalled.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # its pipe is closed: it has nothing more to do
        if not self._last_words["why"] and self._last_words["result"] == "failed":
            self._last_words["why"] = "the pass ended unexpectedly"
        return self._last_words

    def _note(self, event: dict[str, Any]) -> None:
        keys = ("files_total", "files_done", "copied_files", "copied_bytes", "directories_sealed",
                "checked_bytes", "beats")  # fmt: skip
        now = {key: event.get(key) for key in keys}
        if event["event"] != "progress" or now != self._progress:
            self._moved = time.monotonic()
        if event["event"] == "progress":
            self._progress = now
            self._patience = SYNC_SECONDS if event.get("syncing") else STALL_SECONDS

    async def _watch_for_stall(self) -> None:
        # Not an event: every line heard moves the deadline, waking for each would cost more.
        while (left := self._moved + self._patience - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left, STALL_SECONDS))
        self._last_words = {
            "event": "end",
            "result": "failed",
            "why": f"no progress for {self._patience:g}s: the source or the disk hangs",
        }
        log.warning("pass stalls, ending it", dataset=self._task.get("dataset"))
        await self._kill()

    async def cancel(self) -> None:
        """Let it commit what is staged, then end it in any case."""
        self.tell({"do": "cancel"})
        if self.ended is not None:
            done, _ = await asyncio.wait({self.ended}, timeout=CANCEL_SECONDS)
            if not done:
                await self._kill()

    async def _kill(self) -> None:
        """Its workers die with it (PR_SET_PDEATHSIG). One in D state is left behind."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
