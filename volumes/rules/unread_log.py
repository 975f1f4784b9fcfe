"""unread-log: a log that should be followed cannot be read; its lines warn nobody."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.rules.base import Outcome, Rule, Scene, Trouble


def _found(scene: Scene) -> Iterator[Trouble]:
    # The built-in sources fit most nodes and not all: k3s has no kubelet.service.
    chosen = "sources" in scene.settings.logs.model_fields_set
    for source, why in scene.unread_logs.items():
        yield Trouble(
            subject=source,
            severity=Severity.WARNING if chosen or source == "kernel" else Severity.INFO,
            message=f"log source {source} is not readable: {why}",
            advice="its lines foretell trouble and nobody reads them: mount the log where the "
            "agent looks, or say in volumes.audit.logs.sources which logs this node has (leave "
            "out a source that it has not)",
            evidence={"source": source, "cause": why},
        )


def _judge(scene: Scene) -> Outcome:
    return Outcome(tuple(_found(scene)))


RULE = Rule(
    name="unread-log",
    summary="a log that should be followed cannot be read",
    severity=Severity.WARNING,
    patience=120.0,  # logs come late after a boot, and are away for moments when rotated
    judge=_judge,
)
