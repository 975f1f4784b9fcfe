"""One page for an operator about one device, from the agent's JSON. Pure."""

from collections.abc import Iterator
from typing import Any

_NEXT = {
    "timeout": "Check its backend: cluster health, network. Processes that use it hang. It is "
    "looked at again by itself",
    "unreadable": "See the kernel's log, the cluster's health and its blocklist. Then end "
    "the pod: the kubelet unmaps the volume and maps it again. The data is most likely intact: "
    "format nothing",
    "no_media": "It is not connected any more: unmap it, and let it be attached again",
    "unknown_content": "It is not blank, and nothing knows what is there: an unfinished mkfs, "
    "or damage. Compare it with a snapshot or a backup before anything else",
    "ambivalent": "It carries the marks of several file systems. 'wipefs DEVICE' lists them "
    "without changing anything; find out which one is right",
}


def page(
    device: dict[str, Any],
    ledger: dict[str, Any] | None,
    denials: list[dict[str, Any]],
    mode: str,
    repair: dict[str, Any] | None = None,
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
    yield from _persistent_volume(device.get("persistent_volume"))
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
    if repair is not None:
        yield from _repair(repair)
        yield f"Next: {_by_hand(repair)}"
        return
    yield f"Next: {_next_step(device, seen, ledger)}"


def _repair(case: dict[str, Any]) -> Iterator[str]:
    """Of a broken mapping: what the agent would do, or does."""
    would = {"on": "does", "dry-run": "would do (dry-run)", "off": "would do (it is off)"}
    yield f"  repair     {would[case['mode']]}: {case['next']}; {case['why']}"
    if case["same_client"]:
        others = ", ".join(case["same_client"])
        yield f"             the same client has {others}: unmap them too, or it comes back"


def _by_hand(case: dict[str, Any]) -> str:
    if case["next"] == "unmap":
        if case["mode"] == "on":
            return "Nothing: the agent unmaps it, and the next attach maps it anew"
        return f"unmap it ('rbd unmap /dev/{case['device']}', never with force); format nothing"
    return (
        "The mapping is broken and does not heal. Stop its pod and let kubelet unmount it; format "
        "nothing, never unmap with force. The data is most likely intact"
    )


def _persistent_volume(said: dict[str, Any] | None) -> Iterator[str]:
    """What it said when a lease was last asked for."""
    if said is None or (said["says"] == "not_asked" and not said["text"]):
        return
    age = f"created {said['age_seconds'] / 3600:.1f}h ago"
    if said["says"] == "content":
        yield f"  Kubernetes {said['name']} says that it holds data: {said['text']}"
    elif said["says"] == "none":
        yield f"  Kubernetes {said['name']}, {age}, knows of no content"
    elif said["says"] == "unknown":
        yield f"  Kubernetes did not answer for {said['silent_for_seconds']}s: {said['text']}"
    else:
        yield f"  Kubernetes {said['text']}"


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
    volume = device.get("persistent_volume") or {"says": ""}
    if kind == "blank_verified" and volume["says"] == "content":
        return (
            f"It reads as empty, and its PersistentVolume {volume['name']} says that it holds "
            "data. Do not format it: look at the image from another node, and at its snapshots "
            "('rbd snap ls', 'rbd diff')"
        )
    if kind == "blank_verified":
        return "The next attempt to write asks again. The reasons above say what it waits for"
    if ledger is not None and (ledger["type"], ledger["uuid"]) != (seen["type"], seen["uuid"]):
        return (
            "It holds other content than before. Find out who formatted it; if that was intended: "
            f"nodeagent volume ledger --accept {device['volume']}"
        )
    return "Nothing: it holds what is expected, and mounts"
