"""What the work loop saw and decided last, and what it has under way."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from preheat import desired, manifest, plan, pull
from preheat.runtimes import base


@dataclass
class Running:
    """A pull in progress."""

    puller: pull.Puller
    task: asyncio.Task[None]
    began_with: int = 0  # bytes that were here when it began


@dataclass
class Totals:
    """Counters since the start of the agent."""

    pulls: int = 0
    fetched_bytes: int = 0
    used_bytes: int = 0  # of images brought by us that pods then used
    cycles: int = 0


@dataclass(frozen=True)
class View:
    """What the last cycle saw and decided; the faces read it."""

    inventory: base.Inventory = field(default_factory=base.Inventory)
    wanted: Mapping[str, desired.Request] = field(default_factory=dict)
    rows: Mapping[str, plan.Wanted] = field(default_factory=dict)
    pinned: tuple[plan.Pinned, ...] = ()
    shapes: Mapping[str, manifest.Shape] = field(default_factory=dict)
    decided: plan.Plan = field(default_factory=plan.Plan)
    node: plan.Node | None = None
    at: float = 0.0
