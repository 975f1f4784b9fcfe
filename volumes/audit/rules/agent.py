"""Rules about what the agent's own parts report: guard-not-enforcing, ledger-mismatch, unread-log,
flooding-log, and the findings that come straight from log lines (log-<pattern id>).
"""

from collections.abc import Iterator

from volumes.audit.rules.base import Outcome, rule
from volumes.audit.types import KERNEL, LogHit, Scene, Severity, Trouble

LOG_PREFIX = "log-"
_NO_GUARD = "the guard does not report its state"


@rule("guard-not-enforcing", Severity.WARNING, 60.0)
def guard_not_enforcing(scene: Scene) -> Outcome | list[Trouble]:
    """The format guard is not in force on this node."""
    if scene.guard is None:
        return Outcome(unknown=_NO_GUARD)
    if scene.guard.enforcing:
        return Outcome()
    why = "; ".join(scene.guard.reasons) or "its mode is not enforce"
    severity, message = None, f"the format guard does not enforce: {why}"
    advice = (
        "a failed probe can still end in mkfs on this node: see 'nodeagent volume guard status' "
        "and set volumes.guard.mode to enforce"
    )
    if scene.guard.only_reports:  # somebody's choice, not a fault
        severity = Severity.INFO
        message = "the format guard only reports: its mode is dry-run, and no format is refused"
        advice = (
            "when a week has passed without a finding 'format-would-be-denied', set "
            "volumes.guard.mode to enforce"
        )
    return [Trouble("guard", message, advice, severity=severity, evidence={"reasons": why})]


@rule("ledger-mismatch", Severity.CRITICAL, 0.0)
def ledger_mismatch(scene: Scene) -> Outcome | list[Trouble]:
    """A volume does not hold the file system that it held before."""
    if scene.guard is None:
        return Outcome(unknown=_NO_GUARD)
    return [
        Trouble(
            subject=mismatch.device,
            key=mismatch.image,
            device=mismatch.device,
            message=f"{mismatch.image or mismatch.device} held {mismatch.expected} and now holds "
            f"{mismatch.seen}",
            advice="it was formatted or overwritten elsewhere, or its backend gives wrong data. "
            f"Look again ('nodeagent volume probe /dev/{mismatch.device}'), on another node only "
            "mapped read-only, before anything is stopped or restored. If the change was intended, "
            "accept it ('nodeagent volume ledger --accept VOLUME')",
            evidence={"expected": mismatch.expected, "seen": mismatch.seen},
        )
        for mismatch in scene.guard.mismatches
    ]


# Logs appear late after a boot, and are missing for moments during rotation.
@rule("unread-log", Severity.WARNING, 120.0)
def unread_log(scene: Scene) -> Iterator[Trouble]:
    """A configured log cannot be read."""
    # The default sources fit most nodes, not all: k3s has no kubelet.service.
    chosen = "sources" in scene.settings.logs.model_fields_set
    for source, why in scene.unread_logs.items():
        yield Trouble(
            subject=source,
            severity=Severity.WARNING if chosen or source == KERNEL else Severity.INFO,
            message=f"log source {source} is not readable: {why}",
            advice="its lines can announce trouble and nobody reads them: mount the log where the "
            "agent expects it, or list this node's logs in volumes.audit.logs.sources (without the "
            "sources that it does not have)",
            evidence={"source": source, "cause": why},
        )


@rule("flooding-log", Severity.WARNING, 0.0)
def flooding_log(scene: Scene) -> Iterator[Trouble]:
    """A log has more different lines of trouble than are kept."""
    for source, most in scene.flooding_logs.items():
        yield Trouble(
            subject=source,
            message=f"log source {source} floods: more than {most} different lines of trouble; "
            "findings are made of the gravest ones, then of those that came first",
            advice="look at the log itself: one cause can make them all, or somebody writes "
            "them. The findings of other logs are not touched",
            evidence={"source": source, "kept": str(most)},
        )


def from_logs(scene: Scene) -> Iterator[tuple[str, LogHit, Trouble]]:
    """(rule name, hit, trouble) for each log hit. The rule is named ``log-<pattern id>``."""
    for hit in scene.logs:
        evidence = {
            "line": hit.text[:500],
            "source": hit.source,
            "times": str(hit.count),
            "image": hit.image,
            "pod_uid": hit.pod_uid,
            "volume": hit.volume,
        }
        device = scene.inventory.device(hit.device) if scene.inventory and hit.device else None
        if device is not None and scene.inventory is not None:
            evidence["image"] = hit.image or (device.image.spec if device.image else "")
            volume = scene.inventory.volume_of(device)
            if volume is not None:
                evidence["volume"] = volume.name or volume.handle
                evidence["pods"] = ", ".join(p.pod_uid for p in volume.publishes[:4])
        trouble = Trouble(
            subject=hit.device or hit.image or hit.volume or hit.pod_uid or hit.source,
            device=hit.device,
            pid=hit.pid,
            severity=hit.severity,
            message=f"{hit.meaning}: {hit.text[:200]}",
            advice=hit.advice,
            evidence={name: value for name, value in evidence.items() if value},
        )
        yield LOG_PREFIX + hit.pattern, hit, trouble
