"""One generation of a dataset while the agent runs: its source, its folder, what is known of it.

A dataset (``cache.dataset.dataset``) has one generation that serves, at most one that is filled to
follow it, and some that retire. Each knows its own source and keeps its own record,
generation.json.

Each time its source is reached it is compared with what the generation was filled from
(``cache.store.identity``).

Invariant: the record on the disk is changed by ``change`` only, under the lock of the dataset.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import structlog

import kit.child
import kit.errors
from cache.dataset import due
from cache.dataset.figures import Figures, Scrub
from cache.sources import base
from cache.store import generations, identity, image_copy, likeness
from cache.store.identity import Match

log = structlog.get_logger("generation")

STORE_SECONDS = 60.0
LIST_SECONDS = 30.0  # to look for the quarantine list


def folder_name(freshness: str, named: str) -> str:
    """Of a generation whose settings name ``named`` (JSON of ``base.Source.identity``)."""
    freshness = "snapshot" if freshness == "follow" else freshness  # what it holds is the same
    return f"{freshness}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"


def named(source: base.Source, scan: str) -> str:
    """What the settings name and which listing of it, as JSON. Another one: another generation."""
    return json.dumps(source.identity | ({"scan": scan} if scan else {}), sort_keys=True)


class Generation:
    """``record``: generation.json, or what it will say. ``figures``: how far it is stored."""

    def __init__(
        self,
        dataset: str,
        source: base.Source,
        folder: str,
        may_change: Callable[[], None],
        snapshot: str = "",
        scan: str = "",
    ) -> None:
        """``may_change``: raises AgentError while nothing may be written to the store."""
        self.dataset = dataset
        self.source = source
        self.folder = folder
        record = generations.new(dataset, named(source, scan))
        self.record = dataclasses.replace(record, snapshot=snapshot)
        self.reached: base.Reached | None = None
        self.figures = Figures()
        self.gone = False  # its snapshot did not exist when it was asked for last
        self.unproven = ""  # why what is stored may be of another source
        self.due = due.Due()  # while it is to follow the one that serves
        self.queued = False  # its fill is asked for
        self.fits = False  # as much of it is stored as there is room for now
        self.leaves = False  # bad files are in its tree: what is mounted by its id shows its source
        self.hidden = False  # bad files on its list were taken out of its tree
        self.scrub = Scrub()  # the last one while it was an earlier one
        self._may_change = may_change

    @property
    def id(self) -> str:
        """Its name below the dataset: in the store, the API and ``by-id``."""
        return os.path.basename(self.folder)

    @property
    def scan(self) -> str:
        """Which listing of a source without snapshots it is of; '' the first one."""
        return str(json.loads(self.record.identity).get("scan", ""))

    @property
    def layer(self) -> str:
        """What of the store a view of it shows: the tree, or the copy of a block image."""
        return f"{self.folder}/{image_copy.IMAGE if self.source.block else 'tree'}"

    # --- the record

    def adopt(self, fields: dict[str, Any]) -> None:
        """Continue what an earlier agent left. HostError when that agent was a newer one."""
        found = generations.generation_of(fields)
        if found.identity == self.record.identity:
            self.record = dataclasses.replace(found, snapshot=self.record.snapshot)
            self.show_kept_figures()

    def lost(self, fields: dict[str, Any]) -> dict[str, Any]:
        """For ``adopt``: its record was lost (``generations.load``). What lies there is perhaps of
        another source, or suspect: the view shows the source, and all of it is filled anew."""
        why = str(fields["lost"])
        return {
            "dataset": self.dataset, "identity": self.record.identity, "state": "stale",
            "why": why, "replaced": why, "wanted": True,
            "tree": fields["tree"], "used": fields.get("used", 0),
        }  # fmt: skip

    def look_away(self, fields: dict[str, Any]) -> None:
        """A newer agent filled it: only the space that it takes is known."""
        used = int(fields.get("used", 0))
        self.record = dataclasses.replace(self.record, state="new", used=used)

    async def change(self, **changes: Any) -> None:
        """Change generation.json durably. AgentError, OSError."""
        self._may_change()
        self.record = dataclasses.replace(self.record, **changes)
        fields = dataclasses.asdict(self.record)
        await kit.child.call(generations.save, self.folder, fields, deadline=STORE_SECONDS)

    def begin_anew(self, **changes: Any) -> None:
        """As a new one; ``change`` makes it durable."""
        new = generations.new(self.dataset, self.record.identity)
        new = dataclasses.replace(new, snapshot=self.record.snapshot)
        self.record = dataclasses.replace(new, **changes)
        self.figures, self.unproven = Figures(), ""
        self.leaves = self.hidden = False

    def show_kept_figures(self) -> None:
        """Show the figures of generation.json, while no job reports newer ones."""
        now = self.record
        self.figures = Figures(
            **now.counts(), used=now.used, shared=now.shared, estimated=not now.skeleton
        )

    # --- its source

    async def reach(self, deadline: float, *, serve: bool) -> str:
        """Reach the source; why it is another one than it was, '' when it is the same.

        SourceError when it does not answer.
        """
        try:
            self.reached = await self.source.reach(deadline, serve=serve)
        except kit.errors.SourceError as error:
            self.reached, self.gone = None, isinstance(error, base.GoneError)
            raise
        self.gone = False
        return await self._compare(self.reached)

    async def _compare(self, reached: base.Reached) -> str:
        """Compare the marks of the source with those of the record."""
        now = self.record
        if now.state == "stale":
            return ""
        try:
            self._may_change()
        except kit.errors.AgentError:
            return ""
        if now.state == "new":  # nothing was read of it
            self.record = dataclasses.replace(now, marks=reached.marks)
            return ""
        match identity.compare(now.marks, reached.marks):
            case Match.OTHER:
                return identity.difference(now.marks, reached.marks)
            case Match.SAME:
                self.unproven = ""
                if reached.marks.keys() - now.marks.keys():
                    await self.change(marks={**now.marks, **reached.marks})
                return ""
        why = "it shows none of the marks that were kept"
        if not now.marks:
            why = "no marks were kept of the source that it was filled from"
        if now.state not in ("complete", "partial"):
            return f"its fill had begun, and {why}"
        if why != self.unproven:
            log.warning("dataset may be of another source", dataset=self.dataset, why=why)
        self.unproven = why
        return ""

    async def resembles(self, deadline: float) -> dict[str, str]:
        """Whether its source has the files that were stored, as ``likeness.compare`` answers.

        Of a source that the settings only name: marks tell what is mounted by the agent, and which
        snapshot it is. SourceError when the files are not there.
        """
        reached = self.reached
        known = self.record.state == "new" or not self.source.place
        if reached is None or known or identity.MADE in reached.marks:
            return {"match": Match.SAME.name, "why": "", "refused": ""}
        thing = f"dataset {self.dataset}: source {reached.root}"
        asked = (self.folder, reached.root, reached.stamp)
        try:
            found: dict[str, str] = await kit.child.call(
                likeness.compare, *asked, deadline=deadline
            )
        except (kit.errors.AgentError, OSError) as error:
            self.reached = None  # it is to be reached again
            if isinstance(error, OSError):
                raise base.explain(thing, error) from error
            raise
        if found["match"] == Match.UNPROVEN.name:
            self.reached = None
            raise kit.errors.SourceError(
                thing,
                f"what was stored of it is not there: {found['why']}",
                "mount what belongs there; if it was replaced for good, 'nodeagent dataset "
                f"remove {self.dataset}' and 'warm' begin anew",
            )
        return found

    async def has_bad_files(self) -> bool:
        """Some are on its quarantine list. AgentError, OSError."""
        listed = generations.has_quarantined
        return bool(await kit.child.call(listed, self.folder, deadline=LIST_SECONDS))

    async def prove(self) -> None:
        """Every byte agrees with the source: what is stored is of it."""
        if self.reached is not None and self.reached.marks:
            self.unproven = ""
            await self.change(marks=self.reached.marks)

    # --- space

    def lacks_room(self) -> bool:
        """Something did not fit, or not even all directories did, so that it is not listed."""
        now = self.record
        unlisted = now.state == "partial" and not now.skeleton and not self.source.block
        return now.left_files > 0 or unlisted

    def used(self, others: Iterable["Generation"] = ()) -> int:
        """SSD bytes that it takes beside ``others``; what they share counts once."""
        now = self.record
        used, shared = max(now.used, self.figures.used), max(now.shared, self.figures.shared)
        return used - shared if any(each.id == now.before for each in others) else used


def bad_left(bad: int) -> str:
    """Why a generation is partial that has bad files."""
    return f"{bad} bad files are not replaced yet"
