"""How the copy of a block image leaves the store: all of it, or nothing.

Jobs read the mapped source from then on. Where one device shows copy and source, open files go on
from the source too; elsewhere who has a file of the copy open is waited for, because its space is
free only when the loop device over it has ended. Where nothing can map the image the view shows
nothing afterwards, as before the first fill: so nobody may hold it, and no pod may have been given
it.

As with trees, ``evicting`` in generation.json is durable before the view changes, and is taken back
when the copy has gone: what a killed agent began, the next one finishes.
"""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
from cache.dataset.dataset import VIEW_SECONDS, Dataset
from cache.dataset.generation import STORE_SECONDS
from cache.fill import protocol, space
from cache.fill.protocol import Least
from cache.store import image_copy
from cache.views import view
from cache.views.view import Stage
from linux import in_use, loop, mountinfo, procfs

log = structlog.get_logger("eviction")

_LOOKS, _LOOK_SECONDS = 20, 0.1  # the kernel ends a loop device some time after its last mount


async def settle(dataset: Dataset, limits: protocol.Limits, **changes: Any) -> bool:
    """Take the copy out if it is beyond ``limits``; whether it was. AgentError: it stays for now.

    The caller has the lock. ``changes``: to generation.json, when it goes.
    """
    allowed = dataclasses.asdict(limits)
    if not await kit.child.call(is_beyond, dataset.folder, allowed, deadline=STORE_SECONDS):
        return False
    await _reach(dataset)
    if not _root(dataset):
        await _refuse_held(dataset)
    figures = dataset.figures
    left = {"left_files": max(figures.files, 1), "left_bytes": figures.bytes}
    await dataset.change(state="partial", evicting=True, **left, **changes)
    await _take_out(dataset)
    return True


async def finish(dataset: Dataset) -> None:
    """Take out the copy of an eviction that has begun. AgentError: it goes on later."""
    await _reach(dataset)
    await _take_out(dataset)


async def _take_out(dataset: Dataset) -> None:
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
        raise waits(dataset, why, "it goes on when the job has closed it")
    dataset.evicted += chunks
    await dataset.change(done_files=0, done_bytes=0, used=0, inodes=0, evicting=False)
    dataset.show_kept_figures()
    dataset.freed += max(0, before - dataset.used())
    log.info("block image evicted", dataset=dataset.name, chunks=chunks, bytes=before)


def waits(dataset: Dataset, cause: str, remedy: str) -> kit.errors.HostError:
    return kit.errors.HostError(f"eviction from dataset {dataset.name}", cause, remedy)


def _root(dataset: Dataset) -> str:
    return dataset.reached.root if dataset.reached is not None else ""


async def _reach(dataset: Dataset) -> None:
    """Jobs can read the source, if anything can map it. AgentError."""
    if not _root(dataset):
        await dataset.reach(serve=True)
    if dataset.generation.state == "stale":
        raise waits(dataset, "its source is another one now", "it begins anew")


async def _refuse_held(dataset: Dataset) -> None:
    """HostError while somebody would miss a view that nothing but the copy can show."""
    by = dataset.use.by or await kit.child.call(given_to, dataset.view, deadline=VIEW_SECONDS)
    if by:
        why = f"nothing here can map its image, and it is held by {by}"
        raise waits(dataset, why, "it goes on when that has ended")


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
