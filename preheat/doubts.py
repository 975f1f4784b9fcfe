"""Which unpacked layers are doubted: kept in ``state_dir`` with the boot that they were found in.

Small, because a child process imports it to write the file.
"""

from dataclasses import dataclass
from pathlib import Path

import kit.formats

STATE = "preheat-boot.json"  # in the state directory
FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """The file's fields. ``doubted``: chain ids."""

    boot: str = ""
    doubted: frozenset[str] = frozenset()


def begun(kept: Kept, boot: str, loose: frozenset[str]) -> Kept:
    """What is doubted in this boot. Pure.

    ``loose``: layers that are not known to be durable. An agent that never ran here before knows
    nothing of them, and does not unpack all images of the node again.
    """
    if kept.boot == boot:
        return kept
    return Kept(boot, kept.doubted | loose if kept.boot else frozenset())


def load(path: Path) -> Kept:
    """HostError when a newer agent wrote it. A missing or damaged file is as none."""
    found = kit.formats.load(path, FORMAT)
    try:
        return Kept(str(found["boot"]), frozenset(map(str, found["doubted"])))
    except (TypeError, KeyError):
        return Kept()


def save(path: str, boot: str, doubted: list[str]) -> None:
    """Replace the file durably. In a child process: the disk may hang. OSError."""
    kit.formats.save(path, {"boot": boot, "doubted": doubted}, FORMAT)
