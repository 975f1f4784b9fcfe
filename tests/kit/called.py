"""Functions that test_child calls in children."""

import os
import time

import kit.errors


def echo(*values: object) -> list[object]:
    return list(values)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def own_pid_then_sleep(path: str) -> None:
    with open(path, "w") as stream:
        stream.write(str(os.getpid()))
    time.sleep(60)


def hang_until(path: str, *_: object) -> None:
    """Like a child in an uninterruptible sleep: killing it does not close its pipes."""
    if os.fork() == 0:
        while not os.path.exists(path):
            time.sleep(0.02)
        os._exit(0)
    time.sleep(60)


def missing() -> None:
    os.stat("/no/such/file")


def in_use() -> None:
    raise kit.errors.InUseError("a", "b", "c")


def refused() -> None:
    raise kit.errors.RefusedError("a", "b", "c")


def source() -> None:
    raise kit.errors.SourceError("a", "b", "c")


def plain() -> None:
    raise kit.errors.AgentError("a", "b", "c")


def broken() -> None:
    raise ZeroDivisionError("oops")


def die() -> None:
    os.kill(os.getpid(), 9)
