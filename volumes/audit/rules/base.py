"""How a rule is defined.

A rule is a pure function from a Scene to Troubles. It lives in the module of its subject and is
made a Rule by one of three decorators, which also decide when the rule is ``unknown``:

    @node_rule(...)      judge(scene, inventory): asked when the node could be scanned
    @cluster_rule(...)   judge(scene, view): asked once for each cluster that answered
    @rule(...)           judge(scene): decides everything itself; gives an Outcome, or Troubles

To take effect it needs one line in ``volumes.audit.evaluate.RULES`` and an item in docs/audit.md.
Invariant: a rule that could not see everything says ``unknown``; then none of its findings clear.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import kit.errors
from ceph import protocol
from volumes.audit.inventory.model import Inventory
from volumes.audit.types import Scene, Severity, Trouble

NO_CLUSTER = "no cluster is configured (volumes.clusters)"
NOT_SCANNED = "the node has not been scanned yet"
_MOST_GAPS = 3  # named in a reason


@dataclass(frozen=True)
class Outcome:
    """The result of one rule. ``unknown``: why it could not see everything. ``off``: why it does
    not apply on this node."""

    troubles: tuple[Trouble, ...] = ()
    unknown: str = ""
    off: str = ""


Judge = Callable[[Scene], Outcome | Iterable[Trouble]]
NodeJudge = Callable[[Scene, Inventory], Iterable[Trouble]]
ClusterJudge = Callable[[Scene, protocol.ClusterView], Iterable[Trouble]]


@dataclass(frozen=True)
class AuditRule:
    name: str
    severity: Severity
    patience: float  # seconds a trouble must last before it becomes a finding
    judge: Callable[[Scene], Outcome]


def rule(name: str, severity: Severity, patience: float) -> Callable[[Judge], AuditRule]:
    """A rule that decides by itself when it is unknown or off."""

    def decorate(judge: Judge) -> AuditRule:
        def judged(scene: Scene) -> Outcome:
            found = judge(scene)
            return found if isinstance(found, Outcome) else Outcome(tuple(found))

        return AuditRule(name, severity, patience, judged)

    return decorate


def node_rule(
    name: str,
    severity: Severity,
    patience: float,
    *,
    records: bool = False,
    namespaces: bool = False,
) -> Callable[[NodeJudge], AuditRule]:
    """A rule about this node: unknown while the node cannot be scanned.

    ``records``: also unknown while kubelet's directory is missing. ``namespaces``: what it searches
    for may hide in any mount namespace, so finding nothing counts only if all could be entered.
    """

    def decorate(judge: NodeJudge) -> AuditRule:
        def judged(scene: Scene) -> Outcome:
            inventory = scene.inventory
            if inventory is None or scene.blind:  # an old inventory proves nothing now
                return Outcome(unknown=scene.blind or NOT_SCANNED)
            troubles = tuple(judge(scene, inventory))
            unknown = inventory.no_records if records else ""
            if namespaces and not troubles and not unknown and inventory.space_gaps:
                gaps = kit.errors.some(inventory.space_gaps, _MOST_GAPS)
                unknown = f"not scanned: {gaps}"
            return Outcome(troubles, unknown=unknown)

        return AuditRule(name, severity, patience, judged)

    return decorate


def cluster_rule(
    name: str, severity: Severity, patience: float, *, commands: tuple[str, ...]
) -> Callable[[ClusterJudge], AuditRule]:
    """A rule about each cluster: unknown while a cluster does not answer, or forbids the agent's
    key one of the ``commands`` that the rule relies on."""

    def decorate(judge: ClusterJudge) -> AuditRule:
        def judged(scene: Scene) -> Outcome:
            if not scene.clusters:
                return Outcome(off=NO_CLUSTER)
            troubles: list[Trouble] = []
            unknown = scene.silent
            for view in scene.answering.values():
                troubles += judge(scene, view)
                unknown += view.refused(commands)
            return Outcome(tuple(troubles), unknown="; ".join(unknown))

        return AuditRule(name, severity, patience, judged)

    return decorate
