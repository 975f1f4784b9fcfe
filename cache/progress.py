"""How far a pass is, how fast, and when it will be done. Pure."""

import time
from dataclasses import dataclass, field
from typing import Any

# The rate is that of about the last so many seconds.
_WINDOW_SECONDS = 10.0


@dataclass
class Progress:
    """Fed with the progress events of a pass."""

    phase: str = ""
    files_total: int = 0
    bytes_total: int = 0
    files_done: int = 0
    bytes_done: int = 0
    failed: int = 0
    skipped: int = 0
    used: int = 0
    commits: int = 0
    estimated: bool = True
    _samples: list[tuple[float, int, int]] = field(default_factory=list)

    def restart(self) -> None:
        """Another pass begins: its counters start from nothing."""
        self._samples.clear()
        self.commits = 0
        self.phase = ""

    def take(self, event: dict[str, Any], now: float | None = None) -> bool:
        """Take one event; whether something was committed since the last."""
        now = time.monotonic() if now is None else now
        committed: bool = event["commits"] != self.commits
        for key in ("phase", "files_total", "bytes_total", "files_done", "bytes_done", "failed",
                    "skipped", "used", "commits"):  # fmt: skip
            setattr(self, key, event[key])
        self._samples.append((now, event["copied_files"], event["copied_bytes"]))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_SECONDS:
            self._samples.pop(0)
        return committed

    def rates(self) -> tuple[float, float]:
        """Files and bytes per second."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (t0, f0, b0), (t1, f1, b1) = self._samples[0], self._samples[-1]
        return ((f1 - f0) / (t1 - t0), (b1 - b0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)

    def eta(self) -> float | None:
        """Seconds left by the slower of files and bytes; None when nobody can tell."""
        files, size = self.rates()
        left_files = self.files_total - self.files_done
        left_bytes = self.bytes_total - self.bytes_done
        if files <= 0 or (left_bytes > 0 and size <= 0):
            return None
        return max(left_files / files, left_bytes / size if left_bytes > 0 else 0.0)
