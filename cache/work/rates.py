"""How fast a job works, and how long it will take."""

from collections.abc import Sequence

MOST_POINTS = 60
_FIRST_STEP = 2.0
_SECONDS = 10.0  # rates are those of about the last ten seconds


class Rates:
    """Files and bytes per second, from samples of two counters."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, int]] = []

    def add(self, now: float, files: int, size: int) -> None:
        self._samples.append((now, files, size))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SECONDS:
            self._samples.pop(0)

    def per_second(self) -> tuple[float, float]:
        if len(self._samples) < 2:
            return 0.0, 0.0
        (t0, f0, b0), (t1, f1, b1) = self._samples[0], self._samples[-1]
        return ((f1 - f0) / (t1 - t0), (b1 - b0) / (t1 - t0)) if t1 > t0 else (0.0, 0.0)


class Trend:
    """The rate of a job from its beginning, in points that stand for equal times: at most
    MOST_POINTS, so that each stands for longer the longer the job takes."""

    def __init__(self) -> None:
        self._step = _FIRST_STEP  # seconds of a point
        self._points: list[float] = []
        self._last: tuple[float, int] | None = None

    def add(self, now: float, size: int) -> None:
        """``size``: bytes since the beginning."""
        if self._last is None:
            self._last = now, size
            return
        at, before = self._last
        steps = int((now - at) / self._step)
        if not steps:
            return
        # After a pause a point for each step of it, or the time would look shorter.
        self._points += [(size - before) / (now - at)] * min(steps, MOST_POINTS)
        self._last = now, size
        while len(self._points) > MOST_POINTS:
            pairs = (self._points[at : at + 2] for at in range(0, len(self._points), 2))
            self._points = [sum(pair) / len(pair) for pair in pairs]
            self._step *= 2

    def points(self) -> Sequence[float]:
        """Bytes per second, the oldest first."""
        return tuple(self._points)


def eta(left_files: int, left_bytes: int, rates: tuple[float, float]) -> float | None:
    """Seconds left by the slower of files and bytes, None when it cannot be estimated."""
    files, size = rates
    if files <= 0 or (left_bytes > 0 and size <= 0):
        return None
    return max(left_files / files, left_bytes / size if left_bytes > 0 else 0.0)
