"""How bad files leave the store after a verify, so that readers get the source's.

Of a block image bad chunks are read again instead. Invariant: no file is deleted unless every mark
above it is removed and the view knows that.

Who still looks past the new view (an open directory, a working directory) misses a file from its
deletion until it is filled again. Most leave within a moment, which they are given; a file whose
bytes are wrong waits no longer for the others.
"""

import asyncio
import dataclasses
import time
from typing import Any, Protocol

import structlog

import kit.child
import kit.errors
from cache import due, evictions, tasks, view
from cache.dataset import VIEW_SECONDS, Dataset
from cache.fill import protocol
from cache.generation import Generation
from cache.view import Stage

log = structlog.get_logger("job")

LEAVE_SECONDS = 10.0  # for readers to leave an earlier view
_LOOK_SECONDS = 0.5
NOT_WITHDRAWN = "bad files could not be withdrawn"
_SHOWS_COPY = (Stage.OVERLAY, Stage.STORE)


class Run(Protocol):
    async def __call__(
        self, dataset: Dataset, kind: str, task: protocol.AnyTask, target: Generation | None, /
    ) -> protocol.End:
        """Run a pass over a generation; None: over the current one."""


class Withdrawals:
    """No other job of the dataset runs."""

    def __init__(self, run: Run, limits: evictions.LimitsOf) -> None:
        self._run = run
        self._limits_of = limits

    async def take_out_bad(self, dataset: Dataset, end: protocol.End) -> tuple[int, str]:
        """After a verify: how many bad files were withdrawn, and why not all ('' if all)."""
        found = end.verify or protocol.VerifyEnd()
        if dataset.source.block:
            return 0, await self._fill_bad(dataset, found) if found.bad else ""
        return await self._withdraw(dataset, found.unreplaced) if found.unreplaced else (0, "")

    async def _fill_bad(self, dataset: Dataset, found: protocol.VerifyEnd) -> str:
        """Have the bad chunks of a block image filled again. Why they are not yet, or ''."""
        async with dataset.lock:
            shows_old_blocks(dataset)
            if not found.unreplaced:
                return ""
            why = f"{found.unreplaced} bad chunks are to be read again"
            await dataset.change(state="filling", wanted=True, why=why)
            dataset.due.fill_soon()
            return why

    async def _withdraw(self, dataset: Dataset, bad: int) -> tuple[int, str]:
        """Withdraw bad files, so that readers get the source's. How many, and why not all."""
        async with dataset.lock:
            if dataset.no_store is not None:
                why = f"{bad} bad files are withdrawn when the disk is well"
                dataset.generation = dataclasses.replace(
                    dataset.generation, state="partial", failed=bad, why=why
                )
                return 0, why
            if dataset.reached is None:
                try:
                    await dataset.reach()
                except kit.errors.SourceError:
                    return 0, "bad files stay until the source answers: it has the only copy"
            # First of all, so that the successor of a killed agent continues.
            await dataset.change(
                state="partial", failed=bad, why=f"{bad} bad files could not be replaced"
            )
            withdrawn, why = await self._take_out(dataset)
            if why:
                await self._not_withdrawn(dataset, why)
                return withdrawn, f"{NOT_WITHDRAWN}: {why}"
            dataset.due.fill_later(due.PARTIAL_SECONDS)
            return withdrawn, ""

    async def finish(self, dataset: Dataset) -> bool:
        """Finish a withdrawal that failed or was cut short. False when bad files are left.

        The caller has the lock. A fill would take the bad files for good ones.
        """
        if not await dataset.current.has_bad_files():
            return True
        log.info("bad files of an earlier verify are withdrawn first", dataset=dataset.name)
        _, why = await self._take_out(dataset)
        if why:
            await self._not_withdrawn(dataset, why, state="partial")
        return not why

    async def finish_coming(self, dataset: Dataset, coming: Generation) -> bool:
        """The same of the generation that an update fills, which no view shows yet."""
        if not await coming.has_bad_files():
            return True
        log.info("bad files that it shares are withdrawn first", dataset=dataset.name)
        for part in ("marks", "files"):
            end = await self._withdraw_pass(dataset, part, coming)
            if end.result != "withdrawn":
                await coming.change(why=f"{NOT_WITHDRAWN}: {end.why or end.result}")
                return False
        return True

    async def _not_withdrawn(self, dataset: Dataset, why: str, **changes: Any) -> None:
        changes["why"] = f"{NOT_WITHDRAWN}: {why}"
        if dataset.no_store is None:
            await dataset.change(**changes)
        else:  # known again from the list, when the disk is well
            dataset.generation = dataclasses.replace(dataset.generation, **changes)
        dataset.due.fill_later(None)

    async def _take_out(self, dataset: Dataset) -> tuple[int, str]:
        """Both passes of a withdrawal: how many files are out, and why not all ('' if all).

        No file is deleted unless every mark above it is removed and the view knows that.
        """
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
        assert target.reached is not None
        task = tasks.withdraw(dataset, target, self._limits_of(dataset, "withdraw"), part)
        try:
            return await self._run(dataset, "withdraw", task, of)
        finally:
            dataset.job = None


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
