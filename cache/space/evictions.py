"""How files leave the store of a dataset: the passes of an eviction, and what happens in between.

What is taken out is read from the source from then on. So it must answer, and no reader may be left
in a mount that hides it: where the store itself was mounted, or marks were taken away, a new
overlay comes first, also for who reads by the id of the generation. Who still looks past it (a
working directory, an open directory, a volume of its own, a mount namespace that the new one does
not reach) is waited for: nothing is deleted meanwhile.

``evicting`` in generation.json is durable before the first mark goes and is taken back after the
last file: what a killed agent began, the next one finishes.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

import kit.child
import kit.errors
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.fill import protocol
from cache.space import block_evictions, tasks
from cache.store import subset
from cache.views import by_id, view
from cache.views.view import Stage

log = structlog.get_logger("eviction")

# A share grows by at least this part of it: each change reads the whole manifest.
GROWTH = 1 / 64

Run = Callable[[Dataset, str, protocol.AnyTask], Awaitable[protocol.End]]
# Stages in which readers see the tree of the store.
_SHOWS_STORE = (Stage.STORE, Stage.OVERLAY)

LimitsOf = Callable[[Dataset, str], protocol.Limits]


class Evictions:
    """The caller has the lock of the dataset, and no other job of it runs."""

    def __init__(self, run: Run, limits: LimitsOf) -> None:
        self._run = run
        self._limits = limits

    async def settle(
        self,
        dataset: Dataset,
        *,
        grow: bool,
        limits: protocol.Limits | None = None,
        **changes: Any,
    ) -> bool:
        """Have the dataset keep the share that fits now; whether that is another one.

        ``grow``: a larger one will do; else only a smaller one. ``limits``: other ones than those
        of the settings. ``changes``: to generation.json, when files go.

        SourceError, HostError and RefusedError say why not. What is begun is done later then.
        """
        if dataset.source.block:
            allowed = limits or self._limits(dataset, "evict")
            return await block_evictions.settle(dataset, allowed, **changes)
        now = dataset.generation.kept_share
        end = await self._pass(dataset, "choose", now, limits)
        assert end.evict is not None
        share, beyond, found = end.evict.share, end.evict.beyond, end.evict.fill
        if found.used < dataset.generation.used:  # a fill ends with a log of its index
            await dataset.change(used=found.used, inodes=found.inodes)
            dataset.figures = dataclasses.replace(dataset.figures, used=found.used)
        if share > now and not (grow and (share == subset.ALL or share - now > now * GROWTH)):
            share = now
        if beyond and share <= now:
            await self.take_out(dataset, share, beyond, **changes)
        elif share != now:
            await dataset.change(kept_share=share, **changes)
        return share != now

    async def take_out(self, dataset: Dataset, share: int, files: int, **changes: Any) -> None:
        """Keep ``share`` of the dataset; ``files``: how many go, as far as is known."""
        await _reach(dataset)
        generation = dataset.generation
        left = max(generation.left_files, files, 1)
        state = "partial" if generation.state == "complete" else generation.state
        changes |= {"kept_share": share, "evicting": True, "state": state, "left_files": left}
        await dataset.change(**changes)
        await self.finish(dataset, begun=False)

    async def finish(self, dataset: Dataset, *, begun: bool = True) -> None:
        """Take out what the share says. ``begun``: an earlier try may have taken marks away."""
        if dataset.source.block:
            await block_evictions.finish(dataset)
            return
        share, before = dataset.generation.kept_share, dataset.used()
        await _reach(dataset)
        marks = await self._pass(dataset, "marks", share)
        assert marks.evict is not None
        # The overlay may have looked up directories with their marks. One that never saw a mark
        # stays, and who stands in it is in nobody's way.
        hides = begun or dataset.stage is not Stage.OVERLAY or marks.evict.evicted > 0
        if hides and dataset.stage in _SHOWS_STORE:
            await dataset.publish(Stage.OVERLAY)
        if await fall_back(dataset) or hides:
            await _wait_for_others(dataset)
        end = await self._pass(dataset, "files", share)
        assert end.evict is not None
        if dataset.stage in _SHOWS_STORE:
            await dataset.refresh()  # until then the files are open in the kernel
        found = end.evict
        dataset.evicted += found.evicted
        counts: dict[str, Any] = dataset.figures.counts()
        await dataset.change(**{**counts, **found.fill.record()}, evicting=False)
        dataset.show_kept_figures()
        dataset.freed += max(0, before - dataset.used())
        log.info("files evicted", dataset=dataset.name, files=found.evicted,
                 share=round(share / subset.ALL, 4), used=found.fill.used)  # fmt: skip

    async def _pass(
        self, dataset: Dataset, part: str, share: int, limits: protocol.Limits | None = None
    ) -> protocol.End:
        task = tasks.evict(dataset, limits or self._limits(dataset, "evict"), part, share)
        try:
            end = await self._run(dataset, "evict", task)
        finally:
            dataset.job = None
        if end.evict is None:
            raise _waits(dataset, end.why or end.result, "it is tried again")
        return end


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
        raise _waits(dataset, why, "it goes on when they have left")


_waits = block_evictions.waits
