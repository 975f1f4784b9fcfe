"""Where the volumes room joins the audit: built from its settings, fed with what the guard knows.

The audit may be switched off; then there is none and every function here does nothing.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

import kit.findings
from volumes.audit import metrics as audit_metrics
from volumes.audit import service
from volumes.audit.settings import AuditSettings, ClusterSettings
from volumes.audit.types import GuardView, LedgerMismatch
from volumes.guard import layout, report
from volumes.probe import verdict

if TYPE_CHECKING:
    from volumes.guard.keeper import Keeper
    from volumes.settings import VolumesSettings


def view(guard: "Keeper") -> GuardView:
    """What the rules ask of the guard."""
    reasons = report.reasons(guard)
    if guard.wanted_mode() is not layout.Mode.ENFORCE:
        reasons.insert(0, f"its mode is {guard.wanted_mode()}")
    known = list(guard.judge.known.values())
    return GuardView(
        enforcing=not reasons,
        reasons=tuple(reasons),
        mismatches=tuple(
            LedgerMismatch(
                device=each.device.name,
                image=each.device.volume,
                expected=each.changed_from or each.missing,
                seen=str(each.seen),
            )
            for each in known
            if each.changed_from or each.missing
        ),
        unreadable=tuple(
            each.device.name
            for each in known
            if each.seen is not None
            and each.seen.verdict is verdict.Kind.UNREADABLE
            and not each.raw  # its pod writes to it, and got it for that
        ),
    )


def _settings(wanted: "VolumesSettings") -> AuditSettings:
    """The audit's own clusters, else the guard's."""
    if wanted.audit.clusters or not wanted.guard.clusters:
        return wanted.audit
    clusters = tuple(
        ClusterSettings(
            name=f"cluster-{number}", conf=each.conf, user=each.user, secret_file=each.keyring
        )
        for number, each in enumerate(wanted.guard.clusters, 1)
    )
    return wanted.audit.model_copy(update={"clusters": clusters})


def build(
    wanted: "VolumesSettings", guard: "Keeper", state_dir: Path, reporter: kit.findings.Reporter
) -> service.Audit | None:
    if not wanted.audit.enabled:
        return None
    return service.Audit(
        _settings(wanted),
        drivers=wanted.guard.drivers,
        state_dir=state_dir,
        reporter=reporter,
        guard=lambda: view(guard),
    )


async def start(audit: service.Audit | None) -> None:
    if audit is not None:
        await audit.start()


async def reconcile(audit: service.Audit | None, wanted: "VolumesSettings") -> Sequence[str]:
    refused = ["audit.enabled"] if (audit is not None) != wanted.audit.enabled else []
    if audit is not None:
        refused += await audit.reconcile(_settings(wanted), wanted.guard.drivers)
    return refused


async def stop(audit: service.Audit | None) -> None:
    if audit is not None:
        await audit.stop()


def reasons(audit: service.Audit | None) -> list[str]:
    return list(audit.health().reasons) if audit is not None else []


def alive(audit: service.Audit | None) -> bool:
    return audit is None or audit.health().alive


def metrics(audit: service.Audit | None) -> Iterable[Metric]:
    if audit is not None:
        yield from audit_metrics.metrics(audit)
