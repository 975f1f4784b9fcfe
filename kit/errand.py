"""The child's side of ``kit.child``: runs one function and answers with its result or its error.

A call costs what this imports: no asyncio, nothing but what the function itself needs.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

import kit.errors

_PR_SET_PDEATHSIG = 1


def _die_with(parent: int) -> None:
    """Be killed when the process ``parent`` ends, however it ends; end now if it has.

    What a killed agent had begun must not go on beside its successor. As linux.processes, which
    kit is below. OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")
    if os.getppid() != parent:
        sys.exit("the agent has gone")


def main() -> None:
    """The child: module:function and its parent's pid as arguments, JSON on standard input."""
    _die_with(int(sys.argv[2]))
    module, _, qualname = sys.argv[1].partition(":")
    arguments = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        answer = {"result": getattr(importlib.import_module(module), qualname)(*arguments)}
    except kit.errors.AgentError as error:
        answer = {"error": [error.thing, error.cause, error.remedy, error.exit_code]}
    except OSError as error:
        number = error.errno or 0
        answer = {"oserror": [number, error.strerror or os.strerror(number), error.filename]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
