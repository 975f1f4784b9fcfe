"""Applies every rule to one scene, with the operator's changes to rules. Pure."""

from dataclasses import dataclass

from volumes.audit.finding_state import Judged
from volumes.audit.rules import agent, clusters, mappings, mounting
from volumes.audit.rules.base import AuditRule
from volumes.audit.types import Scene, Severity, Trouble
from volumes.settings import RuleSettings

# Every rule, in the order of the status output. A new rule needs one line here.
RULES: tuple[AuditRule, ...] = (
    mounting.leaked_mount,
    mounting.busy_mount,
    mounting.staged_unused,
    mounting.two_claims_one_device,
    mounting.claim_device_gone,
    mounting.file_system_errors,
    mounting.private_propagation,
    mappings.mapped_unmounted,
    mappings.unmap_failing,
    mappings.mapped_twice,
    mappings.mapped_elsewhere,
    mappings.blocklisted_client,
    mappings.read_only_claim,
    mounting.host_mount_options,
    agent.ledger_mismatch,
    agent.guard_not_enforcing,
    clusters.version_skew,
    clusters.feature_skew,
    clusters.clock_skew,
    clusters.mtu_mismatch,
    clusters.messenger_mode,
    agent.unread_log,
    agent.flooding_log,
)
STATES = ("ok", "found", "unknown", "off")
BLIND = "audit-blind"
_BLIND_PATIENCE = 120.0
_UNCHANGED = RuleSettings()


@dataclass(frozen=True)
class RuleState:
    """The state of one rule (one of STATES), and why it is unknown or off."""

    name: str
    state: str
    why: str = ""


def evaluate(scene: Scene) -> tuple[list[Judged], list[RuleState]]:
    """Every rule's troubles and state, the findings of log lines, and ``audit-blind``."""
    judged, states = [], []
    for rule in RULES:
        change = _change(scene, rule.name)
        if not change.enabled:
            states.append(RuleState(rule.name, "off", "disabled by volumes.audit.rules"))
            continue
        outcome = rule.judge(scene)
        troubles = tuple(
            _weighed(trouble, change, rule.severity, rule.patience)
            for trouble in outcome.troubles
            if not _is_ignored(trouble, change)
        )
        judged.append(Judged(rule.name, troubles, outcome.unknown))
        state = "found" if troubles else "ok"
        state = "off" if outcome.off else "unknown" if outcome.unknown else state
        states.append(RuleState(rule.name, state, outcome.off or outcome.unknown))
    judged += _from_logs(scene)
    judged.append(_blind(scene, states))
    return judged, states


def _change(scene: Scene, rule: str) -> RuleSettings:
    return scene.settings.rules.get(rule, _UNCHANGED)


def _weighed(
    trouble: Trouble, change: RuleSettings, severity: Severity, patience: float
) -> tuple[Trouble, Severity, float]:
    own_patience = patience if trouble.patience is None else trouble.patience
    return (
        trouble,
        change.severity or trouble.severity or severity,
        own_patience if change.patience is None else change.patience,
    )


def _is_ignored(trouble: Trouble, change: RuleSettings) -> bool:
    where = (
        trouble.subject,
        trouble.device,
        *(trouble.evidence.get(name, "") for name in ("cgroup", "pod", "comm", "volume")),
    )
    return any(word in text for word in change.ignore for text in where)


def _from_logs(scene: Scene) -> list[Judged]:
    by_rule: dict[str, list[tuple[Trouble, Severity, float]]] = {}
    for name, hit, trouble in agent.from_logs(scene):
        change = _change(scene, name)
        if change.enabled and not _is_ignored(trouble, change):
            by_rule.setdefault(name, []).append(_weighed(trouble, change, hit.severity, 0.0))
    return [Judged(name, tuple(troubles)) for name, troubles in by_rule.items()]


def _blind(scene: Scene, states: list[RuleState]) -> Judged:
    change = _change(scene, BLIND)
    unknown = [state for state in states if state.state == "unknown"]
    if not unknown or not change.enabled:
        return Judged(BLIND, ())
    names = ", ".join(state.name for state in unknown)
    trouble = Trouble(
        subject="audit",
        message=f"{len(unknown)} rules cannot be evaluated: {names}",
        advice="what they would find is not known, which does not mean that all is well: see "
        "'nodeagent volume audit' for the causes",
        evidence={state.name: state.why[:200] for state in unknown[:20]},
    )
    return Judged(BLIND, (_weighed(trouble, change, Severity.WARNING, _BLIND_PATIENCE),))
