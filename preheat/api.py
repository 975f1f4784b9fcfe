"""Preheating's part of the admin API (paths and bodies: openapi.yaml) and of the status page."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import kit.errors
import kit.room
import kit.units
from kit.room import Answer, Cell, Handler, Json, PageSection, Request, Role, Route, Stream, watch
from preheat import status
from preheat.component import Preheat
from preheat.planning import plan
from preheat.registry import estimate

# Preheating's part of the status page: each image, what it waits for, and the disk.

MOST_ROWS = 200
_TONES = {"ready": "good", "failed": "bad", "refused": "bad", "skipped": "bad"}

_UNSIZED = "size not known yet"
_EMPTY = (
    "No image yet. Name one in the settings (preheat.images), make an ImageSet in the cluster, or "
    "say 'nodeagent image preheat REF'."
)


def sections(preheat: Preheat) -> Sequence[PageSection]:
    """Images by priority, then name; those that need a person come first."""
    size = kit.units.format_size
    rows = sorted(preheat.images(), key=lambda row: _TONES.get(row.state) != "bad")
    seen = preheat.reconciler.snapshot
    pinned = estimate.union(pin.parts for pin in seen.pinned)
    summary = preheat.reconciler.trouble
    if not summary and seen.node is not None:
        summary = f"Pins keep {size(pinned)} of {size(seen.node.pin_budget)}, "
        summary += f"{size(seen.node.free)} of the disk are free."
        if seen.decided.pause:
            summary += f" Nothing is pulled: {seen.decided.pause}."
    if len(rows) > MOST_ROWS:
        summary += f" {len(rows) - MOST_ROWS} more are not shown: nodeagent image list."
    head = ("Image", "State", "Fetched", "Plan")
    shown = [_row(row) for row in rows[:MOST_ROWS]]
    return [PageSection("Images", summary, head, shown, _EMPTY, _disk(seen.node, pinned))]


def _disk(node: plan.Node | None, pinned: int) -> Sequence[kit.room.Slice]:
    """``pinned``: bytes of pinned images."""
    if node is None:
        return ()
    kept = min(int(node.eviction_free * node.capacity), node.free)
    return (
        kit.room.Slice("pinned images", pinned, "used"),
        kit.room.Slice("other files", max(0, node.used - pinned), "other"),
        kit.room.Slice("free", node.free - kept, "free"),
        kit.room.Slice("below it kubelet evicts pods", kept, "reserve"),
    )


def _row(row: status.Status) -> Sequence[Cell]:
    size = kit.units.format_size
    kept = f"pinned, {row.by}" if row.pinned else f"not pinned, {row.by}"
    pulls = row.bytes_per_second and row.state == "pulling"
    return (
        Cell(row.ref, style="strong", below=[Cell(row.digest[:19], style="code")]),
        Cell(row.state, tone=_TONES.get(row.state, "mid"), below=[Cell(kept)]),
        Cell(
            f"{size(row.bytes_done)} of {size(row.bytes_total)}" if row.bytes_total else _UNSIZED,
            progress=(row.bytes_done, row.bytes_total) if row.bytes_total else None,
            below=[Cell(f"{size(row.bytes_per_second)}/s")] if pulls else [],
        ),
        Cell(below=[Cell(row.reason)] if row.reason else [], wide=True),
    )


Change = Callable[[Preheat, str], Awaitable[status.Status | None]]


def _ref(fields: Mapping[str, Any], example: str = 'send {"ref": "HOST/PATH:TAG"}') -> str:
    ref = fields.get("ref")
    if not isinstance(ref, str) or not ref:
        raise kit.errors.SettingsError("request", "it has no text 'ref'", example)
    return ref


def _asked(request: Request) -> str:
    return _ref(request.query, "add ?ref=HOST/PATH:TAG")


def _keep(value: object) -> str:
    """The pin rule of a request: always, never or {"for": duration}."""
    if value in ("always", "never"):
        return str(value)
    if isinstance(value, dict) and set(value) == {"for"}:
        try:
            return f"for:{kit.units.parse_duration(value['for']):.0f}"
        except ValueError as error:
            raise kit.errors.SettingsError("pin", str(error), "write it like 72h") from None
    raise kit.errors.SettingsError(
        "pin", f"{str(value)[:60]!r} is not a rule", 'send always, never or {"for": "72h"}'
    )


async def _list(preheat: Preheat, _: Request) -> Json:
    return {"images": preheat.images()}


async def _show(preheat: Preheat, request: Request) -> status.Status:
    return preheat.show(_asked(request))


async def _plan(preheat: Preheat, _: Request) -> status.ImagePlan:
    return status.image_plan(preheat.reconciler)


async def _watch(preheat: Preheat, request: Request) -> Stream:
    """Ends when the image is ready or gone, or when only an operator can change its state."""
    row = preheat.show(_asked(request))

    def read() -> status.Status | None:
        nonlocal row
        try:
            row = preheat.show(row.ref)
        except kit.errors.NotFoundError:
            # With "pin: never" a request ends with its pull, before it was seen as ready.
            here = preheat.reconciler.snapshot.inventory.served(row.ref)
            if row.state in status.PRESENT or not here:
                return None
            row = replace(row, state="ready", reason="", bytes_done=row.bytes_total)
        if row.state in status.PRESENT and status.is_asking(preheat.reconciler, row.ref):
            return replace(row, state="looking", reason="the registry lookup is in progress")
        return row

    return Stream(watch(read, _is_final))


def _is_final(row: status.Status) -> bool:
    if row.state == "failed":
        return row.retry_at is None or row.failure_kind in status.FOR_OPERATORS
    return row.state in (*status.PRESENT, "released", "refused", "skipped", "paused")


async def _preheat(preheat: Preheat, request: Request) -> Answer:
    body = request.fields(ref=object, pin=object)
    row = await preheat.preheat(_ref(body), _keep(body.get("pin", "always")))
    return Answer(row, 202)


def _change(method: Change) -> Handler:
    async def handler(preheat: Preheat, request: Request) -> status.Status | Json:
        return await method(preheat, _ref(request.fields(ref=object))) or {}

    return handler


ROUTES = (
    Route("GET", "/v1/images", _list),
    Route("GET", "/v1/images/one", _show),
    Route("GET", "/v1/images/plan", _plan),
    Route("GET", "/v1/images/watch", _watch),
    Route("POST", "/v1/images/preheat", _preheat, Role.OPERATE),
    Route("POST", "/v1/images/pin", _change(Preheat.pin), Role.OPERATE),
    Route("POST", "/v1/images/unpin", _change(Preheat.unpin), Role.OPERATE),
    Route("POST", "/v1/images/pause", _change(Preheat.pause), Role.OPERATE),
    Route("POST", "/v1/images/resume", _change(Preheat.resume), Role.OPERATE),
    Route("POST", "/v1/images/cancel", _change(Preheat.cancel), Role.OPERATE),
)
