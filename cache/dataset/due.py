"""When a dataset looks at its source, fills and refreshes next, and the pauses after failures."""

import math
import random
import time

import kit.pause

LOOK_SECONDS = 30.0  # between two looks at a source that answers
RETRY_SECONDS = (5.0, 300.0)  # first and longest pause after a failure
PARTIAL_SECONDS = 900.0  # until entries that could not be copied, or did not fit, are tried again
# Between two mounts of a view that somebody unmounts again and again; none before the first.
REMOUNT_SECONDS = (1.0, 300.0)
QUIET_SECONDS = 900.0  # without a loss until the pauses begin anew
LONGEST_FIRST_LOOK = 60.0  # until the source of a dataset that was complete is looked at
# A refresh takes 1.5 us per cached name. At most this share of the time is spent on it.
REFRESH_SHARE = 0.05


class Due:
    """Times of the monotonic clock. A complete dataset needs no source and looks less often."""

    def __init__(self) -> None:
        self._look = self._check = self._fill = self._refresh = 0.0
        self._withdraw = 0.0
        self._looks = kit.pause.Backoff(*RETRY_SECONDS)
        self._withdrawals = kit.pause.Backoff(*RETRY_SECONDS)
        self._fills = kit.pause.Backoff(*RETRY_SECONDS)
        self._mount, self._lost = 0.0, -math.inf
        self._losses = kit.pause.Backoff(*REMOUNT_SECONDS)
        self.refresh_wanted = False
        self.fill_again = False  # room came while a fill is under way, for what it leaves out

    def patience(self, *, complete: bool) -> float:
        """Seconds until something is due, or a look would be."""
        now = time.monotonic()
        refresh = self._refresh if self.refresh_wanted else 0.0
        look = self._check if complete else self._look
        due = (look, self._fill, self._mount, self._withdraw, refresh)
        later = [at for at in due if at > now]
        return max(0.05, min(later, default=now + LOOK_SECONDS) - now)

    def look(self, *, complete: bool) -> bool:
        return time.monotonic() >= (self._check if complete else self._look)

    def fill(self) -> bool:
        return time.monotonic() >= self._fill

    def refresh(self) -> bool:
        return self.refresh_wanted and time.monotonic() >= self._refresh

    def mount(self) -> bool:
        return time.monotonic() >= self._mount

    def until_mount(self) -> float:
        """Seconds until a view that was lost may be mounted again."""
        return max(0.0, self._mount - time.monotonic())

    def lost(self) -> None:
        """Somebody has unmounted the view: it is mounted at once, and later each time again."""
        now = time.monotonic()
        if now - self._lost > QUIET_SECONDS:
            self._losses.reset()
            self._mount = now
        else:
            self._mount = now + self._losses.next()
        self._lost = now

    def first_check(self, interval: float) -> None:
        """After a start: not all datasets, nor all nodes, at once. inf: never."""
        first = random.uniform(0.0, min(LONGEST_FIRST_LOOK, interval))
        self._check = math.inf if math.isinf(interval) else time.monotonic() + first

    def looking(self) -> None:
        """A look is under way."""
        self._look = self._check = time.monotonic() + LOOK_SECONDS

    def answered(self, interval: float) -> None:
        """The source did; ``interval``: seconds to the next look of a complete dataset."""
        self._looks.reset()
        self._check = time.monotonic() + interval * random.uniform(0.9, 1.1)

    def failed(self) -> None:
        """An action failed: the next look comes after a growing pause."""
        self._look = self._check = time.monotonic() + self._looks.next()

    def suspect(self) -> None:
        """Look at the source soon."""
        self._look = 0.0

    def fill_later(self, seconds: float | None) -> None:
        """None: the next, longer pause after failures."""
        pause = self._fills.next() if seconds is None else seconds
        self._fill = time.monotonic() + pause

    def spread_fill(self, longest: float) -> None:
        """Many nodes do this at once: each at another moment."""
        self._fill = time.monotonic() + random.uniform(0.0, longest)
        self._fills.reset()

    def filled(self) -> None:
        """Without a failure of the whole pass."""
        self._fills.reset()

    def fill_soon(self) -> None:
        self._fill = 0.0
        self._fills.reset()

    def withdraw(self) -> bool:
        """Bad files may be withdrawn now."""
        return time.monotonic() >= self._withdraw

    def withdraw_later(self) -> None:
        """That failed: the next, longer pause."""
        self._withdraw = time.monotonic() + self._withdrawals.next()

    def withdrawn(self) -> None:
        """And are to be filled again."""
        self._withdraw = 0.0
        self._withdrawals.reset()
        self.fill_soon()

    def retry_now(self) -> None:
        """Earlier failures delay nothing any more."""
        self._look = 0.0
        self._looks.reset()
        self.withdrawn()

    def refreshed(self, least: float, took: float) -> None:
        self._refresh = time.monotonic() + max(least, took / REFRESH_SHARE)
