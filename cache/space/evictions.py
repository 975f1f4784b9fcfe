"""How files leave the store of a dataset: the passes of an eviction, and what happens in between.

What is taken out is read from the source from then on. So it must answer, and no reader may be left
in a mount that hides it: where the store itself was mounted, or marks were taken away, a new
overlay comes first, also for who reads by the id of the generation. Who still looks past it (a
working directory, an open directory, a volume of its own, a mount namespace that the new one does
not reach) is waited for: nothing is deleted meanwhile.

The copy of a block image leaves as a whole. Jobs read the mapped source from then on. Where one
device shows copy and source, open files go on from the source too; elsewhere who has a file of the
copy open is waited for, because its space is free only when the loop device over it has ended.
Where nothing can map the image the view shows nothing afterwards, as before the first fill: so
nobody may hold it, and no pod may have been given it.

``evicting`` in generation.json is durable before the view or the first mark changes and is taken
back after the last file: what a killed agent began, the next one finishes. Until the first file is
deleted a raised budget ends it, unless an overlay that remembers marks is still to be replaced.
"""

import dataclasses
import math
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import structlog

import kit.child
import kit.errors
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.dataset.generation import STORE_SECONDS, Generation
from cache.fill import evict as evict_pass
from cache.fill import protocol
from cache.space import evictions_child, tasks
from cache.space.limits import of_its_own
from cache.store import subset
from cache.views import by_id, view
from cache.views.view import Stage

log = structlog.get_logger("eviction")

# A share grows by at least this part of it: each change reads the whole manifest.
GROWTH = 1 / 64
DISK_SECONDS = 900.0  # between two looks whether others have left some of the disk
TOLD_SECONDS = 60.0  # between two lines of the log that say the same of a dataset

Run = Callable[[Dataset, str, protocol.AnyTask], Awaitable[protocol.End]]
# Stages in which readers see the tree of the store.
_SHOWS_STORE = (Stage.STORE, Stage.OVERLAY)

LimitsOf = Callable[[Dataset, str], protocol.Limits]


@dataclasses.dataclass(frozen=True)
class _Begun:
    """What this agent knows of an eviction that is under way; of an earlier agent's nothing."""

    within: LimitsOf | None = None  # while nothing is deleted: it ends when these allow all
    stale: bool = True  # the overlay that is shown may remember marks that were taken away
    room: Sequence[float] = ()  # what ``within`` left when the share was chosen


