"""One page for an operator about one device, from the agent's JSON. Pure."""

import os
import time
from collections.abc import Iterator
from typing import Any

_BY_HAND = "docs/guard.md, 'Formatting by hand'"
_TROUBLE = "the kernel's log, 'ceph health detail', 'ceph osd blocklist ls'"
_ANEW = "end its pod: kubelet unmaps the volume and maps it again"


def unwatched(probed: dict[str, Any], denials: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a device that the guard never examines, from a look at it. Nobody keeps a ledger
    of it: a partition bears the name of the whole device's volume."""
    seen = probed["verdict"]
    return {
        "device": probed["device"],
        "driver": probed["driver"],
        "title": probed["title"],
        "volume": probed["volume"],
        "partition_of": probed["partition_of"],
        "watched": False,
        "verdict": probed if seen else None,
        "looked_seconds_ago": 0.0,
        "looks_agree": False,
        "missing": "",
        "changed_from": "",
        "cluster": None,
        "persistent_volume": None,
        "raw_block": False,
        "may_be_formatted": False,
        "formatted_by": 0,
        "reasons": denials[-1]["reasons"] if denials else [],
    }


def gone(path: str, why: str, denials: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a device of which only denials are left. ``why``: it could not be looked at."""
    last = denials[-1]
    nothing = {"verdict": "", "device": path, "driver": "not attached", "partition_of": ""}
    row = unwatched({**nothing, "title": last["title"], "volume": last["volume"]}, denials)
    return {**row, "reasons": [*row["reasons"], why]}


def page(
    device: dict[str, Any],
    ledger: dict[str, Any] | None,
    denials: list[dict[str, Any]],
    mode: str,
    repair: dict[str, Any] | None = None,
    *,
    agent: bool = True,
) -> Iterator[str]:
    """One page for an operator: what is known, what was refused and why, the next safe step.

    ``agent`` False: none answers, and the command itself looked.
    """
    watched = device.get("watched", True)
    yield f"{device['device']} ({device['driver']}) is {device['title']}"
    yield f"  volume     {device['volume'] or 'nothing names it, so it gets no automatic lease'}"
    if device["verdict"] is None:
        yield "  seen       not looked at yet"
    else:
        yield f"  seen       {_seen(device['verdict'])}, {device['looked_seconds_ago']:.0f}s ago"
    if not watched:
        yield "  ledger     none is kept of it"
    elif ledger is None:
        yield "  ledger     knows nothing of it"
    else:
        yield f"  ledger     {_entry(ledger)}"
    yield from _cluster(device.get("cluster"))
    yield from _persistent_volume(device.get("persistent_volume"))
    if device["raw_block"]:
        yield "  writing    a pod has it as a raw block volume: allowed while it is published"
    elif device["may_be_formatted"]:
        yield "  formatting allowed now: it has a lease"
    elif writer := device.get("formatted_by"):  # an agent of an earlier version tells none
        yield f"  formatting process {writer} is at it; any other: {_verdict(mode)}"
    else:
        yield f"  formatting {_verdict(mode)}"
    for reason in device["reasons"]:
        yield f"             because {reason}"
    if not agent:
        yield "  refused    not known: no agent answers that would know who was refused"
    for each in denials[-5:]:
        did = "refused" if each["denied"] else "let through"
        yield f"  {did:<10} {each['program']} (pid {each['pid']}, pod {each['pod'] or '-'}): " + (
            each["command"] or "-"
        )
    if repair is not None:
        yield from _repair(repair)
        yield f"Next: {_by_hand(repair)}"
        return
    yield f"Next: {_next_step(device, ledger, denials, mode, agent)}"


def _verdict(mode: str) -> str:
    """What the mode does with a format that has no lease."""
    if mode == "enforce":
        return "refused"
    if mode == "dry-run":
        return "NOT refused: the mode is dry-run, and the guard only reports. In enforce: refused"
    return f"NOT refused: the mode is {mode}, and nothing guards the volume. In enforce: refused"


def _still_refused(mode: str) -> str:
    if mode == "enforce":
        return "a format stays refused"
    return f"a format is NOT refused in mode {mode}: run no mkfs, and see that no pod does"


def _seen(verdict: dict[str, Any]) -> str:
    kind = str(verdict["verdict"])
    if kind == "unreadable":
        return f"{kind} ({verdict['where']}: {os.strerror(verdict['errno'])})"
    return f"{kind} {verdict['type']} {verdict['uuid']}".strip()


def _content(entry: dict[str, Any]) -> str:
    return f"{entry['type']} {entry['uuid']}".strip()


def _entry(entry: dict[str, Any]) -> str:
    """An entry of the ledger or of an image's metadata."""
    if not entry["type"]:
        held = "no content seen"
    else:
        at = entry["last_seen"]
        when = f" at {time.strftime('%F %T', time.localtime(at))}" if at else ""
        held = f"{_content(entry)}, seen on {entry['node'] or '-'}{when}"
    return held + (
        ", a format was permitted and its outcome is not known" if entry["permitted"] else ""
    )


def _cluster(said: dict[str, Any] | None) -> Iterator[str]:
    """What the image's cluster said when it was last asked."""
    if said is None:
        return
    if said["metadata"] == "unknown":
        yield f"  metadata   not known: {said['why_unknown']}"
    elif said["entry"] is not None:
        yield f"  metadata   {_entry(said['entry'])}"
    elif said["metadata"] == "none":
        yield "  metadata   of the image knows nothing of it"
    extents = {
        "content": "extents are allocated: something was written to the image",
        "none": "nothing is allocated where data leaves its marks",
    }
    if said["extents"] in extents:
        yield f"  cluster    {extents[said['extents']]}"


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
        return (
            "kubelet has no record of it: unmap it "
            f"('rbd unmap /dev/{case['device']}', never with force); format nothing"
        )
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


# --- the next safe step


def _next_step(
    device: dict[str, Any],
    ledger: dict[str, Any] | None,
    denials: list[dict[str, Any]],
    mode: str,
    agent: bool,
) -> str:
    if device["raw_block"]:
        return "Nothing: its pod writes to it, as its user asked for"
    if device["may_be_formatted"]:
        return "Nothing: kubelet formats it at its next try"
    lost = device["missing"] or device["changed_from"]
    if (writer := device.get("formatted_by")) and not lost:
        return f"Wait: process {writer} formats it now. Then run this again"
    if device.get("freed_next") and not lost:
        return "Wait: the next look frees the lease. Then run this again"
    watched = device.get("watched", True)
    seen = device["verdict"]
    if seen is None:
        if not watched:
            return (
                "Nothing on this node: it could not be looked at, the reason is above. If it is "
                "attached anew, run this again; format nothing before that"
            )
        return "Nobody has looked at it yet: run this again in ten seconds. Format nothing"
    kind = seen["verdict"]
    if kind in ("timeout", "unreadable", "no_media"):
        return _silent(device, kind)
    if kind in ("unknown_content", "ambivalent"):
        return _not_understood(device, kind)
    if kind == "blank_verified":
        return _blank(device, ledger, mode, agent) if watched else _blank_unwatched(device)
    return _with_content(device, ledger, denials, mode, agent)


def _held(device: dict[str, Any]) -> str:
    return f"It held {device['missing']}. " if device["missing"] else ""


def _compare(device: dict[str, Any]) -> str:
    """How to find out what the backend has, without this node's mapping."""
    if not device["volume"].startswith("rbd:"):
        return "look at its backend from another node, and at its backup"
    return "look at the image from another node, and at its snapshots ('rbd snap ls', 'rbd diff')"


def _silent(device: dict[str, Any], kind: str) -> str:
    if not device["looks_agree"]:
        return (
            "Wait: one look without an answer says nothing yet, slow storage does that too. Run "
            "this again in ten seconds. Stop nothing, unmap nothing, format nothing"
        )
    held = _held(device)
    if kind == "no_media":
        return (
            f"{held}It is not connected any more, two looks agree. Mend its backend, then {_ANEW}. "
            "Format nothing"
        )
    if kind == "timeout":
        return (
            f"{held}It does not answer, two looks agree, and processes that use it hang. Look at "
            f"{_TROUBLE}, and at the network; it goes on when its backend answers. The data is "
            "most likely intact: format nothing, unmap nothing with force"
        )
    return (
        f"{held}It cannot be read, two looks agree. Look at {_TROUBLE}, mend what they show, "
        f"then {_ANEW}. The data is most likely intact: format nothing"
    )


def _not_understood(device: dict[str, Any], kind: str) -> str:
    held = _held(device)
    if kind == "ambivalent":
        return (
            f"{held}It carries the marks of several file systems. 'wipefs DEVICE' lists them "
            "without changing anything; find out which one is right. Format nothing"
        )
    return (
        f"{held}It is not blank, and nothing knows what is there: an unfinished mkfs, damage, or "
        "data that a program wrote without a file system. Compare it with a snapshot or a backup "
        "before anything else. Format nothing"
    )


def _blank(device: dict[str, Any], ledger: dict[str, Any] | None, mode: str, agent: bool) -> str:
    """It reads as empty. Whoever knows better decides: that is how a failing volume looks."""
    cluster = device["cluster"] or {"extents": "not_asked", "entry": None}
    volume = device["persistent_volume"] or {"says": ""}
    because = []
    if device["missing"]:
        because.append(f"held {device['missing']}")
    if volume["says"] == "content":
        because.append(f"its PersistentVolume {volume['name']} says that it holds data")
    emptied = cluster["extents"] == "none"
    if cluster["extents"] == "content":
        because.append("its cluster says that something was written to it")
    if because and emptied:
        return (
            f"It reads as empty, and {', '.join(because)}. Do not format it. Its cluster agrees "
            "that nothing is there, so it is not this node's view: most likely it was emptied (a "
            "discard, a restore, a new image). Look for its data in snapshots ('rbd snap ls') "
            "and in the backup, and ask its owner. Only if it was emptied on purpose: "
            f"{_BY_HAND}"
        )
    if because:
        return (
            f"It reads as empty, and {', '.join(because)}. Do not format it: most likely the data "
            f"is there, and this node does not see it. Look at {_TROUBLE}; {_compare(device)}. "
            f"When that shows the data, {_ANEW}"
        )
    entries = [each for each in (ledger, cluster["entry"]) if each]
    if not emptied and any(each["permitted"] for each in entries):
        return (
            "It reads as empty, but a format of it was permitted before, and nobody knows whether "
            "an mkfs began. Do not format it before its cluster says that nothing of it is "
            f"allocated ('rbd du', no snapshots) and its owner agrees; then: {_BY_HAND}"
        )
    if not agent:
        return (
            "Start the agent: it reads as empty, nothing that can be asked without an agent says "
            "otherwise, and only an agent asks the others too and permits a format. Format nothing "
            "by hand"
        )
    if device["cluster"] is None:
        return (
            "It reads as empty, and nobody has asked the other sources; the reason is above. "
            "Format nothing by hand; 'nodeagent volume guard status' says what the guard lacks"
            + (". Nothing refuses a format of it now" if mode == "off" else "")
        )
    return "The next attempt to write asks again. The reasons above say what it waits for"


def _blank_unwatched(device: dict[str, Any]) -> str:
    why = (
        f"it is a partition of {device['partition_of']}"
        if device["partition_of"]
        else "it is not among the devices that the guard examines (volumes.guard.names and drivers)"
    )
    return (
        f"It reads as empty, and it never gets a lease by itself: {why}. Nobody remembers what it "
        f"held: {_compare(device)}, and ask its owner. Only if it is certainly new: {_BY_HAND}"
    )


def _with_content(
    device: dict[str, Any],
    ledger: dict[str, Any] | None,
    denials: list[dict[str, Any]],
    mode: str,
    agent: bool,
) -> str:
    holds = _content(device["verdict"]) or device["verdict"]["verdict"]
    if device["changed_from"]:
        return (
            f"It held {device['changed_from']} and holds {holds} now: it was formatted, or another "
            f"image is mapped in its place. Stop its users and find out who did it; "
            f"{_compare(device)}. Only if that was intended: 'nodeagent volume ledger "
            f"--accept {device['volume']}'" + ("" if agent else " (it needs an agent)")
        )
    wanted = ""
    if denials:
        did = "The refused attempts above" if denials[-1]["denied"] else "The attempts above"
        wanted = (
            f". {did} mean another device, another type of file system or another "
            "PersistentVolume: correct that, and never allow the format"
        )
    if not device.get("watched", True) or not device["volume"]:
        return (
            f"Nothing to mend on it: it holds {holds}, and {_still_refused(mode)}. Nobody "
            f"remembers what it held before, so only its owner can say whether that is right"
            f"{wanted}"
        )
    if not any(
        _agrees(entry, device) for entry in (ledger, (device["cluster"] or {}).get("entry"))
    ):
        written = (
            "If a reason above says that it could not be written, mend that (is the state "
            "directory full, or read-only?); the agent writes it at its next look. "
            if agent
            else "An agent writes it down when it runs. "
        )
        return (
            f"It holds {holds}, which is not in the ledger yet, so nobody can say whether it is "
            f"what was there before. {written}Accept nothing and format nothing{wanted}"
        )
    return (
        f"Nothing: it holds what was last seen on it, {holds}, and {_still_refused(mode)}{wanted}"
    )


def _agrees(entry: dict[str, Any] | None, device: dict[str, Any]) -> bool:
    """A clone of an image carries its parent's entry, which says nothing of the clone."""
    return (
        entry is not None
        and entry["volume"] == device["volume"]
        and not entry["permitted"]
        and _content(entry) == _content(device["verdict"])
    )
