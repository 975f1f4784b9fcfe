"""What operators ask of the generations of a dataset: update, rollback, rescan, a manifest.

Each writes its choice, which holds over restarts; ``cache.dataset.succession`` carries it out. A
choice is a snapshot, or for a frozen dataset the *scan*: which listing of its source is wanted.
"""

import os
import time
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
import kit.settings
from cache.dataset.dataset import Dataset
from cache.dataset.generation import Generation
from cache.dataset.succession import Succession
from cache.settings import at_snapshot, snapshot_of
from cache.sources import base
from cache.store import published

PUBLISH_SECONDS = 900.0  # ten million entries take about two minutes
SUFFIX = ".manifest"  # of the file: whoever may publish can make no other one as root

_under_way: set[Dataset] = set()  # a call goes on when whoever asked was told that it takes long


async def update(succession: Succession, snapshot: str) -> None:
    """Go to ``snapshot``; '': to that of the settings, or the newest. AgentError."""
    dataset = succession.dataset
    if dataset.settings.freshness == "frozen":
        remedy = f"'nodeagent dataset rescan {dataset.name}' lists its source again"
        raise dataset.refused("it is frozen: its source has no snapshots", remedy)
    if dataset.no_store is not None:
        raise dataset.no_store
    if snapshot:
        if dataset.settings.source.kind == "rbd":  # the kernel's RBD client takes a line of words
            try:
                kit.settings.word(snapshot)
            except ValueError as error:
                raise kit.errors.SettingsError("snapshot", str(error), "correct it") from None
        await _choose(succession, snapshot, check=True)
        return
    async with dataset.lock:
        await _write(succession, {})


async def rollback(succession: Succession) -> None:
    """Go back to the generation that served before, and stay there. AgentError."""
    dataset = succession.dataset
    frozen = dataset.settings.freshness == "frozen"
    # One that retires for its bad files is filled again from its source; a frozen one has none.
    damaged = [] if frozen else _damaged(dataset)
    kept = [*dataset.earlier, *damaged]
    if not kept:
        why, name = "no earlier generation is kept", dataset.name
        again = f"update {name} --snapshot S' fills one"
        again = f"rescan {name}' lists the source again" if frozen else again
        raise dataset.refused(why, f"'nodeagent dataset {again}")
    back = max(kept, key=lambda each: each.record.served)
    if frozen:
        async with dataset.lock:
            await _write(succession, {"scan": back.scan})
        return
    await _choose(succession, back.record.snapshot, check=back in damaged)


def _damaged(dataset: Dataset) -> list[Generation]:
    """Those that retire for their bad files."""
    return [each for each in dataset.retired if each.record.damaged]


async def rescan(succession: Succession) -> None:
    """List the source of a frozen dataset again, into a new generation. AgentError."""
    dataset = succession.dataset
    if dataset.settings.freshness != "frozen":
        why = "it is not frozen: its versions are snapshots"
        raise dataset.refused(why, f"'nodeagent dataset update {dataset.name}' takes another one")
    if dataset.no_store is not None:
        raise dataset.no_store
    state = dataset.generation.state
    if dataset.removed or state not in ("complete", "partial"):
        raise dataset.refused(f"it is {dataset.state()}: its source is listed when it fills",
                       f"'nodeagent dataset warm {dataset.name}'")  # fmt: skip
    if pending(dataset) is not None and not stuck(dataset):
        raise dataset.refused("its source is being listed again already", "wait, or cancel it")
    async with dataset.lock:
        with base.asked_once():
            await dataset.reach()  # a rescan of what does not answer is refused at once
        # Never the scan of a stuck one: what that has listed may have changed since.
        await _write(succession, {"scan": f"{time.time_ns():x}"})


def stuck(dataset: Dataset) -> bool:
    """Whether the next generation waits: no more of it can be stored now."""
    return dataset.next is not None and dataset.next.record.state == "partial"


def pending(dataset: Dataset) -> str | None:
    """The id of the generation that a rescan (or a rollback) goes to, until it serves."""
    if dataset.settings.freshness != "frozen" or "scan" not in dataset.chosen:
        return None
    wanted = dataset.generation_of(dataset.settings.source, dataset.chosen["scan"])
    return wanted.id if wanted.id != dataset.current.id else None


async def cancel(succession: Succession) -> bool:
    """Give up a rescan that is under way; False when none is. The current generation serves on."""
    dataset = succession.dataset
    if pending(dataset) is None:
        return False
    async with dataset.lock:
        await _write(succession, {"scan": dataset.current.scan})
    return True


async def _write(succession: Succession, chosen: dict[str, str]) -> None:
    """The choice, durably; an update that is stuck is tried again. The caller has the dataset's
    lock."""
    succession.dataset.chosen = chosen
    await succession.dataset.save_state()
    next_one = succession.dataset.next
    try:
        if next_one is not None and stuck(succession.dataset) and "scan" not in chosen:
            await next_one.change(state="filling", why="")
    finally:
        succession.insist()  # the choice is kept, so it is carried out


async def _choose(succession: Succession, snapshot: str, *, check: bool) -> None:
    dataset = succession.dataset
    wanted = dataset.generation_of(at_snapshot(dataset.settings.source, snapshot))
    kept = {each.id for each in dataset.every_generation() if each not in _damaged(dataset)}
    async with dataset.lock:
        if check and wanted.id not in kept:
            dataset.source_mounted = True
            with base.asked_once():
                await wanted.source.reach(dataset.cache.source_timeout, serve=False)
        instead = snapshot_of(dataset.settings.source)
        await _write(succession, {"snapshot": snapshot, "instead": instead})


# --- the manifest of a complete snapshot


async def publish(dataset: Dataset, to: str) -> dict[str, Any]:
    """Write its manifest to the file ``to`` of this host; what it has. AgentError.

    The file appears whole. Nothing but another manifest is replaced, and nothing is written to
    the directories of the agent.
    """
    path = Path(to)
    if not path.is_absolute() or "\0" in to or os.path.normpath(to) != to:
        raise kit.errors.SettingsError("to", f"{to!r} is not an absolute path", "correct it")
    if path.suffix != SUFFIX:
        why = f"the name of {to!r} does not end in {SUFFIX}"
        raise kit.errors.SettingsError("to", why, f"as in /mnt/data/v7{SUFFIX}")
    if dataset in _under_way:
        raise dataset.refused("it is being published already", "its end is in the agent's log")
    _under_way.add(dataset)
    try:
        return await _publish(dataset, to)
    finally:
        _under_way.remove(dataset)


async def _publish(dataset: Dataset, to: str) -> dict[str, Any]:
    if dataset.source.block:
        raise dataset.refused("a block image is not listed", "nothing to do")
    if not dataset.source.immutable:
        raise dataset.refused("it is frozen: no snapshot says which version it is", "")
    if dataset.generation.state != "complete" or dataset.no_store is not None:
        why = f"it is {dataset.state()}, and only all of a snapshot can be published"
        raise dataset.refused(why, f"'nodeagent dataset warm {dataset.name} --wait'")
    current, cache = dataset.current, dataset.cache
    agents = [str(each) for each in (cache.store, cache.views, dataset.state_dir)]
    try:
        written: dict[str, Any] = await kit.child.call(
            published.write, to, current.folder, dict(current.record.marks), agents,
            deadline=PUBLISH_SECONDS,
        )  # fmt: skip
    except OSError as error:
        why = f"it cannot be written ({error.strerror})"
        raise kit.errors.HostError(f"manifest {to}", why, "see the path, and mount it") from error
    return written | {"path": to, "snapshot": current.record.snapshot}
