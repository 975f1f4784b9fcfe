"""The cache as the process registers it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import kit.checks
import kit.findings
import kit.room
import kit.traces
from cache import settings

if TYPE_CHECKING:
    import click

    from cache.component import Cache


def _build(
    section: settings.CacheSettings, state_dir: Path, reporter: kit.findings.Reporter
) -> "Cache":
    from cache import component

    return component.Cache(section, state_dir=state_dir, reporter=reporter)


def _routes() -> Sequence[kit.room.Route]:
    from cache import api

    return api.ROUTES


def _page(component: "Cache") -> Sequence[kit.room.PageSection]:
    from cache import api

    return api.page(component)


def _dataset() -> "click.Group":
    from cache import commands

    return commands.dataset


def _checks(section: settings.CacheSettings, state_dir: Path) -> Sequence[kit.checks.Check]:
    from cache import doctor

    return doctor.checks(section, state_dir)


def _traces() -> kit.traces.Traces:
    from cache import uninstall

    return kit.traces.Traces(uninstall.find, uninstall.remove)


ROOM = kit.room.Room(
    name="cache",
    summary="The dataset cache; absent: no cache on this node.",
    settings=settings.CacheSettings,
    build=_build,
    routes=_routes,
    openapi="cache:openapi.yaml",
    commands=(
        kit.room.Command(
            "dataset", "Datasets: warmed onto the SSD, served by the kernel.", _dataset
        ),
    ),
    page=_page,
    checks=_checks,
    traces=_traces,
)
