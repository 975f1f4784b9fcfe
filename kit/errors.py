"""One hierarchy of errors. A message names the thing, the cause and what to do."""

from collections.abc import Sequence
from typing import ClassVar

import kit.redact


def some(texts: Sequence[str], most: int = 5, between: str = "; ") -> str:
    """``A; B and 3 more``: the first ``most`` of ``texts``, for people."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


class AgentError(Exception):
    """Something a person has to know about.

    ``thing`` is what it is about, ``cause`` what happened, ``remedy`` what to do. ``exit_code``
    is what a command of ours ends with (docs/cli.md lists them all). The texts hold no secrets.
    """

    exit_code: ClassVar[int] = 1
    # Of a file with several mistakes, one for each; a terminal gets them below one another.
    lines: Sequence[str] = ()

    def __init__(self, thing: str, cause: str, remedy: str) -> None:
        thing, cause, remedy = map(kit.redact.text, (thing, cause, remedy))
        super().__init__(f"{thing}: {cause}; {remedy}" if remedy else f"{thing}: {cause}")
        self.thing = thing
        self.cause = cause
        self.remedy = remedy


class SettingsError(AgentError):
    """The settings cannot be used as they are."""

    exit_code = 3


class HostError(AgentError):
    """This host lacks what the agent needs: root, a kernel feature, a file system ability."""

    exit_code = 4


class DegradedError(HostError):
    """A part of the agent does not run; it is tried again."""


class SourceError(AgentError):
    """A dataset's source cannot be reached or read; tried again later."""

    exit_code = 5


class InUseError(AgentError):
    """Somebody uses what was to be taken down; the message says who."""

    exit_code = 6


class NotFoundError(AgentError):
    """No such dataset, volume or image."""

    exit_code = 7


class RefusedError(AgentError):
    """The request makes no sense in the present state."""

    exit_code = 8


class UnreachableError(AgentError):
    """No agent answers at the address."""

    exit_code = 9
