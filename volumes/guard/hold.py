"""The child process of ``holds``: it has one device open until the agent closes the pipe.

By itself, because the process that the agent's children fork from keeps what this module loads for
as long as the agent runs.
"""

import contextlib
import math
import signal
from dataclasses import dataclass

import kit.messages
from linux import blockdev


@dataclass(frozen=True)
class Request:
    name: str
    number: blockdev.Number
    diskseq: int | None
    seconds: float


_opened = contextlib.ExitStack()  # until the process ends


def main() -> None:
    kit.messages.serve(Request, have_open)


def have_open(asked: Request) -> bool:
    """OSError when the device is another one by now."""
    _opened.enter_context(blockdev.opened(f"/dev/{asked.name}", asked.number))
    found = blockdev.identify(asked.name)  # from here on it stays what it is
    if found is None or found.diskseq != asked.diskseq:
        _opened.close()  # not the other one either, not even until the agent has read the answer
        raise OSError(0, f"another device is attached as {asked.name}")
    signal.alarm(math.ceil(asked.seconds))
    return True
