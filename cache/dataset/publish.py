"""Publishing the manifest of a complete snapshot, as operators ask for it."""

import os
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
from cache.dataset.dataset import Dataset
from cache.store import published

PUBLISH_SECONDS = 900.0  # ten million entries take about two minutes
SUFFIX = ".manifest"  # of the file: whoever may publish can make no other one as root

_under_way: set[Dataset] = set()  # a call goes on when whoever asked was told that it takes long


async def publish(dataset: Dataset, to: str) -> dict[str, Any]:
    """Write its manifest to the file ``to`` of this host; what it has. AgentError.

    The file appears whole. Nothing but an older manifest is replaced, and nothing is written to
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
