"""Recent hits in the logs: counted, joined to devices, and forgotten after ``hold``. Pure.

Invariant: at most ``MOST`` different hits are kept; beyond that the oldest are dropped.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from volumes.audit.inventory.model import Inventory
from volumes.audit.logs import matcher
from volumes.audit.logs.patterns import Pattern
from volumes.audit.types import LogHit

MOST = 300
_MOST_TIMES = 1000  # of one hit
_KEY = ("device", "image", "pod", "volume", "path")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Hits:
    recent: Mapping[Key, LogHit] = dataclasses.field(default_factory=dict)
    # When lines came, and how many: for patterns that must match often to count.
    times: Mapping[Key, tuple[tuple[float, int], ...]] = dataclasses.field(default_factory=dict)


def note(
    hits: Hits,
    found: Sequence[matcher.Hit],
    patterns: Mapping[str, Pattern],
    now: float,
    hold: float,
) -> Hits:
    """``hits`` with what the log child found, and without what is older than ``hold``."""
    recent = {key: hit for key, hit in hits.recent.items() if now - hit.last < hold}
    times = {
        key: tuple((t, n) for t, n in seen if now - t < patterns[key[0]].at_least[1])
        for key, seen in hits.times.items()
        if key[0] in patterns
    }
    for each in found:
        pattern = patterns.get(each.pattern)
        if pattern is None:
            continue
        groups = each.groups
        key = (each.pattern, each.source, *(groups.get(name, "") for name in _KEY))
        known = recent.get(key)
        recent[key] = LogHit(
            pattern=pattern.id,
            severity=pattern.severity,
            source=each.source,
            text=each.text,
            first=known.first if known else now,
            last=now,
            count=(known.count if known else 0) + each.count,
            meaning=pattern.meaning,
            advice=pattern.advice,
            device=groups.get("device", ""),
            image=groups.get("image", ""),
            pod_uid=groups.get("pod", ""),
            volume=groups.get("volume", "") or groups.get("path", ""),
            pid=int(groups.get("pid", 0)),
            hint=pattern.hint,
        )
        times[key] = (*times.get(key, ()), (now, each.count))[-_MOST_TIMES:]
    times = {key: seen for key, seen in times.items() if seen and key in recent}
    for key in sorted(recent, key=lambda k: recent[k].last)[: max(0, len(recent) - MOST)]:
        del recent[key]
    return Hits(recent, times)


def frequent(hits: Hits, patterns: Mapping[str, Pattern]) -> tuple[LogHit, ...]:
    """Hits that came as often as their pattern requires (``at_least``)."""
    found = []
    for key, hit in hits.recent.items():
        pattern = patterns.get(hit.pattern)
        if pattern is None:
            continue
        count = sum(count for _, count in hits.times.get(key, ()))
        if pattern.at_least[0] == 1 or count >= pattern.at_least[0]:
            found.append(hit)
    return tuple(found)


def join(hits: Iterable[LogHit], inventory: Inventory | None) -> tuple[LogHit, ...]:
    """Fill in the device of hits that name only a path, a volume or an image."""
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