class Evictions:
    """The caller has the lock of the dataset, and no other job of it runs."""

    def __init__(self, run: Run, limits: LimitsOf) -> None:
        self._run = run
        self._limits = limits
        # Looked at only while a generation is ``evicting``; ``_take_out`` writes it anew.
        self._begun = weakref.WeakKeyDictionary[Generation, _Begun]()
        self._told = weakref.WeakKeyDictionary[Dataset, tuple[str, float]]()

    async def settle(
        self,
        dataset: Dataset,
        *,
        grow: bool,
        limits: protocol.Limits | None = None,
        own: bool = False,
        alone: bool = False,
        **changes: Any,
    ) -> bool:
        """Have the dataset keep the share that fits now; whether that is another one.

        ``grow``: a larger one will do; else only a smaller one. ``limits``: other ones than those
        of the settings, for somebody who asked: no raised budget ends that. ``own``: while it is
        kept only the dataset's own. ``alone``: what it shares with an earlier generation counts,
        too: that one goes by itself. ``changes``: to generation.json, when files go.

        SourceError, HostError and RefusedError say why not. What is begun is done later then.
        """
        within = self._own if own else self._limits
        allowed = limits or within(dataset, "evict")
        if dataset.source.block:
            return await _settle_copy(dataset, allowed, **changes)
        before = now = dataset.generation.kept_share
        chosen = await self._pass(dataset, "choose", now, allowed, alone)
        share, beyond, found = chosen.share, chosen.beyond, chosen.fill
        if found.used < dataset.generation.used:  # a fill ends with a log of its index
            await dataset.change(used=found.used, inodes=found.inodes)
            dataset.figures = dataclasses.replace(dataset.figures, used=found.used)
        if beyond and dataset.generation.evicting and self._begun_of(dataset).within is not None:
            now = subset.ALL  # what its share takes out is all there
        if share > now and not (grow and (share == subset.ALL or share - now > now * GROWTH)):
            share = now
        if beyond and share <= now:
            begun = _Begun(None if limits else within, room=_room(allowed))
            await self._take_out(dataset, share, beyond, begun, **changes)
        elif share != now:
            await dataset.change(kept_share=share, **changes)
        return share != before

    async def _take_out(
        self, dataset: Dataset, share: int, files: int, begun: _Begun, **changes: Any
    ) -> None:
        """Keep ``share`` of the dataset; ``files``: how many go, as far as is known."""
        await _reach(dataset)
        generation = dataset.generation
        # What took marks away and came no further may have left an overlay that remembers them.
        within, stale = begun.within, generation.damaged > 0
        if generation.evicting:  # it may have been asked for: no raised budget ends it from now on
            within, stale = None, stale or self._begun_of(dataset).stale
        self._begun[dataset.current] = dataclasses.replace(begun, within=within, stale=stale)
        left = max(generation.left_files, files, 1)
        state = "partial" if generation.state == "complete" else generation.state
        changes |= {"kept_share": share, "evicting": True, "state": state, "left_files": left}
        await dataset.change(**changes)
        await self._delete(dataset)

    async def finish(self, dataset: Dataset) -> None:
        """Go on with one that waits, or that an earlier agent began; or end it, if nothing is
        deleted yet and budgets allow all of it now."""
        if dataset.source.block:
            await _reach_image(dataset)
            await _take_copy_out(dataset)
            return
        begun, share = self._begun_of(dataset), dataset.generation.kept_share
        allowed = (begun.within or self._limits)(dataset, "evict")
        room = _room(allowed)
        # Only where there is more of it: to choose reads the whole manifest.
        if begun.within and any(more > less for more, less in zip(room, begun.room, strict=True)):
            found = await self._pass(dataset, "choose", share, allowed)
            share = max(share, found.share)
            if not found.beyond:
                await self._end(dataset, share)
                return
            begun = dataclasses.replace(begun, room=room)
        # Also when it is the same one: the disk may have refused it before.
        await dataset.change(kept_share=share, evicting=True)
        self._begun[dataset.current] = begun
        await self._delete(dataset)

    async def _end(self, dataset: Dataset, share: int) -> None:
        """Delete nothing. What is stored is complete when a fill has found that."""
        if self._begun_of(dataset).stale and dataset.stage is Stage.OVERLAY:
            await _reach(dataset)
            await dataset.publish(Stage.OVERLAY)
        await dataset.change(kept_share=share, evicting=False, wanted=True, why="")
        self._begun.pop(dataset.current, None)
        log.info("eviction ended before files went", dataset=dataset.name)

    async def _delete(self, dataset: Dataset) -> None:
        share, before = dataset.generation.kept_share, dataset.used()
        await _reach(dataset)
        begun = self._begun_of(dataset)
        self._begun[dataset.current] = dataclasses.replace(begun, stale=True)
        marks = await self._pass(dataset, "marks", share)
        # The overlay may have looked up directories with their marks. One that never saw a mark
        # stays, and who stands in it is in nobody's way: each new one would be waited for.
        hides = begun.stale or dataset.stage is not Stage.OVERLAY or marks.evicted > 0
        if hides and dataset.stage in _SHOWS_STORE:
            await dataset.publish(Stage.OVERLAY)
        begun = self._begun[dataset.current] = dataclasses.replace(begun, stale=False)
        await fall_back(dataset)
        # Also without marks: an eviction before may still wait for who looks past the overlay.
        await _wait_for_others(dataset)
        self._begun[dataset.current] = dataclasses.replace(begun, within=None)
        found = await self._pass(dataset, "files", share)
        if dataset.stage in _SHOWS_STORE:
            await dataset.refresh()  # until then the files are open in the kernel
        dataset.evicted += found.evicted
        counts: dict[str, Any] = dataset.figures.counts()
        await dataset.change(**{**counts, **found.fill.record()}, evicting=False)
        self._begun.pop(dataset.current, None)
        dataset.current.show_kept_figures()
        dataset.freed += max(0, before - dataset.used())
        log.info("files evicted", dataset=dataset.name, files=found.evicted,
                 share=round(share / subset.ALL, 4), used=found.fill.used)  # fmt: skip

    def tell(self, dataset: Dataset, error: Exception) -> None:
        """Say in the log why one waits, the same once a minute."""
        why, now = str(error), time.monotonic()
        told, at = self._told.get(dataset, ("", -math.inf))
        if why != told or now - at >= TOLD_SECONDS:
            self._told[dataset] = why, now
            log.warning("eviction waits", dataset=dataset.name, why=why)

    def _begun_of(self, dataset: Dataset) -> _Begun:
        return self._begun.get(dataset.current, _Begun())

    def _own(self, dataset: Dataset, kind: str) -> protocol.Limits:
        allowed = self._limits(dataset, kind)
        return of_its_own(dataset, allowed) if dataset.settings.keep else allowed

    async def _pass(
        self,
        dataset: Dataset,
        part: str,
        share: int,
        limits: protocol.Limits | None = None,
        alone: bool = False,
    ) -> protocol.EvictEnd:
        allowed = limits or self._limits(dataset, "evict")
        known = tasks.common(dataset, dataset.current, allowed)
        known["beside"] = known["beside"] and not alone
        task = evict_pass.EvictTask(**known, part=part, share=share)
        end = await self._run(dataset, "evict", task)
        if end.evict is None:
            raise _waits(dataset, end.why or end.result, "it is tried again")
        return end.evict


