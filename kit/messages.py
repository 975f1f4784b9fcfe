"""Messages between the agent and its children: typed dataclasses, one JSON text each.

A message is a dataclass or a plain JSON value. File names are str by ``os.fsdecode``: bytes that
are not UTF-8 are lone surrogates in it, which msgspec's own JSON refuses. So msgspec converts
between types and plain values, and the standard library, which keeps them, handles the text.

An outcome is ``{"result": ...}``, or an error that the agent raises again: ``error`` is an
AgentError, ``oserror`` an OSError, ``failed`` anything else, with its text.

``serve``, ``hear`` and ``say`` are the child's side of ``kit.line_worker``.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import kit.errors

T = TypeVar("T")


class ChildError(RuntimeError):
    """A child failed in a way that it did not expect; the text holds its last words."""


def encode(message: Any) -> str:
    """JSON on one line."""
    import msgspec  # children that answer plain values do without it

    return json.dumps(msgspec.to_builtins(message), separators=(",", ":"))


def decode(text: str | bytes, kind: type[T]) -> T:
    """The message as ``kind``. ValueError when the text is no such message."""
    return _convert(json.loads(text), kind)


def _convert(value: Any, kind: type[T]) -> T:
    import msgspec

    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error


def outcome(function: Callable[[], Any]) -> str:
    """Run ``function``; its result or its OSError or AgentError as an outcome.

    Any other exception passes through: a one-shot child ends with its traceback.
    """
    try:
        result = function()
    except kit.errors.AgentError as error:
        return json.dumps({"error": [error.thing, error.cause, error.remedy, error.exit_code]})
    except OSError as error:
        name = None if error.filename is None else str(error.filename)
        return json.dumps({"oserror": [error.errno or 0, error.strerror or str(error), name]})
    try:
        text = json.dumps(result, separators=(",", ":"))  # plain values
    except TypeError:
        text = encode(result)
    return f'{{"result":{text}}}'


def result(text: str | bytes, kind: type[T]) -> T:
    """The result of an outcome as ``kind``; raises the error that it carries."""
    answer = json.loads(text)
    if "error" in answer:
        thing, cause, remedy, code = answer["error"]
        # Only classes of kit.errors: others share these codes and have other constructors.
        kinds = {
            each.exit_code: each
            for each in kit.errors.AgentError.__subclasses__()
            if each.__module__ == kit.errors.__name__
        }
        raise kinds.get(code, kit.errors.AgentError)(thing, cause, remedy)
    if "oserror" in answer:
        raise OSError(*answer["oserror"])
    if "failed" in answer:
        raise ChildError(answer["failed"])
    return answer["result"] if kind is Any else _convert(answer["result"], kind)


# --- a child that goes on


def serve(kind: type[T], handle: Callable[[T], Any]) -> None:
    """Answer each request line by line until the agent closes the pipe.

    A bug in ``handle`` is one failed answer, not a silent child.
    """
    for line in sys.stdin:
        try:
            request = decode(line, kind)
            text = outcome(lambda request=request: handle(request))  # type: ignore[misc]
        except Exception as error:
            text = encode({"failed": f"{type(error).__name__}: {error}"})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def hear(kind: type[T]) -> T | None:
    """The next message of the agent; None when it has closed the pipe. Blocks."""
    line = sys.stdin.readline()
    return decode(line, kind) if line else None


def say(message: Any) -> None:
    """One message to an agent that listens. BrokenPipeError when it has ended."""
    sys.stdout.write(f'{{"result":{encode(message)}}}\n')
    sys.stdout.flush()
