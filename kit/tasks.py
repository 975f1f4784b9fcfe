"""Tasks and threads: how they are waited for and ended, and threads apart from the loop's own few.

``asyncio.to_thread`` has a few threads for the whole process. A call that hangs on a disk keeps one
of them, whatever deadline its caller has, and after a few such calls nothing of any room runs.
"""

import asyncio
import concurrent.futures
import functools
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_SECONDS = 0.5


async def until(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for the event, at most so long (None: for ever). Whether it came."""
    try:
        async with asyncio.timeout(seconds):  # wait_for can lose a cancel
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel them, and wait until they have ended, however they do."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    await asyncio.gather(*there, return_exceptions=True)


class Apart:
    """One thread, made at the first call; calls wait for the ones before them.

    The caller has the deadline, for a thread that hangs cannot be ended. Whoever gives up takes his
    call back, unless it has begun. Then it keeps the thread, and until it ends further calls are
    refused, from ``PATIENCE_SECONDS`` later on at once: nobody queues for a disk that does not
    answer. One who gave up early, as a room that is stopped does, is no sign of such a disk.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool = concurrent.futures.ThreadPoolExecutor(1, name)
        self._given_up: concurrent.futures.Future[Any] | None = None
        self._ended: asyncio.Future[Any] | None = None  # the same, for the loop
        self._patient_until = 0.0

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``function`` returns or raises. TimeoutError while an earlier call hangs."""
        if self._hangs() and self._ended is not None:
            left = self._patient_until - time.monotonic()
            await asyncio.wait([self._ended], timeout=max(0.0, left))
        if self._hangs():
            raise TimeoutError(
                f"{self._name}: an earlier call hangs on the disk; it is tried again later"
            )
        work = self._pool.submit(functools.partial(function, *args, **kwargs))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if not work.cancel():
                self._given_up = work
                self._patient_until = time.monotonic() + PATIENCE_SECONDS
                # One for all who wait: it stays with the call for as long as that hangs.
                self._ended = asyncio.wrap_future(work)
                self._ended.add_done_callback(lambda it: it.cancelled() or it.exception())
            raise

    def _hangs(self) -> bool:
        return self._given_up is not None and not self._given_up.done()


# For the disk of the state directory, which may hang: one, and not one for each object. A room that
# is started again and again on a dead disk makes its objects anew, and must not leave a thread
# behind each time.
STATE = Apart("state directory")
