"""Whether what is stored can be believed: the store's troubles are counted, and files verified.

A file system that had I/O errors may have lost bytes that it had promised to be durable. So each
trouble of the disk gets a number, and a generation carries the number of the last trouble after
which all its files were verified (``Generation.verified``). One with a lower number is *suspect*:
it is not served until it is verified. Numbers, not times: clocks jump. A damaged file has lost the
number: then all that is stored is suspect.

An unclean shutdown of the node is counted too. It breaks no promise of a file system, so it raises
no doubt; the scrub only comes sooner (``Generation.crashes``).

Kept in ``state_dir``, because the disk in trouble may not keep it. Invariant: what is in memory is
at least as high as what is in the file, so a failing write may be tried again later.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import kit.formats

FORMAT = 1


@dataclass(frozen=True)
class Kept:
    """The file's fields."""

    troubles: int = 0
    crashes: int = 0
    boot: str = ""  # of the kernel that the agent ran on last
    clean: bool = True  # the agent ended before that kernel did
    errors: int | None = None  # that ext4 had counted at the last look; None: none was there


def file_of(state_dir: Path) -> Path:
    return state_dir / "cache-trust.json"


def load(path: Path) -> Kept | kit.formats.Damage | None:
    """As ``kit.formats.read``."""
    return kit.formats.read(path, FORMAT, _kept)


def _kept(fields: dict[str, Any]) -> Kept:
    """ValueError for what no agent wrote."""
    known = Kept.__dataclass_fields__
    found = Kept(**{key: value for key, value in fields.items() if key in known})
    fields["troubles"]  # without a number nothing may be believed
    errors = 0 if found.errors is None else found.errors
    for number in (found.troubles, found.crashes, errors):
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{number!r} is no count")
    if not isinstance(found.boot, str) or not isinstance(found.clean, bool):
        raise ValueError("its boot or clean has another type")
    return found


def save(path: str, fields: dict[str, object]) -> None:
    """Replace the file durably. In a child process: the disk may hang. OSError."""
    kit.formats.save(path, fields, FORMAT)


def begun(kept: Kept, boot: str) -> Kept:
    """At the agent's start: whether the node went down while an agent ran. Pure."""
    crashed = bool(kept.boot) and kept.boot != boot and not kept.clean
    return replace(kept, boot=boot, clean=False, crashes=kept.crashes + crashed)


def fields_of(kept: Kept) -> dict[str, object]:
    return asdict(kept)
