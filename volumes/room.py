"""Volumes, the format guard and the volume audit, as the process registers them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kit.checks
import kit.findings
import kit.room
import kit.traces
from volumes import settings

if TYPE_CHECKING:
    import click

    from volumes.component import Volumes


def _build(
    section: settings.VolumesSettings, state_dir: Path, reporter: kit.findings.Reporter
) -> "Volumes":
    from volumes import component

    return component.Volumes(section, state_dir=state_dir, reporter=reporter)


def _routes() -> Sequence[kit.room.Route]:
    from volumes import api

    return api.ROUTES


def _volume() -> "click.Group":
    from volumes import commands

    return commands.volume


def _checks(section: settings.VolumesSettings, state_dir: Path) -> Sequence[kit.checks.Check]:
    from volumes import doctor

    return doctor.checks(section, state_dir)


def _traces() -> kit.traces.Traces:
    from volumes import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


ROOM = kit.room.Room(
    name="volumes",
    summary="Format guard and volume audit; absent: neither on this node.",
    settings=settings.VolumesSettings,
    build=_build,
    routes=_routes,
    openapi="volumes:openapi.yaml",
    commands=(
        kit.room.Command("volume", "Volumes: format guard, probes, ledger, audit.", _volume),
    ),
    checks=_checks,
    traces=_traces,
)
