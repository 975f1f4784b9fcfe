"""The one place where rooms are joined to the process."""

from typing import Any

import cache.component
import kit.findings
import kit.room
import preheat.component
import volumes.component
from nodeagent.settings import Settings


def build(settings: Settings, reporter: kit.findings.Reporter) -> list[kit.room.Component[Any]]:
    """The components whose section is in the settings, in the order in which they start.

    Volumes come first: the guard is to be in the kernel before anything else takes its time.
    """
    components: list[kit.room.Component[Any]] = []
    state_dir = settings.state_dir
    if settings.volumes is not None:
        components.append(
            volumes.component.Volumes(settings.volumes, state_dir=state_dir, reporter=reporter)
        )
    if settings.cache is not None:
        components.append(
            cache.component.Cache(settings.cache, state_dir=state_dir, reporter=reporter)
        )
    if settings.preheat is not None:
        components.append(
            preheat.component.Preheat(settings.preheat, state_dir=state_dir, reporter=reporter)
        )
    return components
