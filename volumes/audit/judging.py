"""All rules over one scene, with the operator's changes to them. Pure."""

from dataclasses import dataclass

from kit.findings import Severity
from volumes.audit.settings import AuditSettings, RuleSettings
from volumes.audit.standing import Judged
from volumes.rules import log_lines, registry
from volumes.rules.base import Scene, Trouble

BLIND = "audit-blind"
BLIND_SECONDS = 120.0
_NO_CHANGE = RuleSettings()


@dataclass(frozen=True)
class RuleState:
    """ok, found, unknown or off, and why."""

    name: str
    state: str
    why: str = ""


def judge(scene: Scene) -> tuple[list[Judged], list[RuleState]]:
    """Every rule's troubles and state."""
    settings = scene.settings
    judged, states = [], []
    for rule in registry.RULES:
        change = settings.rules.get(rule.name, _NO_CHANGE)
        if not change.enabled:
            states.append(RuleState(rule.name, "off", "switched off by volumes.audit.rules"))
            continue
        outcome = rule.judge(scene)
        troubles = tuple(
            _weighed(trouble, change, rule.severity, rule.patience)
            for trouble in outcome.troubles
            if not _ignored(trouble, change)
        )
        judged.append(Judged(rule.name, troubles, outcome.unknown))
        state = "off" if outcome.off else "unknown" if outcome.unknown else "ok"
        if troubles:
            state = "found" if not outcome.unknown else "unknown"
        states.append(RuleState(rule.name, state, outcome.off or outcome.unknown))
    judged += _from_logs(scene, settings)
    judged.append(_blind(states, settings))
    return judged, states


def _weighed(
    trouble: Trouble, change: RuleSettings, severity: Severity, patience: float
) -> tuple[Trouble, Severity, float]:
    own_patience = patience if trouble.patience is None else trouble.patience
    return (
        trouble,
        change.severity or trouble.severity or severity,
        own_patience if change.patience is None else change.patience,
    )


def _ignored(trouble: Trouble, change: RuleSettings) -> bool:
    where = (
        trouble.subject,
        trouble.device,
        *(trouble.evidence.get(name, "") for name in ("cgroup", "pod", "comm", "volume")),
    )
    return any(word in text for word in change.ignore for text in where)


def _from_logs(scene: Scene, settings: AuditSettings) -> list[Judged]:
    by_rule: dict[str, list[tuple[Trouble, Severity, float]]] = {}
    for name, hit, trouble in log_lines.troubles(scene):
        change = settings.rules.get(name, _NO_CHANGE)
        if change.enabled and not _ignored(trouble, change):
            by_rule.setdefault(name, []).append(_weighed(trouble, change, hit.severity, 0.0))
    return [Judged(name, tuple(troubles)) for name, troubles in by_rule.items()]


def _blind(states: list[RuleState], settings: AuditSettings) -> Judged:
    change = settings.rules.get(BLIND, _NO_CHANGE)
    unknown = [state for state in states if state.state == "unknown"]
    if not unknown or not change.enabled:
        return Judged(BLIND, ())
    names = ", ".join(state.name for state in unknown)
    trouble = Trouble(
        subject="audit",
        message=f"{len(unknown)} rules cannot be judged: {names}",
        advice="what they would find is not known, which is not 'fine': see 'nodeagent volume "
        "audit' for the causes",
        evidence={state.name: state.why[:200] for state in unknown[:20]},
    )
    return Judged(BLIND, (_weighed(trouble, change, Severity.WARNING, BLIND_SECONDS),))
