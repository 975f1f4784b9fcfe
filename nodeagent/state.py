"""What runs in this process: the app changes it, the admin API and the status page show it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

import kit.errors
import kit.room
from kit.findings import Finding
from nodeagent import rooms
from nodeagent.reporter import Findings
from nodeagent.settings import Settings


@dataclass
class Running:
    """A room that the settings have, with its component. ``trouble``: why it does not work."""

    room: kit.room.Room
    component: kit.room.Component[Any]
    started: bool = False
    unsettled: bool = False  # started, and its first reconcile has not ended
    trouble: kit.errors.AgentError | None = None
    failures: int = 0  # of starts and reconciles, since the process began

    def health(self) -> kit.room.Health:
        own = self.component.health()
        if self.trouble is not None:
            more = own.reasons if self.started else ()
            return kit.room.Health(own.alive, ready=False, reasons=[str(self.trouble), *more])
        if self.starting:
            return kit.room.Health(own.alive, ready=False, reasons=["it is starting"])
        return own

    @property
    def starting(self) -> bool:
        """It does not know yet all that its settings have."""
        return self.unsettled or not self.started


@dataclass
class State:
    """The settings in force, and each room whose section they have."""

    settings: Settings
    findings: Findings = field(default_factory=Findings)
    running: list[Running] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # changed settings that need a restart
    degraded: dict[str, list[str]] = field(default_factory=dict)  # of the process's own parts
    begun: float = field(default_factory=time.time)  # Unix time
    config_error: str = ""  # why the file's latest content is not in force
    # Figures of the process's own parts.
    metrics: list[Callable[[], Iterable[Metric]]] = field(default_factory=list)

    def judge(self, part: str, wrong: Sequence[Finding], warnings: Sequence[Finding] = ()) -> None:
        """Say what is wrong with a part of the process itself; ``warnings`` degrade nothing."""
        self.findings.report(part, [*wrong, *warnings])
        self.degraded[part] = [each.message for each in wrong]

    def build(self, room: kit.room.Room) -> kit.room.Component[Any]:
        """A new component of a room, not started."""
        section = getattr(self.settings, room.name)
        return room.build(section, self.settings.state_dir, self.findings)


def build(settings: Settings) -> State:
    """The components of the rooms that the settings have, in their start order; none started."""
    state = State(settings)
    for room in rooms.ROOMS:
        if getattr(settings, room.name) is not None:
            state.running.append(Running(room, state.build(room)))
    return state
