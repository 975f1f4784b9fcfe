"""Findings of image preheating: what a person should look at, and what to do."""

from kit.findings import Finding, Severity
from preheat import faces, reconciler

# A failure that goes away by itself is no finding before this many attempts in a row.
PATIENCE = 3


def findings(core: reconciler.Reconciler, honours: bool | None, rests: float) -> list[Finding]:
    """Everything wrong now; the same trouble keeps its id."""
    found = []
    if core.trouble:
        found.append(
            _finding(
                "runtime",
                Severity.CRITICAL,
                "container runtime",
                core.trouble,
                "see that it runs and that preheat.socket is its socket; pins hold meanwhile",
            )
        )
    if rests > 60:
        found.append(
            _finding(
                "breaker",
                Severity.CRITICAL,
                "container runtime",
                f"it went away after changing calls; none is made for {rests:.0f} s",
                "look at its log for a panic, and report it with the agent's log",
            )
        )
    found += [
        _finding(
            "gc-fight",
            Severity.WARNING,
            ref,
            "removed more often than preheat.heal.per_hour allows although it is pinned",
            "find who removes it (kubelet's garbage collection on a full disk, crictl rmi "
            "--prune); let go of it with 'nodeagent image unpin'",
        )
        for ref in core.healer.fights
    ]
    for row in faces.rows(core):
        evidence = {"need": str(row.bytes_missing), "kind": row.failure_kind}
        if row.state == "failed" and (row.attempts >= PATIENCE or row.retry_at is None):
            found.append(
                _finding(
                    "pull-failed",
                    Severity.WARNING,
                    row.ref,
                    row.reason,
                    "see the failure's class in docs/preheat.md",
                    evidence,
                )
            )
        elif row.state in ("skipped", "refused"):
            found.append(
                _finding(
                    f"image-{row.state}",
                    Severity.WARNING,
                    row.ref,
                    row.reason,
                    "make room, raise pin_budget or lower its priority"
                    if row.state == "skipped"
                    else "set share_private for it after reading docs/preheat.md",
                    evidence,
                )
            )
    if honours is False and core.view.pinned:
        found.append(
            _finding(
                "pin-not-honoured",
                Severity.INFO,
                core.version,
                "this runtime does not tell the kubelet what is pinned: garbage collection takes "
                "pinned images and they are put back",
                "nothing has to be done; containerd 1.6.22 and 1.7.3 and later tell it",
            )
        )
    return found


def _finding(
    rule: str,
    severity: Severity,
    subject: str,
    message: str,
    advice: str,
    evidence: dict[str, str] | None = None,
) -> Finding:
    return Finding(
        id=f"preheat/{rule}/{subject}",
        rule=f"preheat-{rule}",
        severity=severity,
        subject=subject,
        message=message,
        advice=advice,
        evidence=evidence or {},
    )
