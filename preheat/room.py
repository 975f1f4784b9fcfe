"""Image preheating as the process registers it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kit.checks
import kit.findings
import kit.room
import kit.traces
from preheat import settings

if TYPE_CHECKING:
    import click

    from preheat.component import Preheat


def _build(
    section: settings.PreheatSettings, state_dir: Path, reporter: kit.findings.Reporter
) -> "Preheat":
    from preheat import component

    return component.Preheat(section, state_dir=state_dir, reporter=reporter)


def _routes() -> Sequence[kit.room.Route]:
    from preheat import api

    return api.ROUTES


def _image() -> "click.Group":
    from preheat import commands

    return commands.image


def _checks(section: settings.PreheatSettings, state_dir: Path) -> Sequence[kit.checks.Check]:
    from preheat import doctor

    return doctor.checks(section, state_dir)


def _traces() -> kit.traces.Traces:
    from preheat import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


ROOM = kit.room.Room(
    name="preheat",
    summary="Container images kept ready; absent: no image is pulled or pinned on this node.",
    settings=settings.PreheatSettings,
    build=_build,
    routes=_routes,
    openapi="preheat:openapi.yaml",
    commands=(kit.room.Command("image", "Container images kept ready.", _image),),
    checks=_checks,
    traces=_traces,
)
