"""What operators see of the guard: its findings, its status, a probe's answer."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

from kit.findings import Finding, Severity
from linux import blockdev
from volumes.guard import controller, kernel, own, steps
from volumes.ledger import store
from volumes.ledger.mirror import Answer
from volumes.ledger.witness import Witness
from volumes.probe.examine import Kind, Verdict


def findings(guard: controller.Controller, now: float) -> list[Finding]:
    """Everything that is wrong now. ``now``: Unix seconds."""
    found = guard.manager.denials.findings(now) + guard.rehearsal.denials.findings(now)
    hanging = guard.manager.checks.prober.hanging
    for known in guard.manager.known.values():
        found += _of_device(known, known.device.path in hanging)
    return [*found, *_of_guard(guard)]


def _of_guard(guard: controller.Controller) -> Iterator[Finding]:
    def finding(
        rule: str, message: str, advice: str, of: str = "", severity: Severity = Severity.WARNING
    ) -> Finding:
        id = f"{rule}:{of}" if of else rule
        return Finding(id, rule, severity, "format guard", message, advice)

    force = guard.in_force
    for problem in force.problems():
        advice = "'nodeagent volume guard status' shows what the kernel says; see docs/guard.md"
        yield finding("guard-not-in-force", problem, advice, problem[:40], Severity.CRITICAL)
    if force.proof.startswith("unknown") and force.proof_tried:
        message = f"whether the guard is in force could not be tried: {force.proof}"
        advice = "See 'nodeagent volume guard status'; the agent needs CAP_MKNOD and /dev"
        yield finding("guard-unproven", message, advice)
    if problem := force.own.seen.problem:
        message = f"writes to devices of other drivers are not reported: {problem}"
        advice = "Do what the message says; see docs/guard.md, Other drivers"
        yield finding("scope-not-judged", message, advice)
    if force.came_late:
        message = (
            f"nothing guarded this node when the agent started, and {force.came_late} devices "
        )
        message += "were attached"
        advice = "Attach the guard before kubelet starts (docs/guard.md, Deployment)"
        # In dry-run nothing would have been refused either.
        enforced = force.wanted_mode() is kernel.Mode.ENFORCE
        severity = Severity.WARNING if enforced else Severity.INFO
        yield finding("guard-attached-late", message, advice, severity=severity)
    present, kernels = force.present, force.guard
    attached = present if present is not None and present.attached else None
    if attached is not None and not attached.pinned:
        message = "the guard has no names in a bpf file system"
        message += f" ({kernels.no_watch})" if kernels is not None else ""
        advice = "ceph-csi's wait looks for them; mount the host's /sys/fs/bpf into the pod"
        yield finding("guard-not-pinned", message, advice)
    elif attached is not None and kernels is not None and kernels.no_watch:
        message = "the kernel does not end the lease of a number that a new disk gets "
        message += f"({kernels.no_watch})"
        advice = "mount the host's bpf file system where volumes.guard.pins lies, or run a kernel "
        advice += "with CONFIG_BPF_EVENTS; until then the agent ends it when it meets the disk"
        yield finding("leases-outlive-disks", message, advice)
    if (change := force.memory.override) is not None:
        yield finding(
            "guard-overridden",
            f"{change.by} set mode {change.mode} over the settings' "
            f"{force.memory.settings_mode(force.settings)}: {change.reason}",
            "Return to the settings: 'nodeagent volume guard set-mode settings --reason TEXT'",
        )
    yield from _of_witness(guard.executor.witness)
    ledger, mirror = guard.executor.ledger, guard.executor.mirror
    damaged = sorted(ledger.unreadable.items())[:20]
    newer = sorted(f"image {e.image_id}: {why}" for (e, _), why in mirror.newer.items())[:20]
    files = [f"ledger file {name}: {why}" for name, why in damaged]
    said = (force.memory.error, force.memory.lost, force.memory.unwritten)
    for text in (*said, *files, *newer):
        if text:
            yield finding(
                "guard-state-damaged",
                text,
                "The volume concerned gets no automatic lease until the file is restored from the "
                "image's metadata or removed; of a newer agent's file, until that version runs",
                of=text[:60],
            )


def _of_witness(witness: Witness) -> Iterator[Finding]:
    def finding(rule: str, message: str, advice: str) -> Finding:
        return Finding(rule, rule, Severity.WARNING, "API server", message, advice)

    if witness.trouble:
        message = f"PersistentVolumes cannot be asked: {witness.trouble}. A new volume is refused "
        message += f"for {witness.settings.outage:g}s, then the guard decides without its "
        message += "PersistentVolume"
        advice = "See docs/security.md for the rights that the agent needs"
        yield finding("witness-silent", message, advice)
    if witness.mark_trouble:
        message = f"PersistentVolumes are not marked as holding data: {witness.mark_trouble}"
        advice = "Let the agent's account patch persistentvolumes (docs/security.md); marks of "
        advice += "others are read and kept to all the same"
        yield finding("volumes-not-marked", message, advice)


def _of_device(known: steps.Known, hanging: bool) -> Iterator[Finding]:
    device, seen = known.device, known.seen
    silent = seen is not None and seen.verdict in (Kind.UNREADABLE, Kind.TIMEOUT)
    if not (known.changed_from or known.missing or silent or hanging):
        return  # as nearly all: this is asked after each check of each device
    evidence = {"device": device.path, "volume": device.volume, "verdict": str(seen)}

    def finding(rule: str, severity: Severity, message: str, advice: str) -> Finding:
        id = f"{rule}:{device.volume or device.name}"
        return Finding(id, rule, severity, device.title, message, advice, evidence)

    if known.changed_from:
        yield finding(
            "content-changed",
            Severity.CRITICAL,
            f"{device.title} held {known.changed_from} and now holds {seen}: it was formatted "
            "elsewhere, or another image is mapped in its place",
            f"Look again: 'nodeagent volume probe {device.path}'. If it stays so, stop its users "
            "and examine its content. If the change was intended: 'nodeagent volume ledger "
            f"--accept {device.volume}'",
        )
    elif known.missing:
        yield finding(
            "content-missing",
            Severity.CRITICAL,
            f"{device.title} held {known.missing} and now the probe says {seen}",
            "Do not format it: most likely the data is there and cannot be read from here. See "
            "the kernel's log, the cluster's health and its blocklist; end the pod, so that the "
            "kubelet unmaps the volume and maps it again. Unmap nothing that the kubelet still "
            "knows",
        )
    elif seen is not None and seen.verdict is Kind.UNREADABLE:
        message = f"{device.title} cannot be read: {seen}"
        advice = "See the kernel's log and the cluster's health"
        yield finding("volume-unreadable", Severity.WARNING, message, advice)
    if hanging or (seen is not None and seen.verdict is Kind.TIMEOUT):
        message = f"{device.title} does not answer reads; its probe was abandoned"
        advice = "Check its backend; processes that use it hang in the kernel"
        yield finding("probe-hangs", Severity.WARNING, message, advice)


def describe_kernel(present: kernel.Present) -> dict[str, Any]:
    """What is attached, as JSON."""
    return {
        "attached": present.attached,
        "mode": str(present.mode) if present.attached else "off",
        "cgroup": present.cgroup,
        "whole_node": present.whole_node,
        "pinned": present.pinned,
        "scope_mode": str(present.judges),
        "programs": [{"id": p.id, "name": p.name, "tag": p.tag} for p in present.programs],
        "majors": sorted(present.majors),
        "partitions": sorted(f"{major}:{minor}" for major, minor in present.devices),
        "openers": sorted(present.openers),
        "words": sorted(" ".join(pair) for pair in present.allowed()),
        "leases": [
            {
                "device": f"{number[0]}:{number[1]}",
                "until_monotonic": None if held.until == math.inf else round(held.until, 3),
                "opens": held.opens,
            }
            for number, held in sorted(present.leases.items())
        ],
        "counters": dict(present.counters),
    }


def describe(guard: controller.Controller) -> dict[str, Any]:
    """The guard's status as JSON."""
    now, force = time.monotonic(), guard.in_force
    present, found = force.present, force.memory.override
    program = present.programs[0] if present and present.programs else None
    return {
        "attached": False,
        "mode": "off",
        **(describe_kernel(present) if present is not None else {}),
        "proof": force.proof,
        "wanted_mode": str(force.wanted_mode()),
        "settings_mode": str(force.memory.settings_mode(force.settings)),
        "override": None if found is None else found.as_json(),
        "damaged": [text for text in (force.memory.error, force.memory.lost) if text],
        "agent": "running",
        "unsupported": force.unsupported,
        "scope": own.describe(force.own.seen, force.settings),
        "leases_end_with_disk": force.guard is not None and force.guard.ends_with_disk,
        "why_not": force.guard.no_watch if force.guard is not None else "",
        "loaded_seconds_after_boot": None if program is None else round(program.loaded_ns / 1e9, 1),
        "drivers_not_loaded": sorted(set(force.settings.drivers) - guard.driver_names()),
        "kernel_log": guard.errors.readable,
        "kubernetes": guard.executor.witness.status(),
        "devices": [describe_device(each, now) for _, each in sorted(guard.manager.known.items())],
        "denials": [
            dataclasses.asdict(each)
            for denials in (guard.rehearsal.denials, guard.manager.denials)
            for each in denials.last
        ],
        "denied_then_leased": guard.manager.denials.delayed,
        "probes_hanging": sorted(guard.manager.checks.prober.hanging),
        "held": guard.manager.holds.names,
        "in_force": not force.problems(),
        "reasons": force.problems(),
    }


