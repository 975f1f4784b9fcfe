"""A pass's line to the agent: commands on standard input, events on standard output, JSON lines."""

import errno
import json
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from typing import Any, Protocol

from cache.fill import crew
from kit import child_main


class Runnable(Protocol):
    def run(self) -> None: ...


class Link:
    """Never blocks on reading; writing blocks while the agent does not read, which is right."""

    def __init__(self) -> None:
        self._input = b""
        os.set_blocking(0, False)

    def say(self, event: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()

    def hear(self) -> list[dict[str, Any]] | None:
        """Commands that have come; None when the agent has gone."""
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._input = (self._input + data).split(b"\n")
        return [json.loads(line) for line in lines]


def serve(begin: Callable[[dict[str, Any]], Runnable]) -> None:
    """Read the task, run the pass that ``begin`` makes of it, say why when it cannot begin."""
    child_main.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent cancels or kills
    os.umask(0)
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # one by one: what follows belongs to the link
        if not byte:
            return
        line += byte
    try:
        begin(json.loads(line)).run()
    except (OSError, crew.CrewError) as error:
        # By number: Python makes a BrokenPipeError of ESHUTDOWN too, which a source may give.
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            return  # the agent has gone
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        _failed(why)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            _failed("the disk is full, not even the index can grow")
            return
        _failed(f"the index is damaged ({error}); the next pass makes it anew")


def _failed(why: str) -> None:
    sys.stdout.write(json.dumps({"event": "end", "result": "failed", "why": why}) + "\n")
