"""What the room shows: the state of each image, the latest plan, findings and metrics.

Everything here reads the reconciler's last snapshot and running pulls; nothing calls the runtime.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
from prometheus_client.core import Metric

import kit.errors
import kit.units
from kit.findings import Finding, Severity
from kit.metrics import counter, gauge
from preheat.planning import desired, plan
from preheat.planning.desired import Request
from preheat.pulling.reconciler import Reconciler
from preheat.registry import estimate, failure, resolver
from preheat.runtimes import base
from preheat.runtimes.base import By

# Every state an image can be in; also the label values of a metric.
State = Literal[
    "looking",  # the registry lookup is in progress
    "waiting",  # for its turn, a slot or a time window
    "pulling",
    "unpacking",
    "ready",
    "lazy",  # pods can start, and what they read comes from the registry
    "paused",
    "skipped",  # does not fit: disk or pin budget
    "refused",  # private, and sharing is not allowed
    "failed",  # see failure_kind; tried again at retry_at, if at all
    "released",  # by an operator
]
STATES: tuple[State, ...] = get_args(State)
# On the node as far as its snapshotter fetches anything.
PRESENT = ("ready", "lazy")
# Failures that seldom go away without somebody who does something.
FOR_OPERATORS = ("auth", "not_found", "bad_image", "incomplete")
# A failure that goes away by itself becomes a finding after this many attempts in a row.
PATIENCE = 3
# The breaker's short rests at a restart of the runtime are not worth a finding.
SHORT_REST_SECONDS = 60


@dataclass(frozen=True)
class LayerBytes:
    digest: str
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True)
class Status:
    """One image. Bytes are compressed, as the registry serves them."""

    ref: str
    digest: str  # of the manifest or index, or empty
    state: State
    pinned: bool
    bytes_total: int
    bytes_done: int
    by: By  # who asked: an operator, the settings or an ImageSet (policy), or `retain`
    keep: str  # always, never or for:<seconds>
    priority: int
    reason: str = ""
    image_id: str = ""
    bytes_missing: int = 0
    bytes_unpacked: int = 0  # on disk once unpacked
    # not_found, auth, network, busy, corrupt, disk, bad_image, runtime, incomplete or empty
    failure_kind: str = ""
    attempts: int = 0
    retry_at: float | None = None  # Unix time; null: no retry
    in_use: bool = False
    last_used: float | None = None  # Unix time
    dropped_until: float | None = None  # Unix time of release, after the settings dropped it
    layers: Sequence[LayerBytes] = ()
    layers_unpacked: int = 0
    bytes_per_second: float = 0.0


# --- images ---------------------------------------------------------------------------------------


def images(reconciler: Reconciler) -> list[Status]:
    """Every image that is requested or still pinned, by priority, then name."""
    requests = dict(reconciler.snapshot.requests)
    for pin in reconciler.snapshot.pinned:
        requests.setdefault(pin.ref, Request(pin.ref, "retained"))
    every = [image(reconciler, request) for request in requests.values()]
    return sorted(every, key=lambda each: (-each.priority, each.ref))


def image(reconciler: Reconciler, request: Request) -> Status:
    """The present state of one requested image."""
    ref, seen = request.ref, reconciler.snapshot
    lookup = reconciler.resolver.of(ref)
    here = seen.inventory.digest_of(ref)
    shape = (lookup.shape if lookup is not None else None) or seen.inventory.shapes.get(here)
    if request.unconfirmed:
        shape = seen.inventory.shapes.get(request.digest)
    digest = shape.top.digest if shape is not None else here
    gone = {release.hold for release in seen.decided.releases}
    failed = reconciler.pulls.failures.get(ref)
    if failed is None and lookup is not None and not lookup.leaves_it_to_the_runtime:
        failed = lookup.failed
    state, reason = _state(reconciler, request, lookup, failed)
    shown = None if request.present else failed
    total = shape.bytes_total if shape is not None else 0
    missing = request.fetch if request.digest or request.present else total
    missing += request.remote
    done = max(0, total - missing)
    layers: Sequence[LayerBytes] = ()
    speed, unpacked = 0.0, 0
    running = reconciler.pulls.running.get(ref)
    if running is not None:
        progress = running.progress
        done, unpacked = progress.bytes_done, progress.layers_unpacked
        missing = max(0, total - done)
        spent = max(0.001, time.time() - progress.started)
        speed = max(0.0, (done - progress.began_with) / spent)
        layers = [LayerBytes(name, at, end) for name, (at, end) in progress.layers.items()]
    return Status(
        ref=ref,
        digest=digest,
        state=state,
        pinned=any(
            pin.ref == ref and pin.digest == digest and pin.hold not in gone for pin in seen.pinned
        ),
        bytes_total=total,
        bytes_done=done,
        by=request.by,
        keep=request.keep,
        priority=request.priority,
        reason=reason,
        image_id=shape.image_id if shape is not None else "",
        bytes_missing=missing,
        bytes_unpacked=estimate.unpacked_bytes(request.parts),
        failure_kind=str(shown.kind) if shown is not None else "",
        attempts=shown.attempts if shown is not None else 0,
        retry_at=shown.retry_at if shown is not None else None,
        in_use=shape is not None and shape.image_id in seen.inventory.in_use,
        last_used=seen.inventory.last_used.get(digest),
        dropped_until=request.dropped_until,
        layers=layers,
        layers_unpacked=unpacked,
        bytes_per_second=round(speed, 1),
    )


def is_asking(reconciler: Reconciler, ref: str) -> bool:
    """Whether its registry is asked just now, or answered and no cycle has seen it: what the node
    has may be what the tag named before."""
    lookup, request = reconciler.resolver.of(ref), reconciler.snapshot.requests.get(ref)
    if lookup is None or request is None or request.unconfirmed:
        return False
    under_way = lookup.task is not None or reconciler.resolver.turn(lookup) <= time.time()
    return under_way or reconciler.resolver.digest(ref) not in ("", request.digest)


def _state(
    reconciler: Reconciler,
    request: Request,
    lookup: resolver.Lookup | None,
    failed: failure.PullFailure | None,
) -> tuple[State, str]:
    """And the reason."""
    seen = reconciler.snapshot
    untold = ""
    if lookup is not None and lookup.failed is not None and lookup.leaves_it_to_the_runtime:
        untold = f"the agent's lookup failed ({lookup.failed.message}), the runtime pulls it"
    skip = next((each for each in seen.decided.skips if each.ref == request.ref), None)
    running = reconciler.pulls.running.get(request.ref)
    if running is not None:
        phase = running.progress.phase
        return "unpacking" if phase == "unpacking" else "pulling", _joined(phase, untold)
    if request.released:
        return "released", "released by an operator"
    if request.paused:
        return "paused", "paused by an operator"
    if request.present:
        text = _joined(request.dropped_text or (skip.text if skip else ""), untold)
        if lookup is not None and lookup.failed is not None and not request.measured:
            why = "" if untold else f" ({lookup.failed.message})"
            unread = f"not pinned: the agent does not know what it consists of{why}"
            text = _joined("" if request.keep == "never" else unread, text)
        if not request.remote:
            return "ready", text
        size = kit.units.format_size(request.remote)
        lazy = f"{size} of it are not on the node: the snapshotter fetches what containers read"
        return "lazy", _joined(lazy, text)
    if not seen.at:
        return "waiting", reconciler.trouble or "the first look at the runtime is in progress"
    if request.dropped_until is not None:
        return "waiting", request.dropped_text
    if failed is not None and (failed.retry_at is None or skip is None or skip.reason != "disk"):
        return "failed", failed.message
    if lookup is not None and lookup.private and not request.share_private:
        return "refused", desired.PRIVATE
    if not untold and (lookup is None or lookup.shape is None):
        left = 0.0
        if lookup is not None and lookup.task is None:
            left = reconciler.resolver.turn(lookup) - time.time()
        if left > 0:
            return "waiting", f"its registry lookup comes in {left:.0f} s (spread)"
        return "looking", "the registry lookup is in progress"
    if skip is not None:
        text = _joined(skip.text, untold)
        return "waiting" if skip.reason is plan.Reason.BLOCKED else "skipped", text
    return "waiting", _joined("for a free slot or the next cycle", untold)


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageDisk:
    capacity: int
    free: int
    room: int  # bytes until the kubelet's thresholds; may be negative
    gc_high: float  # share of the disk
    gc_low: float
    eviction_free: float  # share that must stay free
    freeable: int  # bytes of images neither pinned nor in use
    pressed: bool
    inodes_free: float  # share of all inodes
    eviction_inodes: float
    thresholds_assumed: bool  # not from the kubelet's configuration
    thresholds: str  # where the thresholds are from


@dataclass(frozen=True)
class ShownRelease:
    ref: str
    reason: plan.Reason
    text: str


@dataclass(frozen=True)
class ImagePlan:
    """Decisions of the last cycle. Bytes are bytes on disk."""

    at: float  # Unix time
    disk: ImageDisk
    pin_budget: int  # or less, if the disk is too small
    pinned_bytes: int
    pause: str  # why all pulls stop, or empty
    pull: Sequence[str]
    running: Sequence[str]
    waiting: Sequence[str]
    pin: Sequence[str]
    release: Sequence[ShownRelease]
    skip: Sequence[plan.Skip]
    reuse: Sequence[estimate.Reuse]


def image_plan(reconciler: Reconciler) -> ImagePlan:
    """The latest plan with its figures."""
    seen = reconciler.snapshot
    if seen.node is None:
        cause = reconciler.trouble or "there is none yet"
        raise kit.errors.SourceError("the plan", cause, "try again soon")
    decided, node = seen.decided, seen.node
    return ImagePlan(
        at=seen.at,
        disk=msgspec.convert(node, ImageDisk, from_attributes=True),
        pin_budget=node.pin_budget,
        pinned_bytes=estimate.union(pin.parts for pin in seen.pinned),
        pause=decided.pause,
        pull=decided.pulls,
        running=sorted(reconciler.pulls.running),
        waiting=decided.waiting,
        pin=decided.pins,
        release=[ShownRelease(each.ref, each.reason, each.text) for each in decided.releases],
        skip=decided.skips,
        reuse=seen.shared,
    )


# --- findings -------------------------------------------------------------------------------------


def findings(reconciler: Reconciler) -> list[Finding]:
    """Everything that a person should look at now. The same trouble keeps its id."""
    runtime = reconciler.runtime
    found: list[Finding] = []

    def find(
        severity: Severity, rule: str, subject: str, message: str, advice: str, **evidence: str
    ) -> None:
        id = f"preheat/{rule}/{subject}"
        found.append(Finding(id, f"preheat-{rule}", severity, subject, message, advice, evidence))

    if reconciler.trouble:
        text = reconciler.trouble.removesuffix(f"; {base.LOOK}")
        advice = f"{base.LOOK}; pins stay in place"
        find(Severity.CRITICAL, "runtime", "container runtime", text, advice)
    if runtime.connection.breaker.rests > SHORT_REST_SECONDS:
        rests = runtime.connection.breaker.rests
        text = f"it went away after changing calls; the agent sends no more for {rests:.0f} s"
        advice = "look for a panic in its log, and report it with the agent's log"
        find(Severity.CRITICAL, "breaker", "container runtime", text, advice)
    for ref in reconciler.healer.fights:
        text = "the image is pinned, but somebody removes it again and again"
        advice = "find who removes it (the kubelet's garbage collection on a full disk, crictl rmi "
        advice += "--prune), or release it with 'nodeagent image unpin REF'"
        find(Severity.WARNING, "gc-fight", ref, text, advice)
    for trouble in reconciler.durability.troubles.values():
        if trouble.attempts >= PATIENCE:
            text = f"a power cut may have damaged its files, and {trouble.text}"
            advice = "remove the containers of the image; it is then unpacked again within the hour"
            find(Severity.WARNING, "power-cut", trouble.ref, text, advice)
    for row in images(reconciler):
        lasting = row.retry_at is None or row.failure_kind in ("bad_image", "incomplete")
        if row.state == "failed" and (row.attempts >= PATIENCE or lasting):
            rule, advice = "pull-failed", "see the failure's class in docs/preheat.md"
        elif row.state == "skipped":
            rule, advice = "image-skipped", "make room, raise pin_budget or raise its priority"
        elif row.state == "refused":
            rule, advice = "image-refused", "read docs/preheat.md, then set share_private for it"
        else:
            continue
        evidence = {"need": str(row.bytes_missing), "kind": row.failure_kind}
        find(Severity.WARNING, rule, row.ref, row.reason, advice, **evidence)
    if newer := reconciler.snapshot.inventory.newer_holds:
        text = f"{newer} leases are of a newer agent; they stay and keep their images"
        advice = "run that version; or delete them with 'ctr -n k8s.io leases rm'"
        find(Severity.WARNING, "newer-holds", "container runtime", text, advice)
    if runtime.honours_pins is False and reconciler.snapshot.pinned:
        text = "this runtime does not tell the kubelet which images are pinned: garbage "
        text += "collection removes pinned images, and the agent heals them"
        advice = "no action is needed; containerd 1.6.22, 1.7.3 and newer tell the kubelet"
        find(Severity.INFO, "pin-not-honoured", reconciler.version, text, advice)
    return found


# --- metrics --------------------------------------------------------------------------------------


def metrics(reconciler: Reconciler) -> Iterable[Metric]:
    """Each label has a fixed, small set of values."""
    seen, runtime, healer = reconciler.snapshot, reconciler.runtime, reconciler.healer
    counts, totals = healer.counts, reconciler.pulls.totals
    rows = images(reconciler)
    states = [row.state for row in rows]
    missing = [
        row.bytes_missing
        for row in rows
        if row.state not in (*PRESENT, "released") and row.dropped_until is None
    ]
    by_state = {state: states.count(state) for state in STATES}
    yield gauge("preheat_images", "Requested or pinned images.", by_state, "state")
    text = "Size of pinned images."
    yield gauge("preheat_pinned_bytes", text, estimate.union(pin.parts for pin in seen.pinned))
    budget = seen.node.pin_budget if seen.node is not None else reconciler.section.pin_budget
    yield gauge("preheat_pin_budget_bytes", "Budget of pinned images.", budget)
    text = "Bytes of requested images that are not yet on the node."
    yield gauge("preheat_missing_bytes", text, sum(missing))
    yield gauge("preheat_pulls_running", "Pulls in progress.", len(reconciler.pulls.running))
    text = "1: the disk is above kubelet's thresholds."
    yield gauge("preheat_disk_pressure", text, seen.node is not None and seen.node.pressed)
    text = "1: kubelet knows the pins; -1: unknown."
    honours = -1 if runtime.honours_pins is None else int(runtime.honours_pins)
    yield gauge("preheat_pin_label_honoured", text, honours)
    text = "Pinned images that the settings and ImageSets no longer list."
    dropped = sum(row.dropped_until is not None for row in rows)
    yield gauge("preheat_dropped_images", text, dropped)
    text = "Unpacked layers that a power cut can still damage."
    yield gauge("preheat_unconfirmed_layers", text, reconciler.durability.unconfirmed)
    text = "Pinned images that somebody removes again and again."
    yield gauge("preheat_gc_fights", text, len(healer.fights))
    yield counter("preheat_heals", "Pinned images restored.", counts.heals)
    yield counter("preheat_removals", "Pinned images removed by others.", counts.removals)
    yield counter("preheat_pulls", "Finished pulls.", totals.pulls)
    text = "Bytes fetched by pulls."
    yield counter("preheat_fetched_bytes", text, totals.fetched_bytes)
    text = "Requests of the agent to registries."
    yield counter("preheat_registry_requests", text, reconciler.pulls.client.requests)
    text = "Images that the agent unpacked again after a power cut."
    yield counter("preheat_images_unpacked_again", text, reconciler.durability.unpacked_again)
    text = "How often containerd stopped while the agent changed something in it."
    yield counter("preheat_breaker_trips", text, runtime.connection.breaker.total)
    text = "Bytes that nobody downloaded, because the image was on the node."
    saved = {"use": reconciler.uses.used_bytes, "heal": counts.saved_bytes}
    yield counter("preheat_saved_bytes", text, saved, "how")
    text = "Removed pinned images that the agent did not restore."
    refused = {"disk_pressure": counts.refused_pressure, "limit": counts.refused_limit}
    yield counter("preheat_heals_refused", text, refused, "reason")
    yield counter("preheat_failures", "Failed pulls.", totals.failed, "kind")
    failed = reconciler.resolver.failed
    yield counter("preheat_lookup_failures", "Failed lookups.", failed, "kind")
