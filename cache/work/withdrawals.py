"""How bad files leave the store after a verify, so that readers get the source's.

What is to go is on the list of the generation (``cache.store.generations``), which outlives the
agent: while a file is on it the dataset is not complete, and ``finish`` is asked for again and
again (``cache.dataset.action``). Of a block image bad chunks are read again instead.

While the source answers no file is deleted unless every mark above it is removed and the view knows
that. While it does not, bad files are taken out at once: readers find them missing, not wrong. They
stay on the list, and all the rest is done when the source is back.

Who still looks past the new view (an open directory, a working directory) misses a file from its
deletion until it is filled again. Most leave within a moment, which they are given; a file whose
bytes are wrong waits no longer for the others.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

import kit.child
import kit.errors
from cache.dataset import due
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.dataset.generation import STORE_SECONDS, Generation, bad_left
from cache.fill import protocol
from cache.space import evictions, tasks
from cache.store import generations
from cache.views import view
from cache.views.view import Stage

log = structlog.get_logger("job")

LEAVE_SECONDS = 10.0  # for readers to leave an earlier view
_LOOK_SECONDS = 0.5
NOT_WITHDRAWN = "bad files could not be withdrawn"
_SHOWS_COPY = (Stage.OVERLAY, Stage.STORE)


# Runs a pass over a generation; None: over the current one.
Run = Callable[[Dataset, str, protocol.AnyTask, Generation | None], Awaitable[protocol.End]]


class Withdrawals:
    """No other job of the dataset runs."""

    def __init__(self, run: Run, limits: evictions.LimitsOf) -> None:
        self._run = run
        self._limits_of = limits

    async def take_out_bad(self, dataset: Dataset, end: protocol.End) -> tuple[int, str]:
        """After a verify: how many bad files were taken out, and why there is more to do ('' if
        there is not)."""
        found = end.verify or protocol.VerifyEnd()
        async with dataset.lock:
            bad = found.unreplaced
            if end.verify is None and await dataset.current.has_bad_files():  # it was killed
                bad = max(1, dataset.generation.damaged)
            if dataset.source.block:
                return 0, await self._read_again(dataset, bad) if bad or found.bad else ""
            return await self._withdraw(dataset, bad) if bad else (0, "")

    async def _read_again(self, dataset: Dataset, bad: int) -> str:
        """Have the bad chunks of a block image filled again. Why they are not yet, or ''.

        The verify has forgotten them, and put them on the list before that.
        """
        shows_old_blocks(dataset)
        why = f"{bad} bad chunks are to be read again" if bad else ""
        if bad:
            await dataset.change(state="filling", wanted=True, damaged=bad, why=why)
            dataset.due.fill_soon()
        forget = generations.write_quarantined
        await kit.child.call(forget, dataset.folder, [], deadline=STORE_SECONDS)
        return why

    async def _withdraw(self, dataset: Dataset, bad: int) -> tuple[int, str]:
        """As ``take_out_bad``."""
        if dataset.generation.state == "stale":
            return 0, dataset.generation.why
        dataset.current.hidden = False
        # First of all: nobody takes it for whole, and the successor of a killed agent continues.
        changes: dict[str, Any] = {"state": "partial", "failed": bad, "damaged": bad}
        changes["wanted"] = True
        if dataset.no_store is not None:
            why = f"{bad} bad files are withdrawn when the disk is well"
            dataset.generation = dataclasses.replace(dataset.generation, why=why, **changes)
            return 0, why
        await dataset.change(why=bad_left(bad), **changes)
        if dataset.reached is None:
            try:
                await dataset.reach()
            except kit.errors.SourceError:
                return await self._hide(dataset)
        if dataset.generation.state == "stale":
            return 0, dataset.generation.why
        withdrawn, why = await self._take_out(dataset)
        if why:
            await self._not_withdrawn(dataset, why)
            return withdrawn, f"{NOT_WITHDRAWN}: {why}"
        await dataset.change(damaged=0)
        dataset.due.fill_later(due.PARTIAL_SECONDS)
        return withdrawn, ""

    async def of(self, dataset: Dataset, each: Generation) -> bool:
        """Withdraw what is on the list of a generation that jobs may read; False when bad files are
        left on it. The caller has the lock."""
        if each is dataset.current:
            return await self.finish(dataset)
        return await self._hide_retired(dataset, each)

    async def finish(self, dataset: Dataset) -> bool:
        """Withdraw what is on the list; False when bad files are left on it.

        The caller has the lock. A fill would take the bad files for good ones.
        """
        bad = dataset.generation.damaged
        if not await dataset.current.has_bad_files():
            if bad:
                await dataset.change(damaged=0)
            return True
        if dataset.source.block:
            await self._read_again(dataset, max(1, bad))
            return True
        if dataset.reached is None:
            await self._hide(dataset)
            return False
        log.info("bad files of an earlier verify are withdrawn first", dataset=dataset.name)
        _, why = await self._take_out(dataset)
        if why:
            await self._not_withdrawn(dataset, why, state="partial")
            return False
        await dataset.change(damaged=0)
        dataset.due.withdrawn()
        return True

    async def _hide(self, dataset: Dataset) -> tuple[int, str]:
        """Take the bad files out of the tree while nothing has their bytes; as ``take_out_bad``."""
        end = await self._withdraw_pass(dataset, "hide")
        if end.result != "withdrawn":
            why = end.why or end.result
            await self._not_withdrawn(dataset, why)
            return 0, f"{NOT_WITHDRAWN}: {why}"
        dataset.current.hidden = True
        if dataset.stage is Stage.OVERLAY and dataset.no_store is None:
            await dataset.refresh()  # until then it knows the files
        bad = max(1, dataset.generation.damaged)
        why = f"{bad} bad files were taken out: they are missing until the source answers"
        log.warning("bad files are missing: the source does not answer", dataset=dataset.name,
                    files=bad)  # fmt: skip
        if dataset.no_store is None:  # else it is known again from the list
            await dataset.change(why=why)
        return end.withdrawn, why

    async def _hide_retired(self, dataset: Dataset, retired: Generation) -> bool:
        """Take bad files out of the tree of one that retires: who still has that tree finds them
        missing, not wrong. They stay on its list, should it be wanted again."""
        retired.reached = None
        end = await self._withdraw_pass(dataset, "hide", retired)
        retired.show_kept_figures()
        retired.leaves = end.result != "withdrawn"
        log.info("bad files are taken out", dataset=dataset.name, generation=retired.id,
                 result=end.result, why=end.why)  # fmt: skip
        return False

    async def finish_next(self, dataset: Dataset, next_one: Generation) -> bool:
        """The same of the generation that an update fills, which no view shows yet."""
        if not await next_one.has_bad_files():
            return True
        log.info("bad files that it shares are withdrawn first", dataset=dataset.name)
        for part in ("marks", "files"):
            end = await self._withdraw_pass(dataset, part, next_one)
            if end.result != "withdrawn":
                await next_one.change(why=f"{NOT_WITHDRAWN}: {end.why or end.result}")
                return False
        await next_one.change(damaged=0)
        return True

    async def _not_withdrawn(self, dataset: Dataset, why: str, **changes: Any) -> None:
        changes["why"] = f"{NOT_WITHDRAWN}: {why}"
        if dataset.no_store is None:
            await dataset.change(**changes)
        else:  # known again from the list, when the disk is well
            dataset.generation = dataclasses.replace(dataset.generation, **changes)
        dataset.due.fill_later(None)
        dataset.due.withdraw_later()
        dataset.due.suspect()  # perhaps the source has gone since it was looked at

    async def _take_out(self, dataset: Dataset) -> tuple[int, str]:
        """Both passes of a withdrawal: how many files are out, and why not all ('' if all)."""
        assert dataset.reached is not None
        if dataset.stage in (Stage.NONE, Stage.UNKNOWN) and dataset.reached.root:
            await dataset.publish(Stage.SOURCE)  # what is mounted by the id falls back to that
        end = await self._withdraw_pass(dataset, "marks")
        if end.result != "withdrawn":
            return 0, end.why or end.result
        if dataset.no_store is not None:
            return 0, str(dataset.no_store.cause)
        shows_store = dataset.stage in _SHOWS_COPY
        if shows_store and not await dataset.may_overlay(refusals=False):
            return 0, "its source is another one now"
        if shows_store:
            # A bind of the store has no source to fall back to, and an overlay may have looked up
            # directories with their marks: both are replaced by a new overlay.
            await dataset.publish(Stage.OVERLAY)
        try:
            await evictions.fall_back(dataset)
        except kit.errors.AgentError as error:
            return 0, str(error.cause)
        if shows_store:
            await _let_leave(dataset)
        end = await self._withdraw_pass(dataset, "files")
        if shows_store and dataset.no_store is None:
            await dataset.refresh()
        return end.withdrawn, "" if end.result == "withdrawn" else end.why or end.result

    async def _withdraw_pass(
        self, dataset: Dataset, part: str, of: Generation | None = None
    ) -> protocol.End:
        target = of or dataset.current
        known = tasks.common(dataset, target, self._limits_of(dataset, "withdraw"))
        task = protocol.WithdrawTask(**known, part=part)
        return await self._run(dataset, "withdraw", task, of)


async def _let_leave(dataset: Dataset) -> None:
    """Give those who look into the tree past the new overlay a moment."""
    until = time.monotonic() + LEAVE_SECONDS
    told = False
    while dataset.no_store is None:
        try:
            left = await kit.child.call(
                view.left_behind, dataset.view, dataset.layer, deadline=VIEW_SECONDS
            )
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            log.warning("readers are not known", dataset=dataset.name, why=str(error))
            return
        if left and not told:
            log.info("bad files wait for readers", dataset=dataset.name, readers=left)
            told = True
        if not left or time.monotonic() >= until:
            return
        await asyncio.sleep(_LOOK_SECONDS)


def shows_old_blocks(dataset: Dataset) -> None:
    """Chunks of a block image were replaced: caches of its mount may have the old ones."""
    if dataset.source.block and dataset.stage in _SHOWS_COPY:
        dataset.stage = Stage.UNKNOWN
