"""Threads that are kept apart from the loop's own few.

``asyncio.to_thread`` has a few threads for the whole process. A call that hangs on a disk keeps one
of them, whatever deadline its caller has, and after a few such calls nothing of any room runs.
"""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Apart:
    """One thread, made at the first call. While a call hangs the next ones wait for it, so callers
    need a deadline; who gives up takes his call back unless it has begun."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, functools.partial(function, *args, **kwargs))
