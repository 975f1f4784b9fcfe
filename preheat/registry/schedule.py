"""When this node asks a registry: look-ups, refreshes, pulls and retries. Pure but for its memory.

Thousands of nodes decide the same things in the same minute, and none knows of the others. So each
takes its own moment from a hash of its name and the image, and retries vary at random.

``spread`` is the least time over which the fleet starts something. Where ``fleet`` says how many
nodes there are, the time grows until the registry is expected to have at most ``per_registry`` of
them at a time: with n nodes that each keep it busy for d seconds over a span s, n * d / s are there
at once. Look-ups of new images, refreshes and pulls each have their part of ``per_registry``.

A turn is an offset in seconds. It counts while pulls are allowed (``windows``), from the moment
that set the fleet going: the settings named the image, a window opened, or the registry is back.

The agent and the simulation of a fleet (tests/bench/fleet.py) use this module.
"""

import dataclasses
import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from preheat import settings
from preheat.image import manifest
from preheat.registry import failure
from preheat.registry.failure import Kind, PullError

# Time windows of the UTC day in which pulls may start, and turns that count in them. Pure.

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


def window_intervals(windows: Sequence[str], since: float) -> Iterator[tuple[float, float]]:
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


def turn_in_windows(windows: Sequence[str], since: float, offset: float, now: float) -> float:
    """The first time from ``now`` on at which a turn has come.

    It comes when ``offset`` seconds have passed since ``since`` in which windows were open. Nor
    does it come sooner after an opening than the offset, modulo the window: who missed a turn in
    the window before would else start with all others at the moment that the next one opens.
    """
    spans = _spans(windows)
    if not spans or _is_whole_day(spans):
        return max(now, since + offset)
    passed, offset = 0.0, round(offset, 3)  # Unix time as a float has less than a microsecond
    for begin, end in window_intervals(windows, max(since, now - MOST_DAYS / 2 * DAY)):
        opened = max(begin, since)
        at = max(opened + max(0.0, offset - passed), now)
        if since <= begin:
            at = max(at, begin + offset % (end - begin))
        if at < end:
            return at
        passed += end - opened
    return now + MOST_DAYS * DAY


# What one look-up keeps a registry busy: a few small requests over a wide-area network.
LOOKUP_SECONDS = 0.25
# The parts of ``per_registry``; together 1.
FIRST_PART, REFRESH_PART, PULL_PART = 0.2, 0.2, 0.6
# Refreshes vary by so much of their period, so that two nodes do not meet each time.
REFRESH_JITTER = 0.1
# After a registry was away for so long, the turns of the fleet count from its return.
OUTAGE_SECONDS = 120.0


def share(node: str, ref: str, what: str = "") -> float:
    """This node's own place for ``ref``, in [0, 1): the same each time, even over all nodes."""
    key = hashlib.sha256(f"{node}\n{ref}\n{what}".encode()).digest()
    return int.from_bytes(key[:8], "big") / 2**64


@dataclass
class _Image:
    registry: str  # its host
    since: float  # Unix time at which the settings named it
    urgent: bool = False  # an operator waits for it
    digest: str = ""  # of the latest look-up
    seen: float = 0.0  # when a refresh found this digest; 0 for the first look-up's
    answered: bool = False
    present: bool = False
    seconds: float | None = None  # how long its pull takes; None: not known


@dataclass
class _Registry:
    down_since: float = 0.0  # Unix time of the first failure in a row; 0 when it answers
    back_at: float = 0.0  # when it answered again after an outage
    rests_until: float = 0.0  # it asked for fewer requests


