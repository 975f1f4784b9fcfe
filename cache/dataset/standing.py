"""How a dataset stands, in one word and one line."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import kit.errors
from cache.dataset.figures import Eviction, Figures, Job, Loss, Scrubs, Totals, Use
from cache.dataset.generation import Generation
from cache.dataset.hits import Hits
from cache.settings import DatasetSettings
from cache.sources import base
from cache.store import generations, identity, sample
from cache.store.soundness import Soundness
from cache.views.view import Stage
from kit.findings import Finding, Severity

MOST_NAMED = 3
State = Literal[
    "cold", "waiting", "queued", "scanning", "filling", "paused", "cancelled", "evicted",
    "partial", "complete", "verifying", "withdrawing", "evicting", "failed", "removed",
]  # fmt: skip


def unfit(refused: str = "", crossed: str = "") -> str:
    """Why an overlay would lose files of a source, for operators; '' when it does not."""
    if refused:
        return f"its source refuses root {refused}: jobs read the source"
    if crossed:
        return (
            f"another file system is mounted at {crossed} when it is opened: jobs read the source"
        )
    return ""


def named(paths: Sequence[str]) -> str:
    """Some of them, and how many more, for operators."""
    return kit.errors.some([repr(each) for each in paths], MOST_NAMED, ", ")


def finding(
    rule: str, name: str, severity: Severity, message: str, advice: str, about: str = ""
) -> Finding:
    """About the dataset ``name``. ``about`` replaces the name in the id where there are several."""
    return Finding(f"{rule}/{about or name}", rule, severity, f"dataset {name}", message, advice)


class Standing:
    """What is known of a dataset, as ``cache.dataset.dataset`` keeps it."""

    removed: bool
    unsure: str
    newer: kit.errors.HostError | None
    no_store: kit.errors.AgentError | None
    trouble: kit.errors.AgentError | None
    job: Job | None
    stage: Stage
    settings: DatasetSettings
    current: Generation  # the one that the view shows
    next: Generation | None = None  # is filled, and follows the current one
    next_trouble: kit.errors.AgentError | None = None  # why it does not, at the last try
    soundness: Soundness
    evicted: int
    scrubs: Scrubs
    leaving = False  # it is about to be removed
    gave_way = False  # its last fill stopped for another dataset
    # For whom the dataset of this name waits when it is queued, as "b (priority 5)".
    ahead: Callable[[str], str] = staticmethod(lambda _: "")
    use = Use()
    comparing = False  # with its source, which is to stay mounted for it
    compared = sample.Seen()
    not_compared = ""  # why the last round did not end
    hits: Hits
    eviction = Eviction()
    loss = Loss()
    # Whom to tell before complete files go, once ``whole`` is False.
    tell: Callable[[], Awaitable[None]] | None = None

    @property
    def name(self) -> str:
        return self.settings.name

    # --- what the view shows: shorthands of ``current``

    @property
    def generation(self) -> generations.Generation:
        """Its generation.json."""
        return self.current.record

    @generation.setter
    def generation(self, record: generations.Generation) -> None:
        self.current.record = record

    @property
    def reached(self) -> base.Reached | None:
        return self.current.reached

    @property
    def figures(self) -> Figures:
        return self.current.figures

    @figures.setter
    def figures(self, figures: Figures) -> None:
        self.current.figures = figures

    # --- how it stands

    @property
    def suspect(self) -> bool:
        """The disk has failed since its files were verified: the view shows the source."""
        return self.soundness.suspects(self.generation)

    def queued(self) -> Generation | None:
        """The generation whose fill is asked for and has not begun; the current one first."""
        if self.next is None or self.current.queued:
            return self.current if self.current.queued else None
        return self.next if self.next.queued else None

    def listed(self) -> bool:
        """Whether an overlay can be shown: every directory is in the tree. Of a block image: there
        is a copy, and one device can show it and the source."""
        mixes = self.reached is not None and self.reached.mixes and self.figures.done_files > 0
        return self.generation.skeleton or (mixes and not self.generation.evicting)

    def unfit(self) -> bool:
        """No overlay is shown: it would lose files of the source."""
        return bool(unfit(self.generation.refused, self.generation.crossed))

    def mounted_inside(self) -> Sequence[str]:
        """What is mounted inside its source and no part of it, while jobs may read the source."""
        if self.reached is None or self.generation.state == "complete":
            return ()
        return self.reached.inside

    def snapshot_made(self) -> float:
        """When the snapshot that is served was made, Unix time; 0 when it is not known."""
        return float(self.generation.marks.get(identity.MADE, "0"))

    def totals(self) -> Totals:
        return Totals(self.evicted, self.scrubs.bytes)

    def state(self) -> State:
        """One word; docs/cache.md lists them."""
        generation = self.generation
        if self.removed:
            return "removed"
        if self.newer is not None:
            return "failed"
        if self.no_store is not None and generation.state == "complete":
            return "failed"
        if self.job is not None and self.job.kind != "update":
            if self.job.kind == "verify":
                return "verifying"
            return "paused" if generation.paused == "paused" else self.job.phase or "queued"
        if self.suspect and self.no_store is None:
            return "verifying"
        if generation.paused and generation.state != "complete":
            return generation.paused
        if self.unsure:
            return "paused"
        if generation.state == "complete" and self.stage is not Stage.STORE:
            return "failed" if self.trouble is not None else "queued"
        if generation.state in ("complete", "partial"):
            return generation.state
        if self.reached is None:
            return "waiting"
        if self.current.queued:
            return "queued"
        return "failed" if generation.why or self.trouble is not None else "cold"

    def whole(self) -> bool:
        """Whether jobs here read all of it from the SSD, and will go on to."""
        usable = self.newer is None and self.no_store is None and not self.suspect
        there = self.generation.state == "complete" and self.stage is Stage.STORE
        return there and usable and not (self.removed or self.leaving)

    async def tell_loss(self) -> None:
        """Before complete files go, and after ``whole`` has become False. Bounded in time."""
        if self.tell is not None:
            await self.tell()

    def refused(self, cause: str, remedy: str) -> kit.errors.RefusedError:
        """The error of a request that makes no sense for it now."""
        return kit.errors.RefusedError(f"dataset {self.name}", cause, remedy)

    def waits_for(self) -> str:
        """For whom its fill waits, and that dataset's priority; '' when it does not."""
        queued = self.queued() is not None and self.job is None
        return self.ahead(self.name) if queued else ""

    def why(self) -> str:
        """Why its state is not better, in one line."""
        if self.trouble is not None and self.state() != "complete":
            return str(self.trouble)
        if self.no_store is not None:
            return str(self.no_store)
        if self.suspect:
            before = self.soundness.lost or "the SSD had errors"
            return f"{before}: stored files are verified before they are used again"
        if self.unsure:
            return (
                f"{self.unsure}, so it is not known whether it was removed: 'nodeagent dataset "
                f"warm {self.name}' fills it, 'remove' removes it"
            )
        if self.state() == "queued" and (other := self.waits_for()):
            return f"waits for {other}"
        inside = self.mounted_inside()
        told = f"what is mounted at {named(inside)} is not part of it" if inside else ""
        return "; ".join(filter(None, (self.generation.why, told)))
