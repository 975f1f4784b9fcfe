"""Which unpacked layers are doubted: kept in ``state_dir`` with the boot that they were found in.

Small, because a child process imports it to write the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kit.formats

STATE = "preheat-boot.json"  # in the state directory
FORMAT = 1
LOST = "lost"  # no boot has this id


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
    """HostError when a newer agent wrote it. After a damaged file it counts as another boot: what
    is not known to be durable is doubted."""
    found = kit.formats.read(path, FORMAT, _kept)
    if isinstance(found, kit.formats.Damage):
        return Kept(LOST)
    return Kept() if found is None else found


def _kept(fields: dict[str, Any]) -> Kept:
    boot, doubted = fields["boot"], list(fields["doubted"])
    if any(not isinstance(each, str) for each in (boot, *doubted)):
        raise ValueError("a name in it is no text")
    return Kept(boot, frozenset(doubted))


def save(path: str, boot: str, doubted: list[str]) -> None:
    """Replace the file durably. In a child process: the disk may hang. OSError."""
    kit.formats.save(path, {"boot": boot, "doubted": doubted}, FORMAT)
