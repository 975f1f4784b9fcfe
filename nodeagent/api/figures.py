"""Every series of this agent, and their text as Prometheus reads it.

Whoever reaches the metrics listener may ask, as often as he likes. So the text is made once for all
who ask within ``HELD_SECONDS``, and making it never takes more than a twentieth of the event loop.
"""

import gzip
import importlib.metadata
import time
from collections.abc import Iterable

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
        text = "Version of the agent."
        yield state_of("build_info", text, {(): version}, "version")
        ready = {each.room.name: each.health().ready for each in self._state.running}
        yield gauge("component_ready", "1: the component is ready.", ready, "component")
        failures = {each.room.name: each.failures for each in self._state.running}
        yield counter("component_failures", "Failed starts and reconciles.", failures, "component")
        yield from self._state.findings.metrics()
        for figures in self._state.metrics:
            yield from figures()


def registry(state: State) -> prometheus_client.CollectorRegistry:
    made = prometheus_client.CollectorRegistry()
    made.register(RequestFigures(state))
    prometheus_client.ProcessCollector(registry=made)
    prometheus_client.PlatformCollector(registry=made)
    return made


class HeldFigures:
    """The series as text, made when somebody asks and what there is has become old."""

    def __init__(self, series: prometheus_client.CollectorRegistry) -> None:
        self._series = series
        self._until = 0.0
        self._families: list[Metric] = []  # of one moment
        self._texts: dict[tuple[str, bool], bytes] = {}  # of these, by content type and gzip

    def collect(self) -> Iterable[Metric]:
        """For the encoders, which take a registry."""
        return self._families

    def text(self, accept: str, encodings: str) -> tuple[dict[str, str], bytes]:
        """Headers and body for a client whose headers Accept and Accept-Encoding are these."""
        begun = time.monotonic()
        if begun >= self._until:
            self._families, self._texts = list(self._series.collect()), {}
            self._hold(begun)
        encoder, content_type = exposition.choose_encoder(accept)
        zipped = exposition.gzip_accepted(encodings)
        if (content_type, zipped) not in self._texts and len(self._texts) >= MOST_FORMS:
            # Accept can name any version of a format. Who names yet another gets the plain one.
            encoder, content_type = exposition.choose_encoder("")
        if (content_type, zipped) not in self._texts:
            begun = time.monotonic()
            body = encoder(self)
            self._texts[content_type, zipped] = gzip.compress(body, 5) if zipped else body
            self._hold(begun)
        headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
        headers |= {"Content-Encoding": "gzip"} if zipped else {}
        return headers, self._texts[content_type, zipped]

    def _hold(self, begun: float) -> None:
        now = time.monotonic()
        self._until = max(self._until, now + max(HELD_SECONDS, SHARE * (now - begun)))