def describe_device(known: steps.Known, now: float) -> dict[str, Any]:
    """What is known of one device as JSON."""
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
        "looked_seconds_ago": round(now - known.checked, 1),
        "looks_without_answer": known.doubt.looks,
        "looks_agree": known.doubt.agreed,
        "missing": known.missing,
        "changed_from": known.changed_from,
        "cluster": None if known.cluster is None else _cluster(known.cluster),
        "may_be_formatted": known.reasons == (),
        "formatted_by": known.writer,
        "freed_next": known.freed_next,
        "reasons": list(known.reasons or ()),
        "raw_block": known.raw,
        "lease_after_seconds": known.lease_seconds,
        "persistent_volume": None if known.witness is None else known.witness.as_json(),
    }


def _cluster(said: Answer) -> dict[str, Any]:
    """``entry``: the image's metadata, which other nodes wrote too."""
    return {
        "metadata": str(said.mirror),
        "entry": None if said.known is None else dataclasses.asdict(said.known),
        "extents": str(said.extents),
        "why_unknown": said.why,
    }


def describe_probe(
    device: blockdev.BlockDevice, found: Verdict, known: store.Entry | None
) -> dict[str, Any]:
    """A probe's answer as JSON."""
    return {
        **found.as_json(),
        "device": device.path,
        "driver": device.driver,
        "volume": device.volume,
        "title": device.title,
        "partition_of": device.parent,
        "ledger": None if known is None else dataclasses.asdict(known),
    }
