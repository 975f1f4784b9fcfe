"""Generations by their id when stored files are not to be believed: each shows its own source.

The view leaves a store in trouble by itself (``cache.action``); this is for what is mounted beside
it. A generation is doubted until all its files are verified. One with bad files that could not be
put right leaves, too (``cache.mending``).
"""

import contextlib
from collections.abc import Container

import structlog

import kit.child
import kit.errors
from cache import by_id
from cache.dataset import VIEW_SECONDS, Dataset
from cache.generation import Generation
from cache.store import identity
from cache.view import Stage

log = structlog.get_logger("leaving")

# After one that could not show its source: a look may take cache.source_timeout under the lock.
AGAIN_SECONDS = 20.0


def doubts(dataset: Dataset, each: Generation) -> bool:
    """Whether what it has stored is not to be shown now."""
    return dataset.no_store is not None or each.leaves or dataset.soundness.doubts(each.record)


def doubted(dataset: Dataset, shown: Container[str]) -> list[Generation]:
    """Those of ``shown``, ids that show the store, which are to leave it.

    The current one leaves when its view has left. What a frozen source had earlier only the store
    has: that stays.
    """
    others = [] if dataset.settings.freshness == "frozen" else [*dataset.earlier, *dataset.left]
    mine = [dataset.current] if dataset.stage is Stage.SOURCE else []
    return [each for each in (*mine, *others) if each.id in shown and doubts(dataset, each)]


async def leave(dataset: Dataset, leaving: Generation) -> None:
    """Have it show its source. The caller has the dataset's lock.

    SourceError while that cannot be read or is another one, OSError: it stays with the store.
    """
    if leaving is dataset.current:
        await kit.child.call(by_id.fall_back, dataset.view, leaving.id, deadline=VIEW_SECONDS)
    else:
        dataset.source_held = True
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
    dataset.source_held = True
    with contextlib.suppress(kit.errors.SourceError):
        async with dataset.looks:
            return await back.reach(dataset.cache.source_timeout, serve=False)
    return ""
