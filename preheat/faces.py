"""What is shown of the images: rows for the API, the command line and the status page."""

import time
from typing import Any

import kit.errors
from preheat import desired, estimate, manifest, plan, reconciler, status


def row(core: reconciler.Reconciler, want: desired.Request) -> status.Status:
    """The present state of one wanted image, in one line of reasoning."""
    seen = core.view
    planned = seen.rows.get(want.ref)
    look = core.resolver.of(want.ref)
    running = core.running.get(want.ref)
    failed = core.failures.get(want.ref) or (look.failed if look is not None else None)
    shape = look.shape if look is not None else None
    here = seen.inventory.digest_of(want.ref)
    if shape is None and here is not None:
        shape = seen.shapes.get(here)
    digest = shape.top.digest if shape is not None else here or ""
    present = planned is not None and planned.present
    gone = {release.hold for release in seen.decided.releases}
    pins = [
        pin
        for pin in seen.pinned
        if pin.ref == want.ref and pin.digest == digest and pin.hold not in gone
    ]
    skip = next((s for s in seen.decided.skips if s.ref == want.ref), None)
    state, reason = "waiting", "its turn has not come"
    if running is not None:
        state = "unpacking" if running.puller.progress.phase == "unpacking" else "pulling"
        reason = running.puller.progress.phase
    elif want.released:
        state, reason = "released", "an operator let go of it"
    elif want.paused:
        state, reason = "paused", "an operator paused it"
    elif present:
        state, reason = "ready", skip.text if skip is not None else ""
    elif not seen.at:
        reason = core.trouble or "the runtime is being asked"
    elif failed is not None and (failed.retry_at is None or skip is None or skip.reason != "disk"):
        state, reason = "failed", failed.message
    elif look is not None and look.private and not want.share_private:
        state, reason = "refused", desired.PRIVATE
    elif look is None or look.shape is None:
        state, reason = "looking", "the registry is being asked"
    elif skip is not None:
        state = "waiting" if skip.reason is plan.Reason.BLOCKED else "skipped"
        reason = skip.text
    total = shape.bytes_total if shape is not None else 0
    missing = total if planned is None else planned.fetch
    done = total if present else max(0, total - missing)
    layers: tuple[dict[str, Any], ...] = ()
    speed, unpacked = 0.0, 0
    if running is not None:
        progress = running.puller.progress
        done, unpacked = progress.bytes_done, progress.layers_unpacked
        missing = max(0, total - done)
        spent = max(0.001, time.time() - progress.started)
        speed = max(0.0, (done - running.began_with) / spent)
        layers = tuple(
            {"digest": name, "bytes_done": at, "bytes_total": end}
            for name, (at, end) in progress.layers.items()
        )
    inventory = seen.inventory
    return status.Status(
        ref=want.ref,
        digest=digest,
        state=state,
        pinned=bool(pins),
        bytes_total=total,
        bytes_done=done,
        by=want.by,
        keep=want.keep,
        priority=want.priority,
        reason=reason,
        image_id=shape.image_id if shape is not None else "",
        bytes_missing=missing,
        bytes_unpacked=_unpacked(planned),
        failure_kind=str(failed.kind) if failed is not None and not present else "",
        attempts=failed.attempts if failed is not None and not present else 0,
        retry_at=failed.retry_at if failed is not None and not present else None,
        in_use=shape is not None and shape.image_id in inventory.in_use,
        last_used=inventory.last_used.get(digest),
        layers=layers,
        layers_unpacked=unpacked,
        bytes_per_second=round(speed, 1),
    )


def _unpacked(planned: plan.Wanted | None) -> int:
    if planned is None:
        return 0
    return sum(size for key, size in planned.parts.items() if key.startswith("s "))


def rows(core: reconciler.Reconciler) -> list[status.Status]:
    """Every image that is wanted or still pinned, by priority, then name."""
    found = dict(core.view.wanted)
    for pin in core.view.pinned:
        if pin.ref not in found:
            found[pin.ref] = desired.Request(pin.ref, "retained", "always")
    every = [row(core, want) for want in found.values()]
    return sorted(every, key=lambda each: (-each.priority, each.ref))


def plan_json(core: reconciler.Reconciler) -> dict[str, Any]:
    """The latest plan with the figures it rests on."""
    seen = core.view
    if seen.node is None:
        raise kit.errors.SourceError("the plan", core.trouble or "not made yet", "try again soon")
    decided, state = seen.decided, seen.node
    return {
        "at": seen.at,
        "disk": {
            "capacity": state.capacity,
            "free": state.free,
            "room": state.room,
            "gc_high": state.gc_high,
            "gc_low": state.gc_low,
            "eviction_free": state.eviction_free,
            "freeable": state.freeable,
            "pressed": state.pressed,
        },
        "pin_budget": state.pin_budget,
        "pinned_bytes": estimate.union(pin.parts for pin in seen.pinned),
        "pause": decided.pause,
        "pull": list(decided.pulls),
        "running": sorted(core.running),
        "waiting": list(decided.waiting),
        "pin": list(decided.pins),
        "release": [
            {"ref": r.ref, "reason": str(r.reason), "text": r.text} for r in decided.releases
        ],
        "skip": [
            {"ref": s.ref, "reason": str(s.reason), "text": s.text, "need": s.need, "free": s.free}
            for s in decided.skips
        ],
        "reuse": [vars(each) | {"bases": list(each.bases)} for each in reuse(core)],
    }


def reuse(core: reconciler.Reconciler) -> list[estimate.Reuse]:
    """How much of each image on the node comes from the preheated bases. At most 200 images."""
    seen = core.view
    shapes: dict[str, manifest.Shape] = {}
    for record in seen.inventory.records:
        shape = seen.shapes.get(record.target.digest)
        if shape is not None and not manifest.is_digest(record.name) and "@" not in record.name:
            shapes[record.name] = shape
    bases = frozenset(ref for ref, want in seen.wanted.items() if want.by != "retained")
    return estimate.reuse(shapes, bases)[:200]
