"""Damage in generations beside the current one: who has it, and how it is put right.

A job may read an earlier generation by its id, and a rollback may make it the current one. Bad
files of it stand on its own list (``cache.store.generations``); a pass takes them from another
generation or from its source (``cache.fill.mend``). Until that is done what is mounted by its id
shows its source, where that can be read; else what is bad is taken out of its tree.
"""

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import structlog

import kit.errors
from cache.dataset import Dataset
from cache.fill import protocol
from cache.generation import Generation

log = structlog.get_logger("scrub")

# For the fill of the current generation that puts right what both have: then that is linked.
PATIENCE_SECONDS = 60.0
FOUND = "files of it were bad on the SSD; they are being put right"


async def found_also(dataset: Dataset, found: protocol.VerifyEnd) -> int:
    """Note what a verify found in earlier generations by the way; how many files that is.

    The pass has put them on their lists.
    """
    count = 0
    for each in list(dataset.earlier):
        if bad := found.also.get(each.folder, 0):
            count += bad
            why = "files that it shares with another generation were bad on the SSD"
            await note(dataset, each, each.record.damaged + bad, why)
    return count


async def note(dataset: Dataset, each: Generation, damaged: int, why: str) -> None:
    """How many of its files are bad now. AgentError, OSError when that cannot be kept."""
    async with dataset.lock:
        if each not in dataset.earlier:
            return  # it serves again, or has gone: another one looks after it
        each.leaves = damaged > 0
        if damaged > each.record.damaged:
            each.noted = time.monotonic()
        if (each.record.damaged, each.record.why) == (damaged, why):
            return
        if dataset.no_store is None:
            await each.change(damaged=damaged, why=why)
        else:  # known again from the list, when the disk is well
            each.record = dataclasses.replace(each.record, damaged=damaged, why=why)
    dataset.wake()


async def spoiled(coming: Generation) -> bool:
    """Whether files that an update has linked were found bad since: those are filled anew."""
    if not await coming.has_bad_files():
        return False
    coming.fits = False
    await coming.change(state="filling", why="files that it shares were bad on the SSD")
    coming.due.fill_soon()
    return True


def may_begin(dataset: Dataset, each: Generation) -> bool:
    """What is bad in the current generation too is put right there first."""
    whole = dataset.generation.state == "complete" or bool(dataset.generation.held)
    return whole or time.monotonic() - each.noted >= PATIENCE_SECONDS


async def reach(dataset: Dataset, each: Generation) -> str:
    """Reach the source of an earlier generation; why it cannot be read, or ''.

    The caller has the lock.
    """
    dataset.source_held = True
    try:
        async with dataset.looks:
            other = await each.reach(dataset.cache.source_timeout, serve=False)
    except kit.errors.SourceError as error:
        return error.cause
    if other:
        each.reached = None
        return f"its source is another one now: {other}"
    return ""


@contextlib.asynccontextmanager
async def source_of(dataset: Dataset, each: Generation) -> AsyncIterator[str]:
    """Keep its source mounted meanwhile, if it answers; why it does not, or ''."""
    dataset.mending = True
    try:
        async with dataset.lock:
            why = await reach(dataset, each)
        yield why
    finally:
        dataset.mending = False
        if each is not dataset.current:  # a rollback may have come
            each.reached = None
        dataset.wake()


async def ended(dataset: Dataset, each: Generation, end: protocol.End, why: str) -> None:
    """Note what a pass left. ``why``: its source cannot be read."""
    if end.verify is None or end.result not in ("good", "bad"):
        return
    left = end.verify.unreplaced
    cause = f"{left} files were bad on the SSD: {end.why}" if left else ""
    before = each.record.damaged, each.record.why
    await note(dataset, each, left, f"{cause} ({why})" if cause and why else cause)
    if each not in dataset.earlier:  # as in ``note``
        return
    each.unmended = left > 0
    # What was taken out can be read by nobody: its readers need not leave.
    each.leaves = bool(left) and not why and dataset.settings.freshness != "frozen"
    if end.verify.replaced or before != (each.record.damaged, each.record.why):  # else it was said
        event = "bad files cannot be put right" if left else "bad files were put right"
        log.info(event, dataset=dataset.name, generation=each.id,
                 good=end.verify.replaced, left=left, why=end.why)  # fmt: skip


async def refuse_damaged(dataset: Dataset, each: Generation) -> None:
    """RefusedError when bad files of a generation have no source any more."""
    if not each.record.damaged:
        return
    why = f"are not put right: {each.record.why}"
    if dataset.settings.freshness != "frozen":
        async with dataset.lock:
            why = await reach(dataset, each)
    if why:
        name = each.record.snapshot or each.id
        cause = f"{each.record.damaged} files of {name} were bad on the SSD, and {why}"
        remedy = (
            f"make the source of {name} readable again, or 'nodeagent dataset update "
            f"{dataset.name} --snapshot S' to another one"
        )
        raise dataset.refused(cause, remedy)
