"""The volumes' part of the admin API (paths and bodies: openapi.yaml) and of the status page."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import kit.errors
import kit.units
from kit.findings import Finding
from kit.room import Cell, Handler, Json, PageSection, Request, Role, Route
from volumes import settings
from volumes.audit import status
from volumes.audit.inventory.model import Inventory
from volumes.audit.service import Audit
from volumes.component import Volumes
from volumes.guard import pace
from volumes.guard import status as guard_status

# The volumes' part of the status page: what the guard does, and each device it watches.

MOST_ROWS = 200
STALE_SECONDS = 120.0
LATE_SECONDS = 1.1 * pace.CHECK_IN_USE_SECONDS  # no device waits so long for a look
_ANSWERS = {"enforce": ("refused", "good"), "dry-run": ("reported, not refused", "mid")}
_HOLDS = {
    "has_fs": ("a file system", "good"),
    "partitioned": ("partitions", "good"),
    "encrypted": ("encrypted data", "good"),
    "blank_verified": ("nothing, proven", "mid"),
    "unknown_content": ("unknown data", "good"),
    "ambivalent": ("two kinds of data", "mid"),
    "unreadable": ("cannot be read", "bad"),
    "no_media": ("no medium", "mid"),
    "timeout": ("does not answer", "bad"),
}
_EMPTY = (
    "No guarded device is attached. A volume shows here from the moment it is attached, with what "
    "it holds and whether a format of it is refused."
)


def sections(volumes: Volumes) -> Sequence[PageSection]:
    """Devices with findings first, then by name."""
    guard = guard_status.describe(volumes.guard)
    found = _rules_by_device([*volumes.audit.findings, *volumes.guard_findings])
    devices = sorted(
        guard["devices"], key=lambda each: (each["device"] not in found, each["device"])
    )
    does = guard["wanted_mode"] if guard["in_force"] else "not in force"
    rows = [_row(each, does, found.get(each["device"], ())) for each in devices[:MOST_ROWS]]
    summary = said(guard)
    if len(devices) > MOST_ROWS:
        summary += f" {len(devices) - MOST_ROWS} more are not shown: nodeagent volume list."
    head = ("Device", "Holds", "Size", "A format is", "Findings")
    return [PageSection("Volumes", summary, head, rows, _EMPTY)]


def said(guard: Mapping[str, Any]) -> str:
    """What the guard does, in a sentence. ``guard``: as ``guard.status.describe`` gives it."""
    mode, leases = guard["wanted_mode"], len(guard.get("leases", ()))
    does = {
        "off": "The guard is off: nothing keeps a volume with data from being formatted.",
        "dry-run": "The guard only watches (dry-run): it reports formats and refuses none.",
        "enforce": "The guard refuses every format of a volume that holds data.",
    }.get(mode, f"The guard's mode is {mode}.")
    if not guard["in_force"]:
        does = f"The guard is not in force, although its mode is {mode}: {guard['reasons'][0]}."
    permits = f" Open permits to format: {leases}." if leases else ""
    denied = guard["denials"]
    return f"{does}{permits}" + (f" Refusals remembered: {len(denied)}." if denied else "")


def _rules_by_device(found: Iterable[Finding]) -> dict[str, list[str]]:
    """Path of each device that something was found about, and the rules that found it. The audit
    names a device without its folder, the guard with it."""
    rules: dict[str, set[str]] = {}
    for each in found:
        if name := each.evidence.get("device"):
            rules.setdefault(f"/dev/{name.removeprefix('/dev/')}", set()).add(each.rule)
    return {path: sorted(names) for path, names in rules.items()}


def _row(device: Mapping[str, Any], does: str, findings: Sequence[str]) -> Sequence[Cell]:
    """``does``: the guard's mode, or that it is not in force."""
    verdict = device["verdict"]
    holds, tone = ("not looked at yet", "mid")
    below = []
    if verdict is not None:
        holds, tone = _HOLDS.get(verdict["verdict"], (verdict["verdict"], "mid"))
        below = [Cell(verdict["type"])] if verdict.get("type") else []
        if (ago := device["looked_seconds_ago"]) >= STALE_SECONDS:
            late = "mid" if ago >= LATE_SECONDS else ""
            below.append(Cell(f"looked at {kit.units.format_duration(ago)} ago", late))
    answer, may = _ANSWERS.get(does, ("not refused", "bad")), device["may_be_formatted"]
    works = device["formatted_by"] and does == "enforce"
    return (
        Cell(device["title"], style="strong", below=[Cell(device["device"], style="code")]),
        Cell(holds, tone=tone, below=below),
        Cell(kit.units.format_size(device["size"]), number=True),
        Cell(
            "permitted: it is blank" if may else "at work" if works else answer[0],
            tone="mid" if may or works else answer[1],
            below=[Cell(why) for why in device["reasons"][:2]],
        ),
        Cell(", ".join(findings) or "none", tone="bad" if findings else ""),
    )


_MODES = (*get_args(settings.GuardSettings.model_fields["mode"].annotation), "settings")
_LONGEST_TEXT = 4096


