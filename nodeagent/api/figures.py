"""Every series of this agent, and their text as Prometheus reads it.

Whoever reaches the metrics listener may ask, as often as he likes. So the text is made once for all
who ask within ``HELD_SECONDS``, and making it never takes more than a twentieth of the event loop.
"""

import gzip
import importlib.metadata
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import prometheus_client
from prometheus_client import exposition
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kit.metrics import counter, gauge
from kit.metrics import state as state_of
from nodeagent.state import State

HELD_SECONDS = 1.0
SHARE = 20  # a text is held for so many times the seconds that it took to make
MOST_FORMS = 4  # of one look: content types, each with and without gzip


class RequestFigures(Collector):
    """Asks every component when Prometheus asks us."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        for each in self._state.running:
            yield from each.component.metrics()
        version = importlib.metadata.version("nodeagent")
        text = "The agent's version, as a label; the value is 1."
        yield state_of("build_info", text, {(): version}, "version")
        ready = {each.room.name: each.health().ready for each in self._state.running}
        yield gauge("component_ready", "1 while the component is ready.", ready, "component")
        failures = {each.room.name: each.failures for each in self._state.running}
        yield counter("component_failures", "Failed starts and reconciles.", failures, "component")
        yield from self._state.findings.metrics()
        for figures in self._state.metrics:
            yield from figures()


def registry(state: State) -> prometheus_client.CollectorRegistry:
    """Every series of this agent."""
    made = prometheus_client.CollectorRegistry()
    made.register(RequestFigures(state))
    prometheus_client.ProcessCollector(registry=made)
    prometheus_client.PlatformCollector(registry=made)
    return made


@dataclass(frozen=True)
class Text:
    """``zipped``: ``body`` is in gzip."""

    content_type: str
    body: bytes
    zipped: bool


@dataclass
class _Look:
    """What was collected at one time."""

    families: list[Metric]
    until: float
    forms: dict[tuple[str, bool], Text] = field(default_factory=dict)

    def collect(self) -> Iterable[Metric]:
        return self.families


class Held:
    """The series as text, made when somebody asks and what there is has become old."""

    def __init__(
        self,
        series: prometheus_client.CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._series, self._clock = series, clock
        self._look = _Look([], 0.0)

    def text(self, accept: str, encodings: str) -> Text:
        """What a client gets whose headers Accept and Accept-Encoding are these."""
        begun = self._clock()
        if begun >= self._look.until:
            self._look = _Look(list(self._series.collect()), 0.0)
            self._hold(begun)
        encoder, content_type = exposition.choose_encoder(accept)
        zipped = exposition.gzip_accepted(encodings)
        found = self._look.forms.get((content_type, zipped))
        if found is not None:
            return found
        # Accept can name any version of a format. Who names yet another gets the plain one.
        if len(self._look.forms) >= MOST_FORMS:
            encoder, content_type = exposition.choose_encoder("")
            found = self._look.forms.get((content_type, zipped))
            if found is not None:
                return found
        begun = self._clock()
        body = encoder(self._look)
        made = Text(content_type, gzip.compress(body, 5) if zipped else body, zipped)
        self._look.forms[content_type, zipped] = made
        self._hold(begun)
        return made

    def _hold(self, begun: float) -> None:
        now = self._clock()
        held = max(HELD_SECONDS, SHARE * (now - begun))
        self._look.until = max(self._look.until, now + held)
