"""The child's side of ``kit.child``: runs one function and answers with its result or its error.

A call costs what this imports: no asyncio, nothing but what the function itself needs.
"""

import importlib
import json
import os
import sys
from typing import Any

import kit.errors
import kit.parent


def main() -> None:
    """The child: module:function and its parent's pid as arguments, JSON on standard input."""
    # What a killed agent had begun must not go on beside its successor.
    kit.parent.die_with()
    if os.getppid() != int(sys.argv[2]):
        sys.exit("the agent has gone")
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