def _texts(request: Request, *names: str) -> list[str]:
    """The body's fields of these names and no others; SettingsError names one that is missing, not
    known or not a text. ``by`` becomes who called, with what the caller says beside it."""
    body = request.fields(**dict.fromkeys(names, str))
    for name in names:
        value = body.get(name)
        if value is None or len(value) > _LONGEST_TEXT or "\0" in value:
            raise kit.errors.SettingsError(
                f"request field {name!r}",
                f"is missing or not a text of at most {_LONGEST_TEXT} characters",
                "see /openapi.json",
            )
    if "by" in body and request.caller:
        body["by"] = f"{request.caller} (says {body['by']})" if body["by"] else request.caller
    return [body[name] for name in names]


# --- guard, probe, ledger


async def _guard(volumes: Volumes, _: Request) -> Json:
    if not volumes.guard.in_force.looked:  # what an earlier agent attached may well be there
        raise kit.errors.DegradedError(
            "the format guard", "the agent is starting and has not looked at the kernel yet",
            "try again in a moment, or ask the kernel: nodeagent volume guard status --direct",
        )  # fmt: skip
    return volumes.guard_status()


async def _rehearsal(volumes: Volumes, _: Request) -> Json:
    scope = volumes.guard.in_force.settings.scope
    return {"scope": scope} | volumes.guard.rehearsal.describe()


async def _set_mode(volumes: Volumes, request: Request) -> Json:
    mode, by, reason = _texts(request, "mode", "by", "reason")
    if mode not in _MODES:
        raise kit.errors.SettingsError(
            f"mode {mode!r}", "is not a mode", f"use one of {', '.join(_MODES)}"
        )
    return await volumes.set_mode(mode, by, reason)


def _with_texts(method: Callable[..., Awaitable[Any]], *names: str) -> Handler:
    """Calls the component's ``method`` with these fields of the body."""

    async def handler(volumes: Volumes, request: Request) -> Any:
        return await method(volumes, *_texts(request, *names))

    return handler


_detach = _with_texts(Volumes.detach, "by", "reason")
_probe = _with_texts(Volumes.probe, "device")
_accept = _with_texts(Volumes.accept, "volume", "by")
_allow_format = _with_texts(Volumes.allow_format, "device", "volume", "reason", "by")


async def _ledger(volumes: Volumes, _: Request) -> Json:
    return {"volumes": volumes.guard.executor.ledger.entries()}


# --- audit


def _audit(volumes: Volumes) -> Audit:
    if not volumes.audit.settings.enabled:
        raise kit.errors.NotFoundError(
            "volume audit", "it is switched off on this node", "set volumes.audit.enabled"
        )
    return volumes.audit


def _inventory(audit: Audit, thing: str) -> Inventory:
    if audit.inventory is None:
        raise kit.errors.RefusedError(
            thing, "the agent has not scanned the node yet", "try again in a few seconds"
        )
    return audit.inventory


async def _overview(volumes: Volumes, _: Request) -> Json:
    return status.overview(_audit(volumes))


async def _scan_now(volumes: Volumes, request: Request) -> Json:
    request.fields()
    audit = _audit(volumes)
    await audit.audit_now()
    return status.overview(audit)


async def _devices(volumes: Volumes, _: Request) -> Json:
    audit = _audit(volumes)
    _inventory(audit, "volumes")
    return {"devices": status.devices(audit)}


async def _device(volumes: Volumes, request: Request) -> Json:
    audit, name = _audit(volumes), request.path["device"]
    inventory = _inventory(audit, f"volume {name}")
    found = inventory.device(name.removeprefix("/dev/"))
    if found is None:
        raise kit.errors.NotFoundError(
            f"volume {name}",
            "no watched device has that name",
            "see 'nodeagent volume list'; devices of other drivers, and those that "
            "volumes.audit.names leaves out, are not watched",
        )
    return status.detail(audit, inventory, found)


async def _findings(volumes: Volumes, _: Request) -> Json:
    return {"findings": status.findings(_audit(volumes))}


async def _act(volumes: Volumes, request: Request) -> Json:
    body = request.fields(finding=str, dry_run=bool)
    if "finding" not in body:
        raise kit.errors.SettingsError("request", "it names no finding", "see /openapi.json")
    return await _audit(volumes).act(body["finding"], dry_run=body.get("dry_run", True))


ROUTES = (
    Route("GET", "/v1/volumes/guard", _guard),
    Route("GET", "/v1/volumes/guard/rehearsal", _rehearsal),
    Route("PUT", "/v1/volumes/guard/mode", _set_mode, Role.DANGEROUS),
    Route("POST", "/v1/volumes/guard/detach", _detach, Role.DANGEROUS),
    Route("POST", "/v1/volumes/probe", _probe, Role.OPERATE),
    Route("GET", "/v1/volumes/ledger", _ledger),
    Route("POST", "/v1/volumes/ledger/accept", _accept, Role.DANGEROUS),
    Route("POST", "/v1/volumes/allow-format", _allow_format, Role.DANGEROUS),
    Route("GET", "/v1/audit", _overview),
    Route("POST", "/v1/audit/pass", _scan_now, Role.OPERATE),
    Route("GET", "/v1/audit/devices", _devices),
    Route("GET", "/v1/audit/devices/{device}", _device),
    Route("GET", "/v1/audit/findings", _findings),
    Route("POST", "/v1/audit/act", _act, Role.DANGEROUS),
)
