"""Ends the process when its event loop is stuck: whoever started it then starts it again.

A loop that stands still answers no probe, hears no signal and keeps no room at work. A thread
watches it, counting its own rounds instead of reading a clock: a process that was stopped and
continued (a debugger, a paused machine) is not stuck.
"""

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import AsyncIterator

ROUND_SECONDS = 5.0
# Longer than three probes of kubelet, which does the same from outside.
ROUNDS = 12
EXIT_CODE = 70  # EX_SOFTWARE


class _Watch:
    def __init__(self) -> None:
        self.advanced = True
        self.ended = threading.Event()

    def look(self) -> None:
        """In the thread."""
        stuck = 0
        while not self.ended.wait(ROUND_SECONDS):
            stuck = 0 if self.advanced else stuck + 1
            self.advanced = False
            if stuck >= ROUNDS:
                seconds = stuck * ROUND_SECONDS
                said = f"nodeagent: the event loop has been stuck for {seconds:g} s: it ends\n"
                os.write(2, said.encode())
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(EXIT_CODE)


async def _advance(watch: _Watch) -> None:
    while True:
        watch.advanced = True
        await asyncio.sleep(ROUND_SECONDS / 2)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[None]:
    """While the block runs, a stuck loop ends the process with the stacks of all threads."""
    watch = _Watch()
    advancing = asyncio.create_task(_advance(watch), name="watchdog")
    threading.Thread(target=watch.look, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        watch.ended.set()
        advancing.cancel()
