"""Which lines of the logs matter: the pattern file, and the recent hits of its patterns.

Hits are counted, joined to devices, and forgotten after ``hold``; what the kernel says once of a
mounted file system (``lasts``) is kept until that is unmounted. Invariant: of each log at most
``quota`` different hits are kept: the graver ones, then those that came first, so that a flood does
not change them all the time. A log that has more is flooding. No log's hits cost another's.
"""

import dataclasses
import importlib.resources
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, Field, field_validator, model_validator

import kit.errors
import kit.files
import kit.settings
import kit.slips
from linux import kmsg
from volumes.audit.inventory.model import Inventory
from volumes.audit.logs.matcher import Expression, Hit
from volumes.audit.types import KERNEL, LogHit, Severity

_MOST_PATTERNS = 200
_LONGEST_REGEX = 2000
_MOST_OF_KERNEL = 200
_MOST_OF_A_LOG = 25  # with all 32 sources of the settings no more than the reporter takes
_MOST_TIMES = 1000  # of one hit
_WEIGHT = {severity: weight for weight, severity in enumerate(Severity)}
MAPPING = "dm-"  # with what the kernel's name of a mapping begins
_KEY = ("device", "image", "pod", "volume", "path")

Key = tuple[str, ...]


_id = kit.settings.matching(
    r"[a-z0-9][a-z0-9-]{0,50}", "an id: use lower-case letters, digits and '-'"
)


Times = Annotated[int, Field(ge=1, le=1000)]
Within = Annotated[float, Field(ge=1, le=86400)]  # seconds


class Pattern(kit.settings.Section):
    """One kind of line. The head of patterns.yaml explains the fields."""

    id: Annotated[str, AfterValidator(_id)]
    source: Literal["kernel", "userspace"]
    anchor: str = Field(min_length=3)
    regex: str = Field(max_length=_LONGEST_REGEX)
    printed_by: str = ""
    severity: Severity
    meaning: str
    advice: str
    at_least: tuple[Times, Within] = (1, 3600.0)
    hint: Literal["", "unmap-failed", "busy"] = ""
    lasts: bool = False
    examples: tuple[str, ...] = ()
    near_misses: tuple[str, ...] = ()

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str) -> str:
        value = kmsg.IO_ERRORS.get(value, value)
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _examples_hold(self) -> "Pattern":
        compiled = re.compile(self.regex)
        for example in self.examples:
            if self.anchor not in example or not compiled.search(example):
                raise ValueError(f"does not match its own example {example!r}")
        return self


def built_in() -> tuple[Pattern, ...]:
    """The patterns that come with the agent."""
    file = importlib.resources.files(__package__) / "patterns.yaml"
    return _parse(file.read_text(encoding="utf-8"), "patterns.yaml")


Stamp = tuple[int, int, int] | None  # another one when the operator's file is another one


@dataclass(frozen=True)
class PatternFile:
    """All patterns, and the ``stamp`` of the operator's file before it was read."""

    by_id: Mapping[str, Pattern] = field(default_factory=dict)
    stamp: Stamp = None


def read(own: Path | None) -> PatternFile:
    """As ``load``."""
    before = stamp(own)
    return PatternFile({pattern.id: pattern for pattern in load(own)}, before)


def stamp(own: Path | None) -> Stamp:
    """None: there is none, or it cannot be seen."""
    try:
        status = own.stat() if own is not None else None
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if status is not None else None


def load(own: Path | None) -> tuple[Pattern, ...]:
    """The built-in patterns and the operator's. SettingsError names the file and the pattern."""
    patterns = {pattern.id: pattern for pattern in built_in()}
    if own is not None:
        try:
            text = kit.files.read_small(own).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise kit.errors.SettingsError(
                f"volumes.audit.logs.patterns {own}", f"cannot be read ({error})", "mount it there"
            ) from error
        patterns |= {pattern.id: pattern for pattern in _parse(text, str(own))}
    if len(patterns) > _MOST_PATTERNS:
        raise kit.errors.SettingsError(
            str(own),
            f"{len(patterns)} patterns, built-in ones included",
            f"use at most {_MOST_PATTERNS}",
        )
    return tuple(patterns.values())


