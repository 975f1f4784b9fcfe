"""Generations by their id when stored files are not to be believed: each shows its own source.

The view leaves a store in trouble by itself (``cache.dataset.action``); this is for what is mounted
beside it. A generation is suspect until all its files are verified.

An earlier one with bad files retires: it shows its source, what is bad is taken out of its tree
(``cache.work.withdrawals``) for those who have that tree itself, and it is discarded when nobody
uses it. Who wants it again has it filled again.
"""

import contextlib
import dataclasses
from collections.abc import Container

import structlog

import kit.child
import kit.errors
from cache.dataset.dataset import VIEW_SECONDS, Dataset, is_busy
from cache.dataset.generation import Generation
from cache.fill import protocol
from cache.store import identity
from cache.views import by_id
from cache.views.view import Stage

log = structlog.get_logger("leaving")

# After one that could not show its source: a look may take cache.source_timeout under the lock.
AGAIN_SECONDS = 20.0


def suspects(dataset: Dataset, each: Generation) -> bool:
    """Whether what it has stored is not to be shown now."""
    return dataset.no_store is not None or each.leaves or dataset.soundness.suspects(each.record)


def suspect(dataset: Dataset, shown: Container[str]) -> list[Generation]:
    """Those of ``shown``, ids that show the store, which are to leave it.

    The current one leaves when its view has left. What a frozen source had earlier only the store
    has: that stays.
    """
    others = [] if dataset.settings.freshness == "frozen" else [*dataset.earlier, *dataset.retired]
    mine = [dataset.current] if dataset.stage is Stage.SOURCE else []
    return [each for each in (*mine, *others) if each.id in shown and suspects(dataset, each)]


async def leave(dataset: Dataset, leaving: Generation) -> None:
    """Have it show its source. The caller has the dataset's lock.

    SourceError while that cannot be read or is another one, OSError: it stays with the store.
    """
    if leaving is dataset.current:
        await kit.child.call(by_id.fall_back, dataset.view, leaving.id, deadline=VIEW_SECONDS)
    else:
        dataset.source_mounted = True
        async with dataset.looks:
            reached = await leaving.source.reach(dataset.cache.source_timeout, serve=True)
        if other := identity.difference(leaving.record.marks, reached.marks):
            thing = f"dataset {dataset.name}: generation {leaving.id}"
            raise kit.errors.SourceError(thing, other, "it stays with the SSD")
        await kit.child.call(
            by_id.show_source, dataset.view, leaving.id, reached.root, reached.stamp,
            deadline=VIEW_SECONDS,
        )  # fmt: skip
    log.info("generation is read from its source", dataset=dataset.name, generation=leaving.id)


async def outdated(dataset: Dataset, back: Generation) -> str:
    """Why the source of an earlier generation is another one now, '' when it is the same.

    One whose source does not answer serves from the store, as the current one would.
    """
    dataset.source_mounted = True
    with contextlib.suppress(kit.errors.SourceError):
        async with dataset.looks:
            return await back.reach(dataset.cache.source_timeout, serve=False)
    return ""


async def found_also(dataset: Dataset, found: protocol.VerifyEnd) -> int:
    """Retire others in which a verify found bad files by the way; how many files that is.

    The pass has put them on their lists.
    """
    count = 0
    for each in [*dataset.earlier, *dataset.retired]:
        if bad := found.also.get(each.folder, 0):
            count += bad
            await retire(dataset, each, each.record.damaged + bad)
    return count


async def retire(dataset: Dataset, each: Generation, damaged: int) -> None:
    """So many files of an earlier generation are bad, and on its list. AgentError, OSError when
    that cannot be kept."""
    async with dataset.lock:
        if each in dataset.earlier:
            dataset.earlier.remove(each)
            dataset.retired.append(each)
        elif each not in dataset.retired:
            return  # it serves again, or has gone: another one looks after it
        each.leaves = True
        why = f"{damaged} files of it were bad on the SSD"
        log.warning("generation retires", dataset=dataset.name, generation=each.id, why=why)
        if dataset.no_store is None:
            await each.change(damaged=damaged, why=why)
        else:  # known again from the list, when the disk is well
            each.record = dataclasses.replace(each.record, damaged=damaged, why=why)
    dataset.wake()


def tainted(dataset: Dataset) -> Generation | None:
    """One that retires with bad files in its tree."""
    return next((each for each in dataset.retired if each.leaves), None)


async def take_out(dataset: Dataset) -> bool:
    """Take what is bad out of one that retires, after it left; whether that was done. The caller
    has the dataset's lock."""
    retired = tainted(dataset)
    if retired is None or is_busy(dataset) or dataset.no_store is not None:
        return False
    if not retired.due.withdraw():
        return False
    retired.due.withdraw_later()
    await dataset.withdraw(dataset, retired)
    return not retired.leaves


async def spoiled(next_one: Generation) -> bool:
    """Whether files that an update has linked were found bad since: those are filled anew."""
    if not await next_one.has_bad_files():
        return False
    next_one.fits = False
    await next_one.change(state="filling", why="files that it shares were bad on the SSD")
    next_one.due.fill_soon()
    return True
