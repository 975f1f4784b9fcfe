"""What annotations of a CachedDataset ask for: ``kubectl annotate`` as 'nodeagent dataset'."""

from typing import TYPE_CHECKING

import kit.errors
from cache.dataset import choices
from kit.room import End

if TYPE_CHECKING:
    from cache.component import Cache


async def warm(cache: "Cache", name: str) -> None:
    await cache.jobs.ask(cache.get(name))


def warmed(cache: "Cache", name: str) -> End | None:
    """Once all of it is there. A fill that failed is tried again by itself."""
    state = cache.get(name).generation.state
    return End(True, "") if state == "complete" else None


async def verify(cache: "Cache", name: str) -> None:
    await cache.jobs.verify(cache.get(name), source=False)


def verified(cache: "Cache", name: str) -> End | None:
    found = cache.get(name).verification
    if found.pending:
        return None
    figures = found.result or {}
    message = found.why
    if bad := figures.get("bad", 0):
        replaced = figures.get("replaced", 0)
        message = f"{bad} files or directories were bad, {replaced} of them are replaced"
    if found.state == "good":
        return End(True, message)
    return End(False, f"{found.state}: {message}")


async def pause(cache: "Cache", name: str) -> None:
    """A dataset that does not fill needs no pause."""
    try:
        await cache.jobs.pause(cache.get(name))
    except kit.errors.RefusedError:
        pass


def paused(cache: "Cache", name: str) -> End | None:
    generation = cache.get(name).generation
    return End(True, "" if generation.paused else f"nothing to pause: it is {generation.state}")


async def rescan(cache: "Cache", name: str) -> None:
    """One that is under way, perhaps begun by an agent that has ended, is not begun again, unless
    it is stuck."""
    dataset = cache.get(name)
    if choices.pending(dataset) is None or choices.stuck(dataset):
        await choices.rescan(cache.successions[name])


def rescanned(cache: "Cache", name: str) -> End | None:
    dataset = cache.get(name)
    return End(True, "") if choices.pending(dataset) is None else None
