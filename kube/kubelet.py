"""The kubelet's thresholds for its disks, from its own configuration.

The kubelet reads its file, gives it defaults, and merges the drop-ins (``*.conf`` in the order of
their names) into that, key by key (RFC 7386). A file with any ``evictionHard`` has no defaults for
the signals that it leaves out, unless ``mergeDefaultEvictionSettings`` is set.
"""

import decimal
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.errors
import kit.files
import kit.slips
from kube import settings

AVAILABLE, INODES = "imagefs.available", "imagefs.inodesFree"
NODEFS_AVAILABLE, NODEFS_INODES = "nodefs.available", "nodefs.inodesFree"
_DEFAULTS = {AVAILABLE: "15%", INODES: "5%", NODEFS_AVAILABLE: "10%", NODEFS_INODES: "5%"}
MOST_DROP_INS = 100
# Errors of a text that is not a KubeletConfiguration, beside OSError.
_NO_CONFIGURATION = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
# Its digits are bounded: a number of a million would be worked out, and fits nowhere.
_QUANTITY = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:[eE]\d{1,2})?)([KMGTPE]i?|k|m|)")
_MOST = 2**63 - 1  # that a quantity of Kubernetes has; what is more counts as that
_UNITS: dict[str, decimal.Decimal | int] = {"": 1, "k": 1000, "m": decimal.Decimal("0.001")}
_UNITS |= {f"{p}i": 1024 ** (n + 1) for n, p in enumerate("KMGTPE")}
_UNITS |= {p: 1000 ** (n + 1) for n, p in enumerate("KMGTPE")}


@dataclass(frozen=True)
class Limit:
    """A threshold as the kubelet has it: a share of the whole, or an amount."""

    share: float = 0.0
    amount: int = 0

    def of(self, whole: int) -> float:
        """As a share of ``whole``; 1 where the amount exceeds it."""
        return max(self.share, min(1.0, self.amount / whole) if whole else 0.0)


@dataclass(frozen=True)
class Thresholds:
    """Shares of the disk for garbage collection; what evictions must leave free.

    ``nodefs_free`` and ``nodefs_inodes`` are about the disk of the kubelet's own directory: they
    count where images are on that one. ``assumed``: nobody has said what the kubelet has.
    ``origin``: where they are from, for people.
    """

    gc_high: float
    gc_low: float
    free: tuple[Limit, ...]
    inodes: tuple[Limit, ...]
    assumed: bool
    nodefs_free: tuple[Limit, ...] = ()
    nodefs_inodes: tuple[Limit, ...] = ()
    origin: str = ""


def quantity(text: object) -> Limit:
    """``15%`` or ``500Gi`` as the kubelet writes them. Raises ValueError."""
    written = str(text).strip()
    if written.endswith("%"):
        share = float(written[:-1]) / 100
        if not 0 <= share <= 1:
            raise ValueError(f"{written!r} is no share of a whole")
        return Limit(share=share)
    match = _QUANTITY.fullmatch(written)
    if match is None:
        raise ValueError(f"{written!r} is neither a quantity like 500Gi nor a share like 15%")
    return Limit(amount=min(_MOST, int(decimal.Decimal(match[1]) * _UNITS[match[2]])))


def thresholds(section: settings.KubeletSettings) -> Thresholds:
    """What the kubelet's own files say, else its defaults. Blocking. Raises SettingsError."""
    if section.config is None:
        origin = "the kubelet's defaults, assumed: kubelet.config is not set"
        return of(defaulted({}), origin, assumed=True)
    path = section.config
    try:
        content = defaulted(_read(path))
        for path in _drop_ins(section.config_dir):
            content = _merged(content, _read(path))
        return of(content, str(section.config))
    except (OSError, *_NO_CONFIGURATION) as error:
        raise kit.errors.SettingsError(
            f"kubelet.config {path}",
            f"cannot be used ({error})",
            "name the kubelet's configuration file and drop-ins, or leave both out",
        ) from error


def of(content: Mapping[str, Any], origin: str, *, assumed: bool = False) -> Thresholds:
    """Of a KubeletConfiguration with its defaults; one of ``_NO_CONFIGURATION`` when it is none."""
    limits = [content.get(name) or {} for name in ("evictionHard", "evictionSoft")]
    high, low = (
        int(content[key]) / 100
        for key in ("imageGCHighThresholdPercent", "imageGCLowThresholdPercent")
    )
    free, inodes, nodefs_free, nodefs_inodes = (
        tuple(quantity(each[signal]) for each in limits if signal in each)
        for signal in (AVAILABLE, INODES, NODEFS_AVAILABLE, NODEFS_INODES)
    )
    return Thresholds(
        *(high, min(low, high), free, inodes, assumed),
        nodefs_free=nodefs_free,
        nodefs_inodes=nodefs_inodes,
        origin=origin,
    )


def _read(path: Path) -> dict[str, Any]:
    content = kit.slips.load_yaml(kit.files.read_small(path)) or {}
    if not isinstance(content, dict):
        raise ValueError("it is not a mapping")
    return content


def defaulted(content: dict[str, Any]) -> dict[str, Any]:
    """With the kubelet's defaults for what is used here."""
    found: dict[str, Any] = {"imageGCHighThresholdPercent": 85, "imageGCLowThresholdPercent": 80}
    found |= {key: value for key, value in content.items() if value is not None}
    hard = found.get("evictionHard")
    if not hard or found.get("mergeDefaultEvictionSettings"):
        found["evictionHard"] = _DEFAULTS | (hard or {})
    return found


def _drop_ins(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        found = sorted(path for path in folder.rglob("*.conf") if path.is_file())
        if len(found) > MOST_DROP_INS:
            raise ValueError(f"{folder} has more than {MOST_DROP_INS} files")
        yield from found


def _merged(base: Any, patch: Any) -> Any:
    """RFC 7386: mappings are merged, null deletes, anything else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    found = dict(base) if isinstance(base, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found
