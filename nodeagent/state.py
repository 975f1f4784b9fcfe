"""What runs in this process: the app changes it, the admin API and the status page show it."""

from dataclasses import dataclass, field
from typing import Any

import kit.room
from nodeagent import rooms
from nodeagent.reporter import Findings
from nodeagent.settings import Settings


@dataclass
class State:
    """The settings in force, and each room whose section they have, with its component."""

    settings: Settings
    findings: Findings = field(default_factory=Findings)
    running: list[tuple[kit.room.Room, kit.room.Component[Any]]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # changed settings that need a restart
    degraded: dict[str, list[str]] = field(default_factory=dict)  # of the process's own parts
    config_error: str = ""  # why the file's latest content is not in force

    @property
    def components(self) -> list[kit.room.Component[Any]]:
        return [component for _, component in self.running]


def build(settings: Settings) -> State:
    """The components of the rooms that the settings have, in their start order; none started."""
    state = State(settings)
    for room in rooms.ROOMS:
        section = getattr(settings, room.name)
        if section is not None:
            component = room.build(section, settings.state_dir, state.findings)
            state.running.append((room, component))
    return state