def _room(limits: protocol.Limits) -> Sequence[float]:
    """What says how much limits leave; where one of these is more, there may be more room."""
    least = limits.least
    floors = (limits.reserve, least.share, least.bytes, least.inodes_share, least.inodes)
    left = (limits.budget - limits.others, limits.inodes - limits.other_inodes)
    # Time stands for what the disk has free.
    now = time.monotonic() // DISK_SECONDS if limits.disk else math.inf
    return (*left, now, *(-each for each in floors))


async def fall_back(dataset: Dataset) -> bool:
    """What is mounted by the id of the current generation shows what the view shows from now on.

    False when it did already. HostError when it cannot: nothing may be deleted from its tree then.
    """
    try:
        return bool(
            await kit.child.call(
                by_id.fall_back, dataset.view, dataset.current.id, deadline=VIEW_SECONDS
            )
        )
    except (OSError, RuntimeError) as error:
        raise _waits(dataset, f"its mount by id stays ({error})", "see the kernel log") from error


async def _reach(dataset: Dataset) -> None:
    """What is taken out is read from the source. AgentError when that cannot be."""
    if dataset.reached is None or not dataset.reached.root:
        await dataset.reach(serve=True)
    if dataset.generation.state == "stale":
        raise _waits(dataset, "its source is another one now", "it begins anew")
    if dataset.stage in _SHOWS_STORE and (dataset.unfit() or not await dataset.may_overlay()):
        why = "its source is another one now, or refuses root"
        raise _waits(dataset, why, "its view shows the source first")
    if dataset.stage is Stage.UNKNOWN or dataset.reached is None or not dataset.reached.root:
        raise _waits(dataset, "its view is not published yet", "it is tried again")


async def _wait_for_others(dataset: Dataset) -> None:
    """HostError while somebody looks into the tree past the overlay."""
    try:
        left = await kit.child.call(
            view.left_behind, dataset.view, dataset.layer, deadline=VIEW_SECONDS
        )
    except (OSError, RuntimeError) as error:
        why = f"its readers are not known ({error})"
        raise _waits(dataset, why, "it is tried again") from error
    if left:
        why = "readers are still in an earlier view: " + "; ".join(left)
        raise _waits(dataset, why, "end them, or wait: it goes on when they have left")


def _waits(dataset: Dataset, cause: str, remedy: str) -> kit.errors.HostError:
    return kit.errors.HostError(f"eviction from dataset {dataset.name}", cause, remedy)


# --- of block images


async def _settle_copy(dataset: Dataset, limits: protocol.Limits, **changes: Any) -> bool:
    """Take the copy out if it is beyond ``limits``; whether it was. AgentError: it stays for now.

    The caller has the lock. ``changes``: to generation.json, when it goes.
    """
    allowed = dataclasses.asdict(limits)
    if not await kit.child.call(
        evictions_child.is_beyond, dataset.folder, allowed, deadline=STORE_SECONDS
    ):
        return False
    await _reach_image(dataset)
    if not _root(dataset):
        await _refuse_held(dataset)
    figures = dataset.figures
    left = {"left_files": max(figures.files, 1), "left_bytes": figures.bytes}
    await dataset.change(state="partial", evicting=True, **left, **changes)
    await _take_copy_out(dataset)
    return True


async def _take_copy_out(dataset: Dataset) -> None:
    before, chunks = dataset.used(), dataset.figures.done_files
    if _root(dataset):
        if dataset.stage is not Stage.SOURCE:
            await dataset.publish(Stage.SOURCE)
    else:
        await _refuse_held(dataset)
        with dataset.changing_view():
            await kit.child.call(view.take_off, dataset.view, deadline=VIEW_SECONDS)
            dataset.stage = Stage.NONE
    shown = await kit.child.call(evictions_child.discard, dataset.folder, deadline=STORE_SECONDS)
    if shown:
        why = f"its copy is still in use by {shown}: a job has a file of it open"
        raise _waits(dataset, why, "it goes on when the job has closed it")
    dataset.evicted += chunks
    await dataset.change(done_files=0, done_bytes=0, used=0, inodes=0, evicting=False)
    dataset.current.show_kept_figures()
    dataset.freed += max(0, before - dataset.used())
    log.info("block image evicted", dataset=dataset.name, chunks=chunks, bytes=before)


def _root(dataset: Dataset) -> str:
    return dataset.reached.root if dataset.reached is not None else ""


async def _reach_image(dataset: Dataset) -> None:
    """Jobs can read the source, if anything can map it. AgentError."""
    if not _root(dataset):
        await dataset.reach(serve=True)
    if dataset.generation.state == "stale":
        raise _waits(dataset, "its source is another one now", "it begins anew")


async def _refuse_held(dataset: Dataset) -> None:
    """HostError while somebody would miss a view that nothing but the copy can show."""
    by = dataset.use.by or await kit.child.call(
        evictions_child.given_to, dataset.view, deadline=VIEW_SECONDS
    )
    if by:
        why = f"nothing here can map its image, and it is held by {by}"
        raise _waits(dataset, why, "it goes on when that has ended")
