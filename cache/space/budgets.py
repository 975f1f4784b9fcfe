"""Which datasets keep fewer or more of their files.

Three things change it: budgets, the end of a fill that had no room or some left, and an operator
who asks for an eviction. Who gives to whom is decided in ``cache.space.victims``.

One eviction runs at a time (``Budgets.turn``), so that no two give what one of them would do. Who
waits for that has no dataset's lock: what is evicted takes it.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal

import structlog

import kit.errors
from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.space import at_work, evictions, limits, victims
from cache.store import subset
from cache.store.subset import NOTHING, Amount

log = structlog.get_logger("budget")

# Rounds of choosing a share and filling it before a fill is over: estimates become figures.
MOST_ROUNDS = 8
LOOK_SECONDS = 10.0  # between two tries to take out what is beyond a budget
# What gave room to another dataset leaves it alone for so long.
GAVE_SECONDS = 900.0
FIRST = 1 / 256  # of the node's budget: what a dataset is given to be listed
LEAST = 2**20  # the same, in SSD bytes
LISTING = 16  # the part of a dataset that gives way for the list of the next generation
MOST_LISTINGS = 3  # so many parts, for the next generation
BLOCK = 4096  # SSD bytes that a file takes beside its own, at most
# SSD bytes that are left over, as a part of what is used, for which a larger share is looked for.
SPARE = 1 / 32
EVICTED = "evicted"  # paused: nothing is filled until an operator asks
TAKEN = "an operator had files taken out"
UPDATED = "it gave room to its next generation"
SHORT = "others filled the disk, and the reserve was short"
_WAITS = (kit.errors.AgentError, OSError, RuntimeError)  # what keeps an eviction from going on


class Budgets:
    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        run: evictions.Run,
        limits_of: evictions.LimitsOf,
        foreign: Callable[[], int],
        clear_way: Callable[[Dataset], Awaitable[None]],
        look: Callable[[], Awaitable[None]],
        short: Callable[[], Amount],
        work: at_work.Work | None = None,
    ) -> None:
        """``foreign``: SSD bytes that belong to no dataset, and stay. ``clear_way``: before a pass
        over a dataset. ``look``: finds who uses datasets now. ``short``: what the disk lacks of the
        reserve, because others fill it. ``work``: the slots."""
        self.turn = asyncio.Lock()
        self._work = work or at_work.Work()
        self._datasets = datasets
        self._foreign, self._clear_way, self._look = foreign, clear_way, look
        self._short = short
        self._short_since: float | None = None  # monotonic
        self._lacking = NOTHING  # of the reserve, for longer than a look
        self._limits_of = limits_of
        self._evictions = evictions.Evictions(run, limits_of)
        self._ending = False
        self.over = False  # something takes more than its budget
        self._look_again = 0.0  # monotonic time from which budgets are looked at again
        self._rounds: dict[str, tuple[int, bool]] = {}  # how many, and whether one shrank
        self._listed: dict[str, tuple[str, int]] = {}  # the next one, and its parts
        # What a dataset lacked when others gave: where that changed nothing, they give no more.
        self._lacked: dict[str, tuple[str, int, int]] = {}
        self._kept: dict[str, list[str]] = {}  # what lacks room, '' for the store: what is kept

    async def finish(self, dataset: Dataset) -> bool:
        """Finish an eviction that was cut short. False when it cannot be now.

        The caller has ``turn`` and the lock of the dataset.
        """
        if not dataset.generation.evicting:
            return True
        try:
            await self._evictions.finish(dataset)
        except _WAITS as error:
            self._evictions.tell(dataset, error)
            dataset.due.fill_later(None)
            await dataset.change(why=str(error))
            return False
        if dataset.source.block:  # whoever it gave its room to is to have it
            dataset.due.fill_later(GAVE_SECONDS)
            return False
        return not dataset.generation.paused

    async def share_changes(self, dataset: Dataset, end: protocol.FillEnd | None) -> bool:
        """Whether the dataset now keeps another share of its files, for which it is filled again.

        What lacks room gets it from others first. What fits is estimated, and each round knows
        more. So it grows until something did not fit, shrinks then, and grows no more.
        """
        if end is None or dataset.no_store is not None:
            return False
        kept = dataset.generation.kept_share
        rounds, shrank = self._rounds.pop(dataset.name, (0, False))
        if rounds >= MOST_ROUNDS:
            return False
        gave = await self._make_room(dataset, dataset.current, end)
        # What it shares with an earlier generation takes no room of its own. That one goes first.
        if dataset.source.block or dataset.earlier or dataset.retired:
            return gave
        spare = kept < subset.ALL and end.room > end.used * SPARE and not shrank
        if not (end.short or spare or gave):
            return False
        try:
            async with self.turn, dataset.lock:
                await dataset.change(used=end.used, inodes=end.inodes)
                if await self._evictions.settle(dataset, grow=gave or not end.short) or gave:
                    shrank = (shrank and not gave) or dataset.generation.kept_share < kept
                    self._rounds[dataset.name] = rounds + 1, shrank
                    return True
        except _WAITS as error:
            self._evictions.tell(dataset, error)
            dataset.due.fill_later(None)
        return False

    async def has_room_for(self, dataset: Dataset, next_one: Generation, end: protocol.End) -> bool:
        """After a fill of the next generation: whether others gave it room to go on.

        When they gave all they can it ``fits``, unless something else is wrong with it.
        """
        fill = end.fill
        if end.result != "partial" or fill is None or not (fill.left_files or fill.short):
            return False
        asks = fill.short or next_one.record.kept_share == subset.ALL
        if asks and await self._make_room(dataset, next_one, fill):
            return True
        if fill.short and not next_one.record.skeleton and not (dataset.earlier or dataset.retired):
            # Not even listed: the generation that serves takes all there is. What that many parts
            # of it do not hold is no list, so it keeps the rest, and the update waits.
            last, rounds = self._listed.get(dataset.name, ("", 0))
            rounds = rounds if last == next_one.id else 0
            if rounds >= MOST_LISTINGS:
                return False
            self._listed[dataset.name] = next_one.id, rounds + 1
            before, used = dataset.freed, dataset.used()
            wanted = max(_to_list(dataset), used // LISTING)
            inodes = limits.inodes_of(dataset) // LISTING + 1
            async with self.turn:
                await self._ask(dataset, UPDATED, Amount(wanted, inodes))
            return dataset.freed > before
        sound = next_one.record.skeleton and not next_one.figures.failed
        next_one.fits = sound and not next_one.source.block
        return False

    def waits_for(self, dataset: Dataset) -> str:
        """What dataset lacks room for as long as it is there, to be added to why it is partial."""
        found = ""
        if kept := self.in_the_way(dataset.name):
            found += f"; kept, and so in the way: {', '.join(kept)}"
        if dataset.next is not None and dataset.current.gone:
            now = dataset.generation.snapshot or dataset.current.id
            found += f"; it waits for room that {now} cannot give: its snapshot is gone"
        old = [each.record.snapshot or each.id for each in (*dataset.earlier, *dataset.retired)]
        return f"{found}; it waits for the room of {', '.join(old)}" if old else found

    def lack(self) -> bool:
        """Whether somebody is to give room now: what is filled would find none."""
        return time.monotonic() >= self._look_again and self._next(()) is not None

    def end(self) -> None:
        """Ask no other dataset from now."""
        self._ending = True

    async def keep(self) -> None:
        """Take files out of datasets until everything is within its budget, or all were asked."""
        async with self.turn:
            if time.monotonic() >= self._look_again:
                await self._keep()

    async def _keep(self) -> None:
        self._look_at_reserve()
        asked: set[str] = set()
        if self._next(asked) is not None:
            await self._look()
        while not self._ending and (name := self._next(asked)) is not None:
            asked.add(name)
            await self._ask_for_all(self._datasets[name])
            self._look_at_reserve()
        for name, dataset in self._datasets.items():
            # Nor does an eviction that an operator asked for spare earlier generations.
            dataset.no_room = name in asked or dataset.generation.paused == EVICTED
        shares, store = self._shares(), self._store()
        stays = store is not None and store.beyond(shares)
        self._kept[""] = [each.name for each in shares if each.keep and each.bytes] if stays else []
        self.over = bool(asked) or self._short_since is not None
        self._look_again = time.monotonic() + LOOK_SECONDS if self.over else 0.0

    def disk_changed(self) -> bool:
        """The disk has begun to lack some of the reserve since budgets were looked at."""
        return self._short_since is None and self._short() != NOTHING

    def _look_at_reserve(self) -> None:
        """A shortage counts when it lasts: a file system takes some in advance for a moment."""
        now, lacking = time.monotonic(), self._short()
        if lacking == NOTHING:
            self._short_since, self._lacking = None, NOTHING
            return
        if self._short_since is None:
            self._short_since = now
        lasts = now - self._short_since >= LOOK_SECONDS
        self._lacking = lacking if lasts else NOTHING

    async def _ask_for_all(self, dataset: Dataset) -> None:
        """Have a dataset give what it is beyond its budgets, and what the disk lacks.

        A kept one only what it is beyond its own.
        """
        if self._lacking == NOTHING or dataset.settings.keep:
            await self._ask(dataset)
        elif await self._ask(dataset, SHORT, self._lacking):  # twice as much: it goes on filling
            dataset.due.fill_later(GAVE_SECONDS)

    def _shares(self) -> list[victims.Share]:
        busy = self._work.of(at_work.JOBS)  # also between its passes, and until its end is noted
        shares = [limits.share_of(each) for each in self._datasets.values()]
        return [dataclasses.replace(s, ready=s.ready and s.name not in busy) for s in shares]

    def _store(self) -> victims.StoreBudget | None:
        for dataset in self._datasets.values():
            cache = dataset.cache
            short = self._lacking != NOTHING
            return victims.StoreBudget(cache.budget, cache.budget_inodes, self._foreign(), short)
        return None

    def _next(self, asked: Collection[str]) -> str | None:
        store = self._store()
        return None if store is None else victims.next_one(self._shares(), store, asked)

    async def _ask(self, dataset: Dataset, why: str = "", wanted: Amount = NOTHING) -> bool:
        """Have a dataset give what is beyond, and what is ``wanted``. False when it cannot now.
        ``why``: '' for what is beyond a budget.

        The caller has ``turn``.
        """
        if dataset.earlier or dataset.retired:
            dataset.no_room = True  # generations that nobody uses go before files of the current
            dataset.wake()
            if not dataset.earlier_used:
                return False
        done = False
        try:
            with self._work.on(at_work.EVICTIONS, dataset.name):
                await self._clear_way(dataset)
                async with dataset.lock:
                    allowed = None  # those of the settings
                    if wanted != NOTHING:
                        allowed = dataclasses.replace(
                            self._limits_of(dataset, "evict"),
                            wanted=wanted.bytes, wanted_inodes=wanted.inodes,
                        )  # fmt: skip
                    share = limits.share_of(dataset)
                    why = why or victims.exceeded(share, self._shares(), self._store())
                    await self._evictions.settle(
                        dataset, grow=False, limits=allowed, own=True, why=why
                    )
            done = True
        except _WAITS as error:
            self._evictions.tell(dataset, error)
        dataset.wake()
        return done

    # --- room for a dataset that lacks it

    def in_the_way(self, name: str) -> list[str]:
        """What is kept, so that dataset ``name`` lacks room; '': so that the store does."""
        return self._kept.get(name, [])

    async def _make_room(self, dataset: Dataset, target: Generation, end: protocol.FillEnd) -> bool:
        """Have others give what a dataset lacks after a fill; whether one gave something."""
        async with self.turn:
            name, lacked = dataset.name, (target.id, end.left_files, end.left_bytes)
            self._kept.pop(name, None)
            wanted = _lacks(dataset, end)
            if wanted == NOTHING or self._lacked.get(name) == lacked:
                return False
            await self._look()
            asked: set[str] = set()
            lacks, gave = wanted.bytes, False
            while lacks > 0 and (other := victims.giver(self._shares(), name, asked)) is not None:
                asked.add(other)
                before = self._datasets[other].freed
                settled = await self._ask(
                    self._datasets[other], f"it gave room to dataset {name}", wanted
                )
                freed = self._datasets[other].freed - before
                if freed > 0:
                    log.info("room was made", dataset=name, by=other, bytes=freed)
                    self._datasets[other].due.fill_later(GAVE_SECONDS)
                    lacks, gave = lacks - freed, True
                elif settled:
                    break  # there is enough
            if gave:
                self._lacked[name] = lacked
            elif lacks > 0:
                self._kept[name] = victims.in_the_way(self._shares(), name)
            return gave

    # --- what operators ask for

    async def take_out(self, dataset: Dataset) -> None:
        """The eviction that was asked for; ``Dataset.eviction`` shows what became of it.

        The caller has ``turn``.
        """
        asked = dataset.eviction
        files, before = dataset.evicted, dataset.freed
        dataset.eviction = dataclasses.replace(asked, state="running")
        result: Literal["evicted", "failed"] = "failed"
        try:
            async with dataset.lock:
                # Budgets and disk have evictions of their own (``keep``).
                allowed = self._limits_of(dataset, "evict")
                allowed = dataclasses.replace(
                    allowed, budget=allowed.others + asked.to, inodes=2**62, disk=False
                )
                await self._evictions.settle(
                    dataset, grow=False, limits=allowed, alone=True,
                    paused=EVICTED, wanted=False, why=TAKEN,
                )  # fmt: skip
            result, why = "evicted", ""
        except _WAITS as error:
            why = str(error)
            log.warning("eviction waits", dataset=dataset.name, why=why)
        dataset.eviction = dataclasses.replace(
            asked, state=result, why=why, files=dataset.evicted - files,
            bytes=dataset.freed - before, at=time.time(),
        )  # fmt: skip
        dataset.wake()


def _to_list(dataset: Dataset) -> int:
    """SSD bytes to list a dataset with, before it is known what it needs."""
    return max(int(dataset.cache.budget * FIRST), LEAST)


def _lacks(dataset: Dataset, end: protocol.FillEnd) -> Amount:
    """What its budgets let it have of what is left to copy, at most."""
    own, left = dataset.settings, end.left_files
    size = end.left_bytes + left * BLOCK
    if end.short and not left:  # it had no room for directories, so files are not listed yet
        size = _to_list(dataset)
    if size:  # so much is left over then that a larger share is looked for
        size += int((dataset.used() + size) * SPARE)
    part = 1.0
    if own.budget and size:
        part = min(part, (own.budget - dataset.used()) / size)
    if own.budget_inodes and left:
        part = min(part, (own.budget_inodes - limits.inodes_of(dataset)) / left)
    part = max(part, 0.0)
    return Amount(math.floor(size * part), math.floor(left * part))
