"""What is shown of each image, and the reasons behind it."""

from dataclasses import dataclass, field
from typing import Any

# Every state an image can be in; also the label values of a metric.
STATES = (
    "looking",  # the registry is being asked
    "waiting",  # its turn, slot or window has not come
    "pulling",
    "unpacking",
    "ready",
    "paused",
    "skipped",  # does not fit: disk or pin budget
    "refused",  # private, and sharing was not allowed
    "failed",  # see failure; tried again at retry_at, if at all
    "released",  # let go by an operator
)


@dataclass(frozen=True)
class Status:
    """One image. Bytes are compressed bytes, as the registry serves them."""

    ref: str
    digest: str
    state: str
    pinned: bool
    bytes_total: int
    bytes_done: int
    by: str
    keep: str
    priority: int
    reason: str = ""
    image_id: str = ""
    bytes_missing: int = 0
    bytes_unpacked: int = 0  # on disk once unpacked
    failure_kind: str = ""
    attempts: int = 0
    retry_at: float | None = None
    in_use: bool = False
    last_used: float | None = None
    layers: tuple[dict[str, Any], ...] = field(default=())
    layers_unpacked: int = 0
    bytes_per_second: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "layers": list(self.layers)}
