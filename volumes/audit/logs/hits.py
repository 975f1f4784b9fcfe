"""What the logs said lately: counted, joined to devices, forgotten in time. Pure.

Invariant: at most ``MOST`` different things are kept; of more the oldest go and are counted.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from volumes.inventory.model import Inventory
from volumes.logs.patterns import Pattern
from volumes.rules.base import LogHit

MOST = 300


@dataclass(frozen=True)
class Book:
    hits: Mapping[tuple[str, ...], LogHit] = dataclasses.field(default_factory=dict)
    times: Mapping[tuple[str, ...], tuple[tuple[float, int], ...]] = dataclasses.field(
        default_factory=dict
    )  # when, how many: for patterns that must come often
    forgotten: int = 0


def note(
    book: Book,
    found: Sequence[Mapping[str, Any]],
    patterns: Mapping[str, Pattern],
    now: float,
    hold: float,
) -> Book:
    """The book after new hits of the log child, and without what is older than ``hold``."""
    hits = {key: hit for key, hit in book.hits.items() if now - hit.last < hold}
    times = {
        key: tuple((t, n) for t, n in seen if now - t < patterns[key[0]].at_least[1])
        for key, seen in book.times.items()
        if key[0] in patterns
    }
    for raw in found:
        pattern = patterns.get(raw["pattern"])
        if pattern is None:
            continue
        groups = raw["groups"]
        key = (raw["pattern"], raw["source"], *(groups.get(g, "") for g in _KEY))
        known = hits.get(key)
        hits[key] = LogHit(
            pattern=pattern.id,
            severity=pattern.severity,
            source=raw["source"],
            text=raw["text"],
            first=known.first if known else now,
            last=now,
            count=(known.count if known else 0) + raw["count"],
            meaning=pattern.meaning,
            advice=pattern.advice,
            device=groups.get("device", ""),
            image=groups.get("image", ""),
            pod_uid=groups.get("pod", ""),
            volume=groups.get("volume", "") or groups.get("path", ""),
            pid=int(groups.get("pid", 0)),
            hint=pattern.hint,
        )
        times[key] = (*times.get(key, ()), (now, raw["count"]))[-1000:]
    times = {key: seen for key, seen in times.items() if seen and key in hits}
    gone = sorted(hits, key=lambda k: hits[k].last)[: max(0, len(hits) - MOST)]
    for key in gone:
        del hits[key]
    return Book(hits, times, book.forgotten + len(gone))


_KEY = ("device", "image", "pod", "volume", "path")


def telling(book: Book, patterns: Mapping[str, Pattern]) -> tuple[LogHit, ...]:
    """Hits that came as often as their pattern asks for."""
    found = []
    for key, hit in book.hits.items():
        pattern = patterns.get(hit.pattern)
        if pattern is None:
            continue
        came = sum(count for _, count in book.times.get(key, ()))
        enough = pattern.at_least[0] == 1 or came >= pattern.at_least[0]
        if enough:
            found.append(hit)
    return tuple(found)


def join(hits: Iterable[LogHit], inventory: Inventory | None) -> tuple[LogHit, ...]:
    """Fill in the device that a path, a volume or an image stands for."""
    if inventory is None:
        return tuple(hits)
    return tuple(
        dataclasses.replace(hit, device=_device(hit, inventory)) if not hit.device else hit
        for hit in hits
    )


def _device(hit: LogHit, inventory: Inventory) -> str:
    for volume in inventory.volumes:
        names = {volume.handle, volume.name, volume.staging} - {""}
        image = volume.image.spec if volume.image else ""
        if hit.volume in names or (hit.image and hit.image == image):
            return volume.device
        if hit.pod_uid and any(p.pod_uid == hit.pod_uid and p.mounted for p in volume.publishes):
            return volume.device
    for device in inventory.devices:
        if hit.image and device.image and device.image.spec == hit.image:
            return device.name
        for place in inventory.on_host(device):
            if hit.volume.startswith("/") and place.target == hit.volume:
                return device.name
    return ""
