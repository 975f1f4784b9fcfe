"""Functions that the tests of kit call in children."""

import os
import time
from dataclasses import dataclass

import kit.errors
from kit import child_main, messages


@dataclass(frozen=True)
class Question:
    number: int
    name: str = ""


@dataclass(frozen=True)
class Number:
    value: int
    name: str


def echo(*values: object) -> list[object]:
    return list(values)


def agent_and_parent(*_: object) -> tuple[int, int]:
    return child_main.agent_pid(), os.getppid()


def tells(text: str) -> None:
    raise LookupError(text)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def own_pid_then_sleep(path: str) -> None:
    with open(path, "w") as stream:
        stream.write(str(os.getpid()))
    time.sleep(60)


def hang_until(path: str, *_: object) -> None:
    """Like a child in an uninterruptible sleep: killing it does not close its pipes."""
    if os.fork() == 0:
        os.setsid()  # out of the group that is killed
        with open(f"{path}.hangs", "w") as stream:
            stream.write("it does")
        while not os.path.exists(path):
            time.sleep(0.02)
        os._exit(0)
    time.sleep(60)


def serve_numbers() -> None:
    """A worker: doubles numbers; some requests break it."""
    messages.serve(Question, _double)


def _double(question: Question) -> Number:
    match question.name:
        case "late":
            time.sleep(60)
        case "end":
            os._exit(3)
        case "refuse":
            raise kit.errors.RefusedError("a", "b", "c")
        case "os":
            raise FileNotFoundError(2, "gone", "/x")
        case "bug":
            raise ZeroDivisionError("oops")
    return Number(question.number * 2, question.name)


def count() -> None:
    """A worker that speaks by itself up to 4; silent at the end."""
    first = messages.hear(Question)
    assert first is not None
    for number in range(first.number, 5):
        messages.say(Number(number, first.name))
    messages.hear(Question)


@dataclass(frozen=True)
class Place:
    agent: int
    parent: int
    group: int
    descriptors: list[int]


def say_where_it_is() -> None:
    """A worker that says it once and waits to be ended."""
    messages.hear(Question)
    *found, _ = sorted(map(int, os.listdir("/proc/self/fd")))  # the last one lists them
    messages.say(Place(child_main.agent_pid(), os.getppid(), os.getpgrp(), found))
    messages.hear(Question)


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
