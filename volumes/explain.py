"""One page for an operator about one device, from the agent's JSON. Pure."""

from collections.abc import Iterator
from typing import Any

_NEXT = {
    "timeout": "Check its backend: cluster health, network. Processes that use it hang. It is "
    "looked at again by itself",
    "unreadable": "See the kernel's log, the cluster's health and its blocklist. Then stop "
    "the pod, unmap the volume and map it again. The data is most likely intact: format nothing",
    "no_media": "It is not connected any more: unmap it, and let it be attached again",
    "unknown_content": "It is not blank, and nothing knows what is there: an unfinished mkfs, "
    "or damage. Compare it with a snapshot or a backup before anything else",
    "ambivalent": "It carries the marks of several file systems. 'wipefs DEVICE' lists them "
    "without changing anything; find out which one is right",
}


def page(
    device: dict[str, Any], ledger: dict[str, Any] | None, denials: list[dict[str, Any]], mode: str
) -> Iterator[str]:
    """One page for an operator: what is known, what was refused and why, the next safe step."""
    seen = device["verdict"] or {"verdict": "not looked at yet", "type": "", "uuid": ""}
    content = f"{seen['verdict']} {seen['type']} {seen['uuid']}".strip()
    yield f"{device['device']} ({device['driver']}) is {device['title']}"
    yield f"  volume     {device['volume'] or 'nothing names it, so it gets no automatic lease'}"
    yield f"  seen       {content}, {device['looked_seconds_ago']:.0f}s ago"
    if ledger is None:
        yield "  ledger     knows nothing of it"
    else:
        held = f"{ledger['type']} {ledger['uuid']}".strip() or "no content"
        permitted = ", a format was permitted and its outcome is not known"
        yield f"  ledger     {held}, seen on {ledger['node'] or '-'}" + (
            permitted if ledger["permitted"] else ""
        )
    if device["raw_block"]:
        yield "  writing    a pod has it as a raw block volume: allowed while it is published"
    elif device["may_be_formatted"]:
        yield "  formatting allowed now: it has a lease"
    else:
        yield "  formatting refused" + ("" if mode == "enforce" else f" (but the mode is {mode})")
    for reason in device["reasons"]:
        yield f"             because {reason}"
    for each in denials[-5:]:
        did = "refused" if each["denied"] else "let through"
        yield f"  {did:<10} {each['program']} (pid {each['pid']}, pod {each['pod'] or '-'}): " + (
            each["command"] or "-"
        )
    yield f"Next: {_next_step(device, seen, ledger)}"


def _next_step(device: dict[str, Any], seen: dict[str, Any], ledger: dict[str, Any] | None) -> str:
    if device["raw_block"] or device["may_be_formatted"]:
        return "Nothing"
    kind = seen["verdict"]
    if kind in _NEXT:
        return _NEXT[kind]
    if kind == "blank_verified" and ledger is not None and ledger["type"]:
        return (
            f"It reads as empty, and held {ledger['type']}. Do not format it: look at the image "
            "from another node, and at its snapshots ('rbd snap ls', 'rbd diff')"
        )
    if kind == "blank_verified":
        return "The next attempt to write asks again. The reasons above say what it waits for"
    if ledger is not None and (ledger["type"], ledger["uuid"]) != (seen["type"], seen["uuid"]):
        return (
            "It holds other content than before. Find out who formatted it; if that was intended: "
            f"nodeagent volume ledger --accept {device['volume']}"
        )
    return "Nothing: it holds what is expected, and mounts"
