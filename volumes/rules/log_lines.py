"""Findings that come straight from log lines; the rule's name is ``log-`` and the pattern's id."""

from volumes.rules.base import LogHit, Scene, Trouble

PREFIX = "log-"


def troubles(scene: Scene) -> list[tuple[str, LogHit, Trouble]]:
    """(rule name, hit, trouble) for each hit."""
    found = []
    for hit in scene.logs:
        about = hit.device or hit.image or hit.volume or hit.pod_uid or hit.source
        device = scene.inventory.device(hit.device) if scene.inventory and hit.device else None
        evidence = {
            "line": hit.text[:500],
            "source": hit.source,
            "times": str(hit.count),
            "image": hit.image or (device.image.spec if device and device.image else ""),
            "pod_uid": hit.pod_uid,
            "volume": hit.volume,
        }
        if device is not None and scene.inventory is not None:
            volume = scene.inventory.volume_of(device)
            if volume is not None:
                evidence["volume"] = volume.name or volume.handle
                evidence["pods"] = ", ".join(p.pod_uid for p in volume.publishes[:4])
        trouble = Trouble(
            subject=about,
            device=hit.device,
            pid=hit.pid,
            severity=hit.severity,
            message=f"{hit.meaning}: {hit.text[:200]}",
            advice=hit.advice,
            evidence={name: value for name, value in evidence.items() if value},
        )
        found.append((PREFIX + hit.pattern, hit, trouble))
    return found
