"""Time windows of the UTC day in which pulls may start, and turns that count in them. Pure."""

from collections.abc import Iterator, Sequence

MINUTE, DAY = 60, 86400
# How far a turn is sought; of what has passed, half as many days count.
MOST_DAYS = 400


def _spans(windows: Sequence[str]) -> list[tuple[int, int]]:
    """The windows as seconds of the day; one that crosses midnight ends after it."""
    found = []
    for window in windows:
        hours = [time.split(":") for time in window.split("-")]
        start, end = ((int(hour) * 60 + int(past)) * MINUTE for hour, past in hours)
        found.append((start, end if end > start else end + DAY))
    return sorted(found)


def _is_whole_day(spans: Sequence[tuple[int, int]]) -> bool:
    reached = 0
    every = sorted([*spans, *((start - DAY, end - DAY) for start, end in spans)])
    for start, end in every:
        if start > reached:
            return False
        reached = max(reached, end)
    return reached >= DAY


def intervals(windows: Sequence[str], since: float) -> Iterator[tuple[float, float]]:
    """When pulls may start, from the interval that holds ``since`` or the next one on, joined where
    windows touch. Unix times."""
    spans = _spans(windows)
    midnight = since // DAY * DAY
    begin = end = 0.0
    for day in range(-1, MOST_DAYS):
        for start, stop in spans:
            first, last = midnight + day * DAY + start, midnight + day * DAY + stop
            if first <= end:
                end = max(end, last)
                continue
            if end > since:
                yield begin, end
            begin, end = first, last


def turn(windows: Sequence[str], since: float, offset: float, now: float) -> float:
    """The first time from ``now`` on at which a turn has come.

    It comes when ``offset`` seconds have passed since ``since`` in which windows were open. Nor
    does it come sooner after an opening than the offset, modulo the window: who missed a turn in
    the window before would else start with all others at the moment that the next one opens.
    """
    spans = _spans(windows)
    if not spans or _is_whole_day(spans):
        return max(now, since + offset)
    passed, offset = 0.0, round(offset, 3)  # Unix time as a float has less than a microsecond
    for begin, end in intervals(windows, max(since, now - MOST_DAYS / 2 * DAY)):
        opened = max(begin, since)
        at = max(opened + max(0.0, offset - passed), now)
        if since <= begin:
            at = max(at, begin + offset % (end - begin))
        if at < end:
            return at
        passed += end - opened
    return now + MOST_DAYS * DAY