@dataclass
class Schedule:
    """One node's turns. ``now`` is Unix time everywhere; ``jitter`` gives numbers in [0, 1)."""

    section: settings.PreheatSettings
    jitter: Callable[[], float] = random.random
    _images: dict[str, _Image] = field(default_factory=dict)
    _registries: dict[str, _Registry] = field(default_factory=dict)
    _hurried: set[str] = field(default_factory=set)  # since the last ``want``

    # --- what happens -----------------------------------------------------------------------------

    def want(self, refs: Mapping[str, bool], now: float) -> None:
        """Exactly these images are requested. True: an operator waits for it."""
        for gone in self._images.keys() - refs.keys():
            del self._images[gone]
        for ref, urgent in refs.items():
            if ref not in self._images:
                host = manifest.parse(ref).host
                self._images[ref] = _Image(host, now, urgent or ref in self._hurried)
        self._hurried.clear()
        used = {image.registry for image in self._images.values()}
        self._registries = {host: self._registries.get(host, _Registry()) for host in used}

    def anew(self, ref: str, now: float) -> None:
        """The settings of an image changed: its turn counts from now."""
        image = self._images.get(ref)
        if image is not None:
            self._images[ref] = _Image(image.registry, now)

    def hurry(self, ref: str) -> None:
        """An operator asks for it: nothing waits for its turn."""
        self._hurried.add(ref)
        image = self._images.get(ref)
        if image is not None:
            image.urgent = True

    def answered(self, ref: str, now: float) -> None:
        """The registry answered a look-up or a pull of ``ref``."""
        image = self._images.get(ref)
        if image is not None:
            self._is_up(image, now)

    def measured(self, ref: str, digest: str, fetch: int, present: bool, now: float) -> None:
        """What a look-up found, and how many bytes of it this node lacks."""
        image = self._images.get(ref)
        if image is None:
            return
        image.present = present
        if digest and image.digest != digest:
            image.seen = now if image.digest else 0.0
            image.urgent = image.urgent and not image.digest
            image.digest, image.seconds = digest, None
        fleet, own = self.section.fleet, self.section.bytes_per_second
        rate = min(fleet.bytes_per_second if fleet else math.inf, own or math.inf)
        image.seconds = max(image.seconds or 0.0, fetch / rate)

    def failed(
        self, ref: str, error: PullError, attempts: int, now: float, *, pull: bool = False
    ) -> failure.PullFailure:
        """The failure of a look-up or a ``pull``, with its retry after ``attempts`` in a row."""
        image = self._images.get(ref)
        if image is None:
            return failure.after(error, attempts, now, jitter=self.jitter)
        registry = self._registry(image)
        span = self._first_span(image)
        found = failure.after(error, attempts, now, span, self.jitter)
        if error.kind in (Kind.NETWORK, Kind.BUSY):
            registry.down_since = registry.down_since or now
            if pull and now - registry.down_since >= OUTAGE_SECONDS:
                # Look-ups find out when it is back, with less. Pulls of the fleet that only tried
                # again would all be there with it.
                wait = self._pull_span(image) * (0.5 + self.jitter())
                found = dataclasses.replace(found, retry_at=max(found.retry_at or 0.0, now + wait))
            if error.kind is Kind.BUSY or error.wait is not None:
                registry.rests_until = max(registry.rests_until, found.retry_at or 0.0)
        elif error.kind in (Kind.NOT_FOUND, Kind.AUTH, Kind.BAD_IMAGE):
            self._is_up(image, now)
        return found

    def _is_up(self, image: _Image, now: float) -> None:
        registry = self._registry(image)
        if registry.down_since and now - registry.down_since >= OUTAGE_SECONDS:
            registry.back_at = now
        registry.down_since = 0.0
        image.answered = True

    def _registry(self, image: _Image) -> _Registry:
        return self._registries.setdefault(image.registry, _Registry())

    # --- when -------------------------------------------------------------------------------------

    def lookup_at(
        self, ref: str, answered_at: float, *, fixed: bool, failed: failure.PullFailure | None
    ) -> float:
        """When to look up ``ref``. ``answered_at``: Unix time of the last answer, 0 without one;
        ``fixed``: by digest and known, so that it cannot change."""
        image = self._images[ref]
        if failed is not None:
            # Its own failure, then the whole registry's.
            at = math.inf if failed.retry_at is None else failed.retry_at
        elif not answered_at:
            if image.urgent:
                return 0.0
            at = image.since + self._share(ref) * self._first_span(image)
        elif fixed:
            return math.inf
        else:
            at = self._next_refresh(ref, image, answered_at)
        return max(at, self._registry(image).rests_until)

    def pull_at(self, ref: str, now: float, *, begun: bool) -> float:
        """When a pull that the settings request may start; not before ``now`` in a window.

        ``begun``: some of it is here already. Such a pull waits only for what set the whole fleet
        going: a window that opened, a registry that is back.
        """
        image = self._images.get(ref)
        if image is None or image.urgent:
            return now
        registry, allowed = self._registry(image), self.section.windows
        span = self._pull_span(image)
        since, offset = image.since, self._share(ref) * span
        if image.seen:
            # Refreshes are spread over their period already.
            even = not allowed and self._refresh_period(image) >= span
            since, offset = image.seen, 0.0 if even else self._share(ref, image.digest) * span
        if registry.back_at > since:
            since, offset = registry.back_at, self._share(ref) * span
        elif begun:
            since -= offset
        at = max(now, registry.rests_until)
        return turn_in_windows(allowed, since, offset, at)

    def standing(self, ref: str, failed: failure.PullFailure | None) -> failure.PullFailure | None:
        """The failure, unless the registry came back since: the pull then waits for its turn."""
        image = self._images.get(ref)
        if image is None or failed is None or failed.kind not in (Kind.NETWORK, Kind.BUSY):
            return failed
        return None if failed.at < self._registry(image).back_at else failed

    def _share(self, ref: str, what: str = "") -> float:
        return share(self.section.this_node.name, ref, what)

    # --- spans ------------------------------------------------------------------------------------

    def _span(self, seconds: float, part: float) -> float:
        """Over how long the fleet starts work that keeps a registry busy for ``seconds`` a node."""
        fleet = self.section.fleet
        if fleet is None:
            return self.section.spread
        return max(self.section.spread, fleet.nodes * seconds / (fleet.per_registry * part))

    def _beside(self, image: _Image) -> list[_Image]:
        return [each for each in self._images.values() if each.registry == image.registry]

    def _first_span(self, image: _Image) -> float:
        """Images that the settings named together share the span."""
        every = self._beside(image)
        waiting = [each.since for each in every if not each.answered]
        first = min([image.since, *waiting])
        count = sum(each.since >= first for each in every)
        return self._span(count * LOOKUP_SECONDS, FIRST_PART)

    def _refresh_period(self, image: _Image) -> float:
        if self.section.fleet is None:
            return self.section.refresh
        count = len(self._beside(image))
        return max(self.section.refresh, self._span(count * LOOKUP_SECONDS, REFRESH_PART))

    def _pull_span(self, image: _Image) -> float:
        """Pulls that wait at the same time share the span, those that are done among them: else it
        would shrink, and the rest come early. A size not known yet is taken as the others' mean."""
        every = self._beside(image)
        # Tags that moved are found one after another in the period of refreshes.
        own = image.seen - self._refresh_period(image) if image.seen else image.since
        first = min([own, *(_anchor(each) for each in every if not each.present)])
        group = [each for each in every if _anchor(each) >= first]
        known = [each.seconds for each in group if each.seconds is not None]
        if not known:  # only the runtime could find out; see hurdle
            fleet = self.section.fleet
            known = [self.section.unknown_image / fleet.bytes_per_second if fleet else 0.0]
        unknown = sum(each.seconds is None for each in group)
        seconds = sum(known) + unknown * sum(known) / len(known)
        return self._span(seconds, PULL_PART)

    def _next_refresh(self, ref: str, image: _Image, answered_at: float) -> float:
        """Each node refreshes at its own phase of the period, whenever it was started."""
        period = self._refresh_period(image)
        if not period:
            return answered_at
        phase = self._share(ref, "refresh")
        turn = math.floor(answered_at / period - phase) - 1
        at = 0.0
        while at <= answered_at:
            turn += 1
            moved = self._share(ref, f"refresh {turn}") * REFRESH_JITTER
            at = (turn + phase + moved) * period
        return at


def _anchor(image: _Image) -> float:
    return image.seen or image.since
