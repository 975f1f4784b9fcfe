"""Calls that may hang in the kernel, each in a process of its own that can be abandoned.

A thread in an uninterruptible sleep can neither be cancelled nor left behind (it keeps the
interpreter from ending); a process can. The child is a fresh interpreter that imports only what
the function needs, and is killed with the agent: nothing goes on beside the agent's successor.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import kit.errors
from kit import errand

# Children that outlived their deadline and cannot be killed (D state), each with what it was asked:
# the function and its first argument, which says what it is about. Counted, never waited for.
_abandoned: dict[asyncio.Task[Any], str] = {}
# One that was killed and does not hang is gone within this.
_KILLED_SECONDS = 1.0


class DeadlineError(kit.errors.AgentError):
    """A call did not come back in time; its process was abandoned."""


def abandoned() -> int:
    """How many children still hang in the kernel after their deadline."""
    return len(_abandoned)


async def call(function: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
    """``function(*arguments)`` in a child, at most ``deadline`` seconds.

    The function is a public one of a module; arguments and result are JSON (bytes as str by
    os.fsdecode). Raises what the function raised if it was an OSError or AgentError, DeadlineError
    when time ran out, RuntimeError with the child's last words for anything else.

    Invariant: of abandoned calls of one function with one first argument at most those hang that
    were begun before the first of them was abandoned; until they are gone, others of them get a
    DeadlineError without a child.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    key = f"{name} {json.dumps(arguments[:1])}"
    await _refuse_while_hanging(function, key, deadline)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", errand.__name__, name, str(os.getpid()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    talk = asyncio.create_task(process.communicate(json.dumps(arguments).encode()))
    try:
        out, err = await asyncio.wait_for(asyncio.shield(talk), deadline)
    except TimeoutError:
        _abandon(process, talk, key)
        raise DeadlineError(
            function.__qualname__.replace("_", " "),
            f"no answer within {deadline:g}s",
            "the source or the disk behind it hangs; it is tried again later",
        ) from None
    except asyncio.CancelledError:
        _abandon(process, talk, key)
        raise
    if process.returncode or not out:
        raise RuntimeError(f"{name} ended with {process.returncode}: {err.decode()[-1000:]}")
    return _result(json.loads(out))


async def _refuse_while_hanging(function: Callable[..., Any], key: str, deadline: float) -> None:
    """DeadlineError while an abandoned call of this key is there; each more would hang too."""
    if same := [talk for talk, of in _abandoned.items() if of == key]:
        # One that was killed only now (a cancelled one, say) is no reason to refuse.
        await asyncio.wait(same, timeout=min(deadline, _KILLED_SECONDS))
    if key in _abandoned.values():
        raise DeadlineError(
            function.__qualname__.replace("_", " "),
            "an earlier call still hangs in the kernel",
            "the source or the disk behind it hangs; it is tried again later",
        )


def _abandon(process: asyncio.subprocess.Process, talk: asyncio.Task[Any], key: str) -> None:
    try:
        process.kill()
    except ProcessLookupError:
        pass  # it ended by itself just now
    _abandoned[talk] = key
    talk.add_done_callback(lambda done: _abandoned.pop(done, None))


def _result(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        thing, cause, remedy, code = answer["error"]
        # Elsewhere classes share these codes, and some are made from other things than these three.
        kinds = {
            kind.exit_code: kind
            for kind in kit.errors.AgentError.__subclasses__()
            if kind.__module__ == kit.errors.__name__
        }
        raise kinds.get(code, kit.errors.AgentError)(thing, cause, remedy)
    if "oserror" in answer:
        raise OSError(*answer["oserror"])
    return answer["result"]
