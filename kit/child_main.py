"""The first code of every child process that the agent starts (``kit.processes`` runs this file).

A child must not outlive its agent: a copy or an unmap that went on beside the agent's successor
would work against it. So each child first asks the kernel to be killed with its parent, then checks
that the parent still lives. ``kit.processes`` gives it the parent's module path, because it starts
Python without the ``site`` module (-S -E), which halves the start. Nothing is imported that the
child's own job does not need.

Jobs: ``run`` runs a function that talks by itself (``kit.messages``, ``kit.fork_server``),
``exec`` another program.
"""

import json
import os
import sys

TYPE_CHECKING = False  # as in typing, whose import costs a child's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
SIGKILL = 9

_agent = 0


def agent_pid() -> int:
    """The agent that this child process works for; 0 in any other process."""
    return _agent


def command(job: str, target: str, *rest: str) -> list[str]:
    """How this process starts this file as its child."""
    path = "[]" if job == "exec" else json.dumps(sys.path)
    python = [sys.executable, "-S", "-E", os.path.abspath(__file__)]
    return [*python, str(os.getpid()), path, job, target, *rest]


def end_after(work: "Callable[[], None]") -> "NoReturn":
    """The rest of a forked process: ``work``, then the end; with code 1 and a traceback after an
    error. Nothing of the process that it was forked from runs again."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def die_with_parent() -> None:
    """Be killed (SIGKILL) when the thread that started this process ends, however it ends.

    OSError when the kernel refuses. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(PR_SET_PDEATHSIG, SIGKILL)


def name_process(name: str) -> None:
    """Show the first 15 bytes of ``name`` in /proc and ps. Source: prctl(2), PR_SET_NAME."""
    _prctl(PR_SET_NAME, name.encode())


def _prctl(option: int, value: "int | bytes") -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value) if isinstance(value, int) else value) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


def main() -> None:
    """Arguments: the parent's pid, its module path as JSON, the job, its target and arguments."""
    global _agent
    parent, path, job, target, *rest = sys.argv[1:]
    _agent = int(parent)
    die_with_parent()
    if os.getppid() != _agent:
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
    getattr(importlib.import_module(module), name)()


if __name__ == "__main__":
    main()
