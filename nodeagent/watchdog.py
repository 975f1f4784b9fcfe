"""Ends the process when its event loop is stuck: whoever started it then starts it again.

A loop that stands still answers no probe, hears no signal and keeps no room at work. A thread
watches it, counting its own rounds instead of reading a clock: a process that was stopped and
continued (a debugger, a paused machine) is not stuck.

systemd, when it started us with ``WatchdogSec=``, hears from the loop too: it also ends a process
whose threads all stand still.
"""

import asyncio
import contextlib
import faulthandler
import os
import socket
import threading
from collections.abc import AsyncIterator

ROUND_SECONDS = 5.0
# Longer than three probes of kubelet, which does the same from outside.
ROUNDS = 12
LAST_WORDS_SECONDS = 5.0
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
                # Nobody may read what we say, or the file's disk may hang: the end must not wait
                # for it. What dumps the stacks keeps the interpreter's lock while it writes.
                threading.Timer(LAST_WORDS_SECONDS, os._exit, (EXIT_CODE,)).start()
                with contextlib.suppress(OSError):
                    os.set_blocking(2, False)
                    os.write(2, said.encode())
                    faulthandler.dump_traceback(2)
                os._exit(EXIT_CODE)


def _tell_systemd() -> None:
    where = os.environ.get("NOTIFY_SOCKET", "")
    if where:
        name = "\0" + where[1:] if where.startswith("@") else where
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
            told.setblocking(False)
            told.sendto(b"WATCHDOG=1", name)


async def _advance(watch: _Watch) -> None:
    while True:
        watch.advanced = True
        _tell_systemd()
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
