"""Hear of every mount and unmount in one mount namespace (proc_pid_mountinfo(5), poll)."""

import asyncio
import os
import select
from collections.abc import Callable


class MountWatch:
    """Calls back from the event loop after each change of ``/proc/<pid>/mountinfo``.

    mountinfo is always readable, so that an ordinary reader would spin: an epoll of our own waits
    for EPOLLPRI only, and the loop waits for that epoll.
    """

    def __init__(self, table: str, changed: Callable[[], None]) -> None:
        """OSError when the process has gone."""
        self._changed = changed
        self._table = os.open(table, os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(self._table, select.EPOLLPRI | select.EPOLLERR)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def _ready(self) -> None:
        self._epoll.poll(0)
        self._changed()

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        os.close(self._table)
