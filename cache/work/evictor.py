"""The slot of the evictions: files are taken out beside the jobs of other datasets.

What is beyond a budget goes first, then what operators ask for and what a killed agent began. A
fill may take hours, and lack the very room that an eviction gives: so none waits for the other's
end. Who needs both has the slot of the jobs first and waits here for one eviction at most, which
waits for no job.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

import kit.errors
import kit.tasks
from cache.dataset.dataset import Dataset
from cache.dataset.figures import Eviction
from cache.space import at_work, budgets
from cache.work import slot

log = structlog.get_logger("eviction")

RETRY_SECONDS = 5.0  # after one that could not run


class Evictor:
    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        slots: slot.Slot,
        kept: budgets.Budgets,
        withdrawn: Callable[[Dataset], Awaitable[bool]],
        clear_way: Callable[[Dataset], Awaitable[None]],
        room_was_made: Callable[[bool], Awaitable[None]],
    ) -> None:
        """``withdrawn``: finishes a withdrawal; False when bad files are left. ``clear_way``: ends
        the scrub of a dataset. ``room_was_made``: files were taken out; True: for an operator."""
        self._datasets, self._slots, self._budgets = datasets, slots, kept
        self._withdrawn, self._clear_way = withdrawn, clear_way
        self._room_was_made = room_was_made
        self._raised: dict[Dataset, str] = {}  # with why that could not be written down yet
        self._wake = asyncio.Event()
        self._ending = False

    def budget_raised(self, dataset: Dataset) -> None:
        """What it gives now is wanted again. A pass may have its lock for minutes."""
        self._raised.setdefault(dataset, "")
        self.wake()

    def wake(self) -> None:
        """Something may be queued, or be evicted from now."""
        self._wake.set()

    def end(self) -> None:
        """Begin no other eviction: ``follow`` returns when the one that runs has ended."""
        self._ending = True
        self._budgets.end()
        self._wake.set()

    async def follow(self) -> None:
        """Runs until it is cancelled, or ``end`` was called."""
        while not self._ending:
            self._wake.clear()
            await self._note_wishes()
            before = self._freed()
            await self._budgets.keep()
            if self._freed() != before:
                await self._room_was_made(False)
            async with self._budgets.turn:
                dataset = None if self._ending else self._slots.next_eviction()
                if dataset is not None:
                    asked = dataset.eviction.queued
                    with self._slots.work.on(at_work.EVICTIONS, dataset.name):
                        ran = await self._turn_of(dataset)
            if dataset is not None and ran:
                await self._room_was_made(asked)
                continue
            patience = budgets.LOOK_SECONDS if self._budgets.over else None
            soon = dataset is not None or self._raised
            await kit.tasks.until(self._wake, RETRY_SECONDS if soon else patience)
        await self._note_wishes()

    def _freed(self) -> int:
        """SSD bytes since the agent's start."""
        return sum(each.freed for each in self._datasets.values())

    async def _turn_of(self, dataset: Dataset) -> bool:
        """Take out what is to go; whether that could be tried."""
        try:
            await self._clear_way(dataset)
            if dataset.eviction.queued:
                self._slots.rests(dataset)
                await self._budgets.take_out(dataset)
            else:
                await self._finish(dataset)
        except (kit.errors.AgentError, OSError, RuntimeError, ValueError) as error:
            log.error("eviction could not run", dataset=dataset.name, why=str(error))
            if dataset.eviction.pending:
                dataset.eviction = Eviction("failed", why=str(error))
            dataset.current.queued = False
            return False
        return True

    async def _note_wishes(self) -> None:
        """Durably, as ``wanted``, in those that are not whole. What fails is tried again later."""
        wishes, self._raised = self._raised, {}
        for dataset, told in wishes.items():
            try:
                async with dataset.lock:
                    now = dataset.generation
                    begun = now.state in ("partial", "filling") and not now.paused
                    if begun and not dataset.removed:
                        await dataset.change(wanted=True)
                        dataset.retry_now()
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                if str(error) != told:
                    log.error("dataset is not filled again", dataset=dataset.name, why=str(error))
                self._raised[dataset] = str(error)

    async def _finish(self, dataset: Dataset) -> None:
        """Finish one that was cut short. Its fill stays queued when it may go on then."""
        async with dataset.lock:
            lost = dataset.reached is None or dataset.no_store is not None or dataset.removed
            lost = lost or dataset.generation.state == "stale"
            if not dataset.current.queued or not dataset.generation.evicting:
                return
            whole = not lost and await self._withdrawn(dataset)
            dataset.current.queued = whole and await self._budgets.finish(dataset)
        dataset.wake()
