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
back after the last file: what a killed agent began, the next one finishes.
"""

import dataclasses
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.dataset.generation import STORE_SECONDS
from cache.fill import protocol, space
from cache.fill.protocol import Least
from cache.space import tasks
from cache.store import image_copy, subset
from cache.views import by_id, view
from cache.views.view import Stage
from linux import in_use, loop, mountinfo, procfs

log = structlog.get_logger("eviction")

# A share grows by at least this part of it: each change reads the whole manifest.
GROWTH = 1 / 64

Run = Callable[[Dataset, str, protocol.AnyTask], Awaitable[protocol.End]]
# Stages in which readers see the tree of the store.
_SHOWS_STORE = (Stage.STORE, Stage.OVERLAY)
_LOOKS, _LOOK_SECONDS = 20, 0.1  # the kernel ends a loop device some time after its last mount

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
        alone: bool = False,
        **changes: Any,
    ) -> bool:
        """Have the dataset keep the share that fits now; whether that is another one.

        ``grow``: a larger one will do; else only a smaller one. ``limits``: other ones than those
        of the settings. ``alone``: what it shares with an earlier generation counts, too: that one
        goes by itself. ``changes``: to generation.json, when files go.

        SourceError, HostError and RefusedError say why not. What is begun is done later then.
        """
        if dataset.source.block:
            allowed = limits or self._limits(dataset, "evict")
            return await _settle_copy(dataset, allowed, **changes)
        now = dataset.generation.kept_share
        end = await self._pass(dataset, "choose", now, limits, alone)
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
            await _reach_image(dataset)
            await _take_copy_out(dataset)
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
        await fall_back(dataset)
        # Also without marks: an eviction before may still wait for who looks past the overlay.
        await _wait_for_others(dataset)
        end = await self._pass(dataset, "files", share)
        assert end.evict is not None
        if dataset.stage in _SHOWS_STORE:
            await dataset.refresh()  # until then the files are open in the kernel
        found = end.evict
        dataset.evicted += found.evicted
        counts: dict[str, Any] = dataset.figures.counts()
        await dataset.change(**{**counts, **found.fill.record()}, evicting=False)
        dataset.current.show_kept_figures()
        dataset.freed += max(0, before - dataset.used())
        log.info("files evicted", dataset=dataset.name, files=found.evicted,
                 share=round(share / subset.ALL, 4), used=found.fill.used)  # fmt: skip

    async def _pass(
        self,
        dataset: Dataset,
        part: str,
        share: int,
        limits: protocol.Limits | None = None,
        alone: bool = False,
    ) -> protocol.End:
        task = tasks.evict(dataset, limits or self._limits(dataset, "evict"), part, share)
        task = dataclasses.replace(task, beside=task.beside and not alone)
        end = await self._run(dataset, "evict", task)
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
        raise _waits(dataset, why, "end them, or wait: it goes on when they have left")


def _waits(dataset: Dataset, cause: str, remedy: str) -> kit.errors.HostError:
    return kit.errors.HostError(f"eviction from dataset {dataset.name}", cause, remedy)


# --- of block images


async def _settle_copy(dataset: Dataset, limits: protocol.Limits, **changes: Any) -> bool:
    """Take the copy out if it is beyond ``limits``; whether it was. AgentError: it stays for now.

    The caller has the lock. ``changes``: to generation.json, when it goes.
    """
    allowed = dataclasses.asdict(limits)
    if not await kit.child.call(is_beyond, dataset.folder, allowed, deadline=STORE_SECONDS):
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
    shown = await kit.child.call(discard, dataset.folder, deadline=STORE_SECONDS)
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
    by = dataset.use.by or await kit.child.call(given_to, dataset.view, deadline=VIEW_SECONDS)
    if by:
        why = f"nothing here can map its image, and it is held by {by}"
        raise _waits(dataset, why, "it goes on when that has ended")


# --- in a child process


def is_beyond(folder: str, limits: dict[str, Any]) -> bool:
    """Whether the copy in ``folder`` takes more than the limits leave it. OSError."""
    allowed = protocol.Limits(**{**limits, "least": Least(**limits["least"])})
    used = image_copy.used(Path(folder))
    left = space.balance(os.statvfs(folder), allowed, used=used, inodes=image_copy.INODES)
    return used > 0 and (left.bytes < 0 or left.inodes < 0)


def discard(folder: str) -> str:
    """Delete the copy in ``folder`` unless a device shows it; that device, or ''. OSError."""
    copy = os.path.realpath(Path(folder) / image_copy.IMAGE)
    for left in reversed(range(_LOOKS)):
        shown = loop.over(copy)
        if not shown:
            break
        if not left:
            return shown[0]
        time.sleep(_LOOK_SECONDS)
    image_copy.discard(Path(folder))
    return ""


def given_to(target: str) -> str:
    """A process in whose mount namespace the view is mounted at another place; '' when none is.

    A pod sees it there, whether or not it has a file open.
    """
    top = mountinfo.top(target)
    seen: set[tuple[int, str]] = set()
    for pid, key in procfs.views() if top is not None else ():
        if key in seen:
            continue
        seen.add(key)
        try:
            for mount in mountinfo.of(pid):
                if top is not None and mount.device == top.device and mount.target != target:
                    return str(in_use.holder(pid, f"sees it at {mount.target}"))
        except OSError:
            continue  # just ended
    return ""
