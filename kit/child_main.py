"""The first code of every child process that the agent starts (``kit.processes`` runs this file).

A child must not outlive its agent: a copy or an unmap that went on beside the agent's successor
would work against it. So each child first asks the kernel to be killed with its parent, then checks
that the parent still lives. ``kit.processes`` gives it the parent's module path, because it starts
Python without the ``site`` module (-S -E), which halves the start. Nothing is imported that the
child's own job does not need.

Jobs: ``call`` runs one function (``kit.child``), ``run`` a function that talks by itself
(``kit.line_worker``), ``exec`` another program.
"""

import json
import os
import sys

PR_SET_PDEATHSIG = 1
SIGKILL = 9


def die_with_parent() -> None:
    """Be killed (SIGKILL) when the thread that started this process ends, however it ends.

    OSError when the kernel refuses. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(SIGKILL)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def main() -> None:
    """Arguments: the parent's pid, its module path as JSON, the job, its target and arguments."""
    parent, path, job, target, *rest = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):
        sys.exit("the agent has ended")
    if job == "exec":
        try:
            os.execvp(target, (target, *rest))
        except OSError as error:
            sys.stderr.write(f"{target}: {error.strerror}\n")
            os._exit(127)
    sys.path[:] = json.loads(path)
    # This file runs as __main__; the module of its name must be this one, not a second copy.
    sys.modules["kit.child_main"] = sys.modules["__main__"]
    import importlib

    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if job == "run":
        function()
        return
    from kit import messages

    sys.stdout.write(messages.outcome(lambda: function(*json.load(sys.stdin))))


if __name__ == "__main__":
    main()
