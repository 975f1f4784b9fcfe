"""cluster-near-full and clock-skew: what makes Ceph refuse writes or sessions soon."""

from collections.abc import Iterator

from kit.findings import Severity
from volumes.inventory.cluster import ClusterView
from volumes.rules.base import Outcome, Rule, Scene, Trouble, needs_clusters

_FULL = {
    "OSD_FULL": Severity.CRITICAL,
    "POOL_FULL": Severity.CRITICAL,
    "OSD_BACKFILLFULL": Severity.WARNING,
    "OSD_NEARFULL": Severity.WARNING,
    "POOL_NEAR_FULL": Severity.WARNING,
    "POOL_BACKFILLFULL": Severity.WARNING,
}


def _near_full(scene: Scene, view: ClusterView) -> Iterator[Trouble]:
    advice = "at full every write of every volume blocks: delete or add space now"
    for check in view.checks:
        if check.code in _FULL:
            yield Trouble(
                subject=view.name,
                key=check.code,
                severity=_FULL[check.code],
                message=f"cluster {view.name}: {check.summary}",
                advice=advice,
                evidence={"cluster": view.name, "check": check.code, "used": f"{view.used:.0%}"},
            )
    if view.used >= scene.settings.near_full and not any(c.code in _FULL for c in view.checks):
        yield Trouble(
            subject=view.name,
            key="used",
            message=f"cluster {view.name} is {view.used:.0%} full",
            advice=advice,
            evidence={"cluster": view.name, "used": f"{view.used:.4f}"},
        )


def _clock(scene: Scene) -> Outcome:
    troubles = []
    unknown = []
    if scene.clock is None:
        unknown.append("the kernel's clock state cannot be read")
    elif not scene.clock.synchronised:
        troubles.append(
            Trouble(
                subject="clock",
                key="unsynchronised",
                severity=Severity.INFO,
                message="nothing keeps this node's clock in step (adjtimex: unsynchronised)",
                advice="run chrony (with rtcsync), systemd-timesyncd or ntpd: cephx tickets of a "
                "node whose clock is off are refused",
                evidence={"max_error_seconds": f"{scene.clock.max_error_seconds:g}"},
            )
        )
    for name, view in scene.clusters.items():
        if isinstance(view, str):
            unknown.append(f"cluster {name}: {view}")
            continue
        unknown += view.refused(("health",))
        troubles += [
            Trouble(
                subject=name,
                key="monitors",
                message=f"cluster {name}: {check.summary}",
                advice="set the monitors' clocks right: beyond 0.05 s they lose quorum",
                evidence={"cluster": name},
            )
            for check in view.checks
            if check.code == "MON_CLOCK_SKEW"
        ]
    return Outcome(tuple(troubles), unknown="; ".join(unknown))


NEAR_FULL = Rule(
    name="cluster-near-full",
    summary="a cluster runs out of space",
    severity=Severity.WARNING,
    patience=0.0,
    judge=needs_clusters(_near_full, "health", "df"),
)
CLOCK = Rule(
    name="clock-skew",
    summary="a clock is off, here or among the monitors",
    severity=Severity.WARNING,
    patience=60.0,
    judge=_clock,
)
