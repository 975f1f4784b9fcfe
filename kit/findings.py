"""Findings: what the audits say, and the one port through which it is reported."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import kit.formats
import kit.redact


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True)
class Finding:
    """One finding of any component."""

    id: str  # stays the same while the problem exists
    rule: str
    severity: Severity
    subject: str  # device, dataset, image or pod
    message: str  # the thing and the cause, in one line
    advice: str  # what to do
    evidence: Mapping[str, str] = field(default_factory=dict)
    # The reporter fills it in.
    since: float = 0.0  # Unix time

    def __post_init__(self) -> None:
        for name in ("subject", "message", "advice", "evidence"):
            object.__setattr__(self, name, kit.redact.value(getattr(self, name)))


def said(subject: str, message: str) -> str:
    """What it is about and what is wrong with it; many messages begin with their subject."""
    begins = not subject or message == subject or without(subject, message) != message
    return message if begins else f"{subject}: {message}"


def without(subject: str, message: str) -> str:
    """The message without its subject at its beginning, for a place that shows both."""
    rest = message.removeprefix(subject)
    return message if rest[:1].isalnum() else rest.removeprefix(":").lstrip() or message


def damaged(where: str, name: str, why: str, assumed: str) -> Finding:
    """``name``: of a file of ours below ``where``, a state directory or a store."""
    kept = f"{name}{kit.formats.SUFFIX}"
    return Finding(
        id=f"state-file-damaged/{name}",
        rule="state-file-damaged",
        severity=Severity.WARNING,
        subject=f"{where}/{name}",
        message=f"{name} was damaged ({why}), and is kept as {kept}: {assumed}",
        advice="was its disk full, or does it fail (kernel log, smartctl), did somebody edit it? "
        f"Then delete {where}/{kept}",
    )


class Reporter(Protocol):
    """The port to logs, metrics and (with its own issue) Kubernetes Events and Node conditions."""

    def report(self, origin: str, findings: list[Finding]) -> None:
        """Replace everything ``origin`` has found; what is no longer in the list has cleared."""
