"""The volumes' part of the status page: what the guard does, and each device it watches."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import kit.units
from kit.findings import Finding
from kit.room import Cell, PageSection
from volumes.component import Volumes
from volumes.guard import status

MOST_ROWS = 200
STALE_SECONDS = 120.0
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
    guard = status.describe(volumes.guard)
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
    """What the guard does, in a sentence. ``guard``: as ``status.describe`` gives it."""
    mode, leases = guard["wanted_mode"], len(guard.get("leases", ()))
    does = {
        "off": "The guard is off: nothing keeps a volume with data from being formatted.",
        "dry-run": "The guard only watches (dry-run): it reports formats and refuses none.",
        "enforce": "The guard refuses every format of a volume that holds data.",
    }.get(mode, f"The guard's mode is {mode}.")
    if not guard["in_force"]:
        does = f"The guard is not in force, although its mode is {mode}: {guard['reasons'][0]}."
    permits = f" {leases} permits to format are open." if leases else ""
    denied = guard["denials"]
    return f"{does}{permits}" + (f" {len(denied)} refusals are remembered." if denied else "")


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
            below.append(Cell(f"looked at {kit.units.format_duration(ago)} ago", "mid"))
    answer, may = _ANSWERS.get(does, ("not refused", "bad")), device["may_be_formatted"]
    return (
        Cell(device["title"], style="strong", below=[Cell(device["device"], style="code")]),
        Cell(holds, tone=tone, below=below),
        Cell(kit.units.format_size(device["size"]), number=True),
        Cell(
            "permitted: it is blank" if may else answer[0],
            tone="mid" if may else answer[1],
            below=[Cell(why) for why in device["reasons"][:2]],
        ),
        Cell(", ".join(findings) or "none", tone="bad" if findings else ""),
    )
