"""What the guard says of itself: findings, status, metrics."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import kit.findings
from volumes.guard import layout, switch
from volumes.probe import verdict

if TYPE_CHECKING:
    from volumes.guard import judge, keeper

Severity = kit.findings.Severity


def reasons(guard: "keeper.Keeper") -> list[str]:
    """Why the guard is not what it shall be; empty: it is."""
    found = []
    wanted = guard.wanted_mode()
    if guard.unsupported and wanted is not layout.Mode.OFF:
        found.append(f"the guard is not attached: {guard.unsupported}")
    elif guard.present is None or guard.present.mode is not wanted:
        found.append(f"the guard is not in mode {wanted}")
    expected = "enforced" if wanted is layout.Mode.ENFORCE else "let through"
    if not guard.unsupported and guard.proof != expected and not guard.proof.startswith("unknown"):
        found.append(f"an attempt in the guarded cgroup was {guard.proof}, not {expected}")
    return found


def findings(guard: "keeper.Keeper", now: float) -> list[kit.findings.Finding]:
    """Everything that is wrong now. ``now``: Unix seconds."""
    found = guard.denials.findings(now)
    for known in guard.judge.known.values():
        found += _of_device(known, hanging=known.device.path in guard.judge.prober.hanging)
    for reason in reasons(guard):
        found.append(
            kit.findings.Finding(
                id=f"guard-not-in-force:{reason[:40]}",
                rule="guard-not-in-force",
                severity=Severity.CRITICAL,
                subject="format guard",
                message=reason,
                advice="nodeagent volume guard status shows what the kernel says; docs/guard.md",
            )
        )
    if guard.override is not None:
        change = guard.override
        found.append(
            kit.findings.Finding(
                id="guard-overridden",
                rule="guard-overridden",
                severity=Severity.WARNING,
                subject="format guard",
                message=f"{change.by} set mode {change.mode} over the settings' "
                f"{guard.settings.mode}: {change.reason}",
                advice="nodeagent volume guard set-mode settings",
            )
        )
    for text in (guard.override_error, *_ledger_errors(guard)):
        if text:
            found.append(
                kit.findings.Finding(
                    id=f"guard-state-damaged:{text[:60]}",
                    rule="guard-state-damaged",
                    severity=Severity.WARNING,
                    subject="format guard",
                    message=text,
                    advice="The volume concerned gets no automatic lease until the file is put "
                    "back from the image's metadata or removed",
                )
            )
    return found


def _ledger_errors(guard: "keeper.Keeper") -> list[str]:
    broken = guard.ledger.unreadable
    return [f"ledger file {name}: {why}" for name, why in sorted(broken.items())[:20]]


def _of_device(known: "judge.Known", hanging: bool) -> list[kit.findings.Finding]:
    device, seen = known.device, known.seen
    evidence = {"device": device.path, "volume": device.volume, "verdict": str(seen)}
    found = []

    def add(rule: str, severity: Severity, message: str, advice: str) -> None:
        found.append(
            kit.findings.Finding(
                f"{rule}:{device.volume or device.name}",
                *(rule, severity, device.title, message, advice, evidence),
            )
        )

    if known.changed_from:
        add(
            "content-changed",
            Severity.CRITICAL,
            f"{device.title} held {known.changed_from} and now holds {seen}: it was formatted "
            "somewhere else, or another image is mapped in its place",
            "Stop its users and look at what it holds. If the change was meant: "
            f"nodeagent volume ledger --accept {device.volume}",
        )
    elif known.missing:
        add(
            "content-missing",
            Severity.CRITICAL,
            f"{device.title} held {known.missing} and now the probe says {seen}",
            "Do not format it: the data is most likely there and cannot be read from here. Look at "
            "the kernel's log, the cluster's health and blocklist, and map it anew",
        )
    elif seen is not None and seen.verdict is verdict.Kind.UNREADABLE:
        add(
            "volume-unreadable",
            Severity.WARNING,
            f"{device.title} cannot be read: {seen}",
            "Look at the kernel's log and the cluster's health",
        )
    if hanging or (seen is not None and seen.verdict is verdict.Kind.TIMEOUT):
        add(
            "probe-hangs",
            Severity.WARNING,
            f"{device.title} has not answered a read; the probe of it was given up",
            "Look at its backend; processes that use it hang in the kernel",
        )
    return found


def _device(known: "judge.Known", now: float) -> dict[str, Any]:
    device = known.device
    return {
        "device": device.path,
        "number": f"{device.number[0]}:{device.number[1]}",
        "driver": device.driver,
        "diskseq": device.diskseq,
        "size": device.size,
        "volume": device.volume,
        "title": device.title,
        "verdict": None if known.seen is None else known.seen.as_json(),
        "looked_seconds_ago": round(now - known.looked, 1),
        "may_be_formatted": known.reasons == (),
        "reasons": list(known.reasons or ()),
        "raw_block": known.raw,
        "lease_after_seconds": known.lease_seconds,
    }


def status(guard: "keeper.Keeper") -> dict[str, Any]:
    now = time.monotonic()
    kernel_says = switch.describe(guard.present) if guard.present is not None else {}
    change = guard.override
    program = guard.present.programs[0] if guard.present and guard.present.programs else None
    return {
        "attached": False,
        "mode": "off",
        **kernel_says,
        "proof": guard.proof,
        "wanted_mode": str(guard.wanted_mode()),
        "settings_mode": guard.settings.mode,
        "override": None if change is None else {**vars(change), "mode": str(change.mode)},
        "agent": "running",
        "unsupported": guard.unsupported,
        "fallback": guard.fallback.status() if guard.fallback is not None else None,
        "loaded_seconds_after_boot": None if program is None else round(program.loaded_ns / 1e9, 1),
        "drivers_not_loaded": sorted(set(guard.settings.drivers) - guard.driver_names()),
        "kernel_log": guard.errors.readable,
        "devices": [_device(k, now) for _, k in sorted(guard.judge.known.items())],
        "denials": [vars(d) for d in guard.denials.last],
        "denied_then_leased": guard.denials.delayed,
        "probes_hanging": sorted(guard.judge.prober.hanging),
        "in_force": not reasons(guard),
        "reasons": reasons(guard),
    }


def metrics(guard: "keeper.Keeper") -> Iterable[Metric]:
    present = guard.present
    mode = GaugeMetricFamily(
        "nodeagent_volumes_guard_mode", "1 for the mode that the kernel is in.", labels=["mode"]
    )
    for each in layout.Mode:
        mode.add_metric([str(each)], 1 if present is not None and present.mode is each else 0)
    yield mode
    yield GaugeMetricFamily(
        "nodeagent_volumes_guard_in_force",
        "1 while the kernel does what the settings say.",
        value=0 if reasons(guard) else 1,
    )
    opens = CounterMetricFamily(
        "nodeagent_volumes_guard_checks",
        "Checks of write opens since the program was loaded, by outcome; an open that passes is "
        "checked twice.",
        labels=["outcome"],
    )
    for name in layout.COUNTERS[:-1]:
        opens.add_metric([name], present.counters.get(name, 0) if present else 0)
    yield opens
    yield CounterMetricFamily(
        "nodeagent_volumes_guard_events_lost",
        "Denials that the ring buffer had no room for.",
        value=present.counters.get("lost", 0) if present else 0,
    )
    yield CounterMetricFamily(
        "nodeagent_volumes_guard_leases", "Leases given.", value=guard.judge.granted
    )
    yield CounterMetricFamily(
        "nodeagent_volumes_guard_denied_then_leased",
        "Denied attempts whose device was leased right after: the way of new volumes.",
        value=guard.denials.delayed,
    )
    probes = CounterMetricFamily(
        "nodeagent_volumes_probes", "Probes by verdict.", labels=["verdict"]
    )
    for kind in verdict.Kind:
        probes.add_metric([str(kind)], guard.judge.verdicts.get(kind, 0))
    yield probes
    yield GaugeMetricFamily(
        "nodeagent_volumes_probes_hanging",
        "Probes given up whose device still does not answer.",
        value=len(guard.judge.prober.hanging),
    )
    yield GaugeMetricFamily(
        "nodeagent_volumes_guarded_devices",
        "Devices of guarded drivers that are attached.",
        value=len(guard.judge.known),
    )
    yield GaugeMetricFamily(
        "nodeagent_volumes_ledger_entries",
        "Volumes in this node's ledger.",
        value=len(guard.ledger.entries()),
    )
    failures = CounterMetricFamily(
        "nodeagent_volumes_cluster_failures", "Ceph clusters that did not answer.", labels=["what"]
    )
    failures.add_metric(["ask"], guard.clusters.failures)
    failures.add_metric(["mirror"], guard.judge.mirror_failures)
    yield failures
