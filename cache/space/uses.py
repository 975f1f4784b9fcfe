"""Who uses which dataset, and when each was last used: evictions between datasets go by that.

A dataset is used while a pod was given it, while a process has something of its view open or
mapped or stands in it, and when a file is opened through it. Holders are found in /proc once
a minute where processes are few (``pause``), and again before anything is chosen to go; opens by
fanotify in a short window once a minute.
What the agent does itself is no use: it reads sources and the store, not views.

``dataset-uses.json`` in the state directory keeps the times over restarts: one file for all
datasets, so that the node writes at most once a minute however many are in use.
"""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.formats
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Opens, Use
from cache.views import users
from cache.views.view import Stage

log = structlog.get_logger("uses")

LOOK_SECONDS = 60.0
LONGEST_SECONDS = 1800.0
# A look through thousands of processes takes a second: the next one comes when looks are a small
# part of the time again. Before anything is chosen to go there is a look of its own.
PART = 1 / 300
HOLDERS_SECONDS = 30.0  # to look through all processes
OPENS_SECONDS = 10.0  # for that window; taking an event opens the file again, which may hang
SAVE_SECONDS = 15.0
MOST_KEPT = 4096  # datasets, also some that the settings lost


class Uses:
    def __init__(
        self, datasets: Mapping[str, Dataset], state_dir: Path, has_volumes: Callable[[str], bool]
    ) -> None:
        """``has_volumes``: whether a pod has a dataset as a volume."""
        self._datasets = datasets
        self._path = state_dir / users.FILE
        self._has_volumes = has_volumes
        self._kept: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        self._lost = False  # nothing is chosen to go by what was forgotten
        self._newer = False  # a newer agent's file: it is left alone
        self._trouble = ""

    def start(self) -> None:
        """Read what an earlier agent kept."""
        try:
            found = users.load(self._path)
        except kit.errors.HostError as error:
            self._newer = True
            log.error("times of use of a newer agent are left alone", why=str(error))
            return
        if isinstance(found, kit.formats.Damage):
            self._lost = True
            log.error("when datasets were used is forgotten; all count as used now", why=str(found))
        elif found is not None:
            self._kept = found
        self._saved = dict(self._kept)

    def take(self, added: Iterable[Dataset]) -> None:
        """They count as used when they came: else no new one would ever get room."""
        now = time.time()
        for dataset in added:
            record = dataset.generation
            first = now if record.state == "new" or self._lost else min(record.created, now)
            dataset.use = Use(min(self._kept.get(dataset.name, first), now))

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            began = time.monotonic()
            await self.look()
            took = time.monotonic() - began
            await self._save()
            await asyncio.sleep(pause(took))

    async def follow_opens(self) -> None:
        """The same, of opens: a window costs little, however many processes there are."""
        while True:
            await self._look_at_opens()
            for dataset in self._datasets.values():
                dataset.hits.note(dataset.stage, time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Find who holds the views now. Where that is not known, what was known stays."""
        targets = {each.view: name for name, each in self._datasets.items() if _shown(each)}
        try:
            found = await self._ask(users.holders, list(targets), HOLDERS_SECONDS)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            self._note(str(error))
            return
        self._trouble = ""
        now = time.time()
        for view, name in targets.items():
            dataset = self._datasets.get(name)
            if dataset is None or dataset.view != view:
                continue  # it was dropped meanwhile
            by = found.get(view, "")
            if not by and self._has_volumes(name):
                by = "a pod has it as a volume"
            last = max(dataset.use.last, now) if by else dataset.use.last
            dataset.use = dataclasses.replace(dataset.use, last=last, by=by)

    async def _look_at_opens(self) -> None:
        """Of datasets that nobody is known to hold: a process may open and close all the time.

        And of those that an overlay serves: which share of what is read is on the SSD.
        """
        watched = {
            each.view: each
            for each in self._datasets.values()
            if each.stage is Stage.OVERLAY or (each.stage is Stage.STORE and not each.use.by)
        }
        layers = {view: each.current.layer for view, each in watched.items()}
        try:
            found = await self._ask(users.opened, layers, OPENS_SECONDS)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            self._note(str(error))
            return
        for view, (stored, others) in found.items():
            dataset = watched[view]
            now = time.time()
            last = max(dataset.use.last, now)
            dataset.use = dataclasses.replace(dataset.use, last=last, opened=now)
            if not dataset.source.block:  # of an image, parts of one file may lie on either side
                dataset.hits.add(Opens(stored, others), time.monotonic())

    @staticmethod
    async def _ask(look: Callable[..., Any], views: Collection[str], seconds: float) -> Any:
        return await kit.child.call(look, os.getpid(), views, deadline=seconds) if views else {}

    def _note(self, why: str) -> None:
        if why != self._trouble:
            log.warning("who uses datasets is not known", why=why)
        self._trouble = why

    async def _save(self) -> None:
        self._kept |= {name: round(each.use.last) for name, each in self._datasets.items()}
        if self._newer or self._kept == self._saved:
            return
        latest = sorted(self._kept, key=self._kept.__getitem__, reverse=True)[:MOST_KEPT]
        self._kept = {name: self._kept[name] for name in latest}
        try:
            fields = {"used": self._kept}
            await kit.child.call(
                kit.formats.save, str(self._path), fields, users.FORMAT, deadline=SAVE_SECONDS
            )
            self._saved = dict(self._kept)
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            self._note(f"it could not be kept: {error}")


def pause(took: float) -> float:
    """Seconds to the next look. ``took``: seconds of the latest one."""
    return min(max(LOOK_SECONDS, took / PART), LONGEST_SECONDS)


def _shown(dataset: Dataset) -> bool:
    return dataset.stage is not Stage.NONE and not dataset.removed