def _parse(text: str, origin: str) -> tuple[Pattern, ...]:
    try:
        entries = kit.slips.load_yaml(text) or []
    except ValueError as error:
        raise kit.errors.SettingsError(origin, str(error), "correct it") from error
    if not isinstance(entries, list):
        raise kit.errors.SettingsError(origin, "it is not a list of patterns", "see docs/audit.md")
    found = []
    for number, entry in enumerate(entries, 1):
        name = entry.get("id", f"pattern {number}") if isinstance(entry, dict) else f"{number}"
        try:
            found.append(Pattern.model_validate(entry))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise kit.errors.SettingsError(
                f"{origin}: {name}",
                f"{where}: {first['msg'].removeprefix('Value error, ')}",
                "correct it; docs/audit.md lists the fields",
            ) from error
    return tuple(found)


def expressions(patterns: Iterable[Pattern]) -> tuple[Expression, ...]:
    """The part of the patterns that the log child needs."""
    return tuple(Expression(p.id, p.source, p.anchor, p.regex) for p in patterns)


# -- recent hits -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatternHits:
    recent: Mapping[Key, LogHit] = field(default_factory=dict)
    # When lines came, and how many: for patterns that must match often to count.
    times: Mapping[Key, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    # Source -> when it last had more different hits than are kept.
    flooding: Mapping[str, float] = field(default_factory=dict)
    # What the mounted device was attached as when it was first looked at after its line. Empty:
    # since then it was unmounted or is another one, so a line that lasts is over.
    on: Mapping[Key, tuple[object, ...]] = field(default_factory=dict)


def quota(source: str) -> int:
    """The most different hits that are kept of a log."""
    return _MOST_OF_KERNEL if source == KERNEL else _MOST_OF_A_LOG


def note(
    hits: PatternHits,
    found: Sequence[Hit],
    patterns: Mapping[str, Pattern],
    now: float,
    hold: float,
) -> PatternHits:
    """``hits`` with what the log child found, and without what is older than ``hold``."""
    lasting = {pattern.id for pattern in patterns.values() if pattern.lasts}
    on = dict(hits.on)
    recent = {
        key: hit
        for key, hit in hits.recent.items()
        if now - hit.last < hold or (hit.pattern in lasting and on.get(key) != ())
    }
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
        on.pop(key, None)
    flooding = {source: at for source, at in hits.flooding.items() if now - at < hold}
    for source in {hit.source for hit in recent.values()}:
        keys = [key for key, hit in recent.items() if hit.source == source]
        keys.sort(key=lambda k: (-_WEIGHT[recent[k].severity], recent[k].first))
        for key in keys[quota(source) :]:
            del recent[key]
            flooding[source] = now
    times = {key: seen for key, seen in times.items() if seen and key in recent}
    on = {key: device for key, device in on.items() if key in recent}
    return PatternHits(recent, times, flooding, on)


def unmounted(hits: PatternHits, inventory: Inventory | None) -> PatternHits:
    """``hits`` with the word which are over: their file system is no longer mounted, or on another
    device."""
    if inventory is None:
        return hits
    on = dict(hits.on)
    for key, hit in hits.recent.items():
        if inventory.taken > hit.last:
            now = inventory.file_systems.get(hit.device, ())
            if on.setdefault(key, now) != now:
                on[key] = ()
    return dataclasses.replace(hits, on=on)


def frequent(hits: PatternHits, patterns: Mapping[str, Pattern]) -> tuple[LogHit, ...]:
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


def join(
    hits: Iterable[LogHit], inventory: Inventory | None, drivers: Sequence[str]
) -> tuple[LogHit, ...]:
    """Fill in the device of hits that name only a path, a volume, an image, or what lies on the
    device (a mapping, a partition). Without what names a mapping of others."""
    devices = inventory.devices if inventory is not None else ()
    owners = {layer.name: device.name for device in devices for layer in device.layers}
    found = []
    for hit in hits:
        owner = owners.get(hit.device, hit.device)
        if owner.startswith(MAPPING) and "device-mapper" not in drivers:
            continue
        if not owner and inventory is not None:
            owner = _device(hit, inventory)
        found.append(dataclasses.replace(hit, device=owner))
    return tuple(found)


def _device(hit: LogHit, inventory: Inventory) -> str:
    for volume in inventory.volumes:
        names = {volume.handle, volume.name, volume.staging} - {""}
        image = volume.image.spec if volume.image else ""
        if hit.volume in names or (hit.image and hit.image == image):
            return volume.device
    for device in inventory.devices:
        if hit.image and device.image and device.image.spec == hit.image:
            return device.name
        for place in inventory.on_host(device):
            if hit.volume.startswith("/") and place.target == hit.volume:
                return device.name
    for volume in inventory.volumes:  # a pod may have several
        if hit.pod_uid and any(p.pod_uid == hit.pod_uid and p.mounted for p in volume.publishes):
            return volume.device
    return ""
