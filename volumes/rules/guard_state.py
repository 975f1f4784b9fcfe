"""guard-not-enforcing and ledger-mismatch: what the format guard says of itself."""

from kit.findings import Severity
from volumes.rules.base import Outcome, Rule, Scene, Trouble

_NO_GUARD = "the guard does not say how it is"


def _enforcing(scene: Scene) -> Outcome:
    if scene.guard is None:
        return Outcome(unknown=_NO_GUARD)
    if scene.guard.enforcing:
        return Outcome()
    why = "; ".join(scene.guard.reasons) or "it is not set to"
    return Outcome(
        (
            Trouble(
                subject="guard",
                message=f"the format guard does not enforce: {why}",
                advice="a failed probe can still end in mkfs on this node: see 'nodeagent volume "
                "guard status' and set volumes.guard.mode to enforce",
                evidence={"reasons": why},
            ),
        )
    )


def _ledger(scene: Scene) -> Outcome:
    if scene.guard is None:
        return Outcome(unknown=_NO_GUARD)
    return Outcome(
        tuple(
            Trouble(
                subject=mismatch.device,
                key=mismatch.image,
                device=mismatch.device,
                message=f"{mismatch.image or mismatch.device} held {mismatch.expected} and now "
                f"holds {mismatch.seen}",
                advice="it was formatted or overwritten elsewhere: stop its pods before they build "
                "an empty data set, and restore from a snapshot; if it was meant, let the ledger "
                "forget the volume",
                evidence={"expected": mismatch.expected, "seen": mismatch.seen},
            )
            for mismatch in scene.guard.mismatches
        )
    )


ENFORCING = Rule(
    name="guard-not-enforcing",
    summary="the format guard is not in force on this node",
    severity=Severity.WARNING,
    patience=60.0,
    judge=_enforcing,
)
LEDGER = Rule(
    name="ledger-mismatch",
    summary="a volume holds another file system than it did",
    severity=Severity.CRITICAL,
    patience=0.0,
    judge=_ledger,
)
