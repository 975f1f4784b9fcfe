"""What fills, evictions and verifies leave behind."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FillEnd:
    """Of the generation: its SSD bytes and inodes, and what is left to copy."""

    used: int
    left_files: int
    left_bytes: int
    shared: int = 0  # SSD bytes that the generation before has too
    shared_files: int = 0
    inodes: int = 0
    room: int = 0  # SSD bytes that are left; 0 when something of the share did not fit
    short: bool = False  # something of the share did not fit

    def record(self) -> dict[str, Any]:
        """What generation.json keeps of it."""
        kept = dataclasses.asdict(self)
        del kept["room"], kept["short"]
        return kept


@dataclass(frozen=True)
class EvictEnd:
    """``fill``: as after a fill."""

    fill: FillEnd
    share: int  # that fits
    beyond: int  # stored files that it takes out
    evicted: int  # files, or marks, that were taken out


@dataclass
class VerifyEnd:
    checked_files: int = 0
    checked_bytes: int = 0
    bad: int = 0
    not_compared: int = 0
    replaced: int = 0
    unreplaced: int = 0
    shared_files: int = 0  # that were not read, because another generation's scrub reads them
    also: dict[str, int] = field(default_factory=dict)  # bad ones of other generations, by folder

    def counts(self) -> dict[str, int]:
        """As the API has them."""
        shown = ("checked_files", "checked_bytes", "bad", "not_compared", "replaced")
        return {name: getattr(self, name) for name in shown}
