"""One agent uses a store: two would fill, withdraw and delete under one another."""

import os
from pathlib import Path

import kit.errors
import kit.files

SECONDS = 2.0  # for an agent that was killed to end
_held: dict[str, int] = {}  # of this process


def hold(store: str) -> None:
    """Lock the store until the process ends. HostError when another agent has it. OSError.

    The directory is locked, not a file in it: a file that is open for writing would keep the disk
    from becoming read-only. Locked anew each time, because another disk may lie there now.
    """
    release(store)
    try:
        _held[store] = kit.files.lock(Path(store), SECONDS)
    except OSError as error:
        if error.strerror != "another process holds the lock":
            raise
        raise kit.errors.HostError(
            f"cache.store {store}", "another agent uses it",
            "end that agent, or give each agent a store of its own",
        ) from error  # fmt: skip


def release(store: str) -> None:
    if store in _held:
        os.close(_held.pop(store))
