"""Calls that may hang in the kernel, each in a child process that can be abandoned.

A thread in an uninterruptible sleep can be neither cancelled nor left behind: it keeps the
interpreter from ending. A process can (``kit.processes``).

Invariant: while an abandoned call hangs, new calls with the same function and first argument (what
the call is about: a path, a device) fail at once with a DeadlineError.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit.redact
from kit import files, messages, processes
from kit.processes import DeadlineError as DeadlineError

_REMEDY = "the source or the disk behind it hangs; it is tried again later"


async def call(function: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
    """``function(*arguments)`` in a child, at most ``deadline`` seconds.

    The function is a public one of a module that loads little: ``kit.fork_server`` keeps it.
    Arguments and result are plain JSON values (bytes as str by os.fsdecode). Raises what the
    function raised if it was an OSError or AgentError, DeadlineError when time ran out,
    RuntimeError with the child's last words for anything else.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    thing = function.__qualname__.replace("_", " ")
    about = _about(function, *arguments[:1])
    if not await processes.settled(about, deadline):
        raise DeadlineError(thing, "an earlier call still hangs in the kernel", _REMEDY)
    begun = time.monotonic()
    try:
        process = await processes.start_call(name, deadline)
        talk = process.communicate(json.dumps(arguments).encode())
        left = max(begun + deadline - time.monotonic(), 0.0)
        out, err = await processes.to_the_end(process, talk, about, left)
    except TimeoutError:
        raise DeadlineError(thing, f"no answer within {deadline:g}s", _REMEDY) from None
    if process.returncode or not out:
        last = kit.redact.last(err.decode("utf-8", "replace"), 1000)
        raise RuntimeError(f"{name} ended with {process.returncode}: {last}")
    return messages.result(out, Any)


async def hangs(function: Callable[..., Any], *first: Any, seconds: float = 0.0) -> bool:
    """Whether an abandoned call of it with this first argument still hangs. One that was killed a
    moment ago may take ``seconds`` to end."""
    return not await processes.settled(_about(function, *first), seconds)


def _about(function: Callable[..., Any], *first: Any) -> str:
    return f"{function.__module__}:{function.__qualname__} {json.dumps(first)}"


async def read_small(path: Path, most: int, deadline: float) -> bytes:
    """As ``kit.files.read_small``, in a child. OSError, DeadlineError, RuntimeError as ``call``."""
    return os.fsencode(await call(files.content, str(path), most, deadline=deadline))
