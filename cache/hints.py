"""Hints: what jobs open while a dataset fills is copied sooner.

fanotify reports every open on the overlay, from all mount namespaces. It is watched in short
windows (settings ``hints``): a sample of the opens is enough. For each dataset that fills behind an
overlay, a child process watches, because taking an event opens the file a second time, which hangs
when the source hangs.
"""

import asyncio
import contextlib
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

import kit.errors
import kit.line_worker
import kit.processes
from cache.dataset import Dataset
from cache.view import Stage
from linux import fanotify, mountinfo, procfs

log = structlog.get_logger("hints")

CHECK_SECONDS = 2.0
SILENCE_SECONDS = 600.0  # a watcher that hangs is killed after this
MOST_IN_A_WINDOW = 512


@dataclass(frozen=True)
class Watch:
    view: str
    window: float
    every: float


@dataclass(frozen=True)
class Opened:
    paths: list[str]  # relative to the dataset


def _about(dataset: Dataset) -> str:
    return f"hints of dataset {dataset.name}"


async def _listen(dataset: Dataset) -> None:
    """To the end of the watcher, which is killed when this is cancelled."""
    settings = dataset.cache.hints
    worker = kit.line_worker.Worker(
        "cache.hints:watch", Opened, about=_about(dataset), largest=2**22
    )
    request = Watch(dataset.view, settings.window, settings.every)
    try:
        async with contextlib.aclosing(worker.listen(request, SILENCE_SECONDS)) as messages:
            async for opened in messages:
                if opened.paths and dataset.job is not None:
                    await dataset.job.hint(opened.paths)
    except (kit.errors.AgentError, OSError, RuntimeError) as error:
        # For example, the view was swapped. Only hints are lost.
        log.debug("hints: the watcher ended", dataset=dataset.name, why=str(error))


async def follow(datasets: Mapping[str, Dataset]) -> None:
    """Have a watcher for each dataset that fills behind an overlay. Runs until cancelled."""
    listeners: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            wanted = {
                name: dataset
                for name, dataset in datasets.items()
                if dataset.cache.hints.enabled
                and dataset.job is not None
                and dataset.job.kind == "fill"
                and dataset.stage is Stage.OVERLAY
                and not dataset.source.block  # it is filled from its beginning to its end
            }
            for name in [n for n in listeners if n not in wanted or listeners[n].done()]:
                listeners.pop(name).cancel()
            for name, dataset in wanted.items():
                # A killed watcher may still hang in the kernel; another one would hang beside it.
                if name not in listeners and not kit.processes.hanging(_about(dataset)):
                    listeners[name] = asyncio.create_task(_listen(dataset), name=_about(dataset))
            await asyncio.sleep(CHECK_SECONDS)
    finally:
        for listener in listeners.values():
            listener.cancel()


# --- the watcher's process


def watch() -> None:
    """Report what is opened, once per window, until the agent ends."""
    request = kit.line_worker.hear(Watch)
    if request is None:
        return
    try:
        while True:
            kit.line_worker.say(Opened(opened_in(request.view, request.window)))
            time.sleep(max(0.0, request.every - request.window))
    except (OSError, IndexError):
        pass  # the agent has ended, the view was swapped, or the kernel cannot watch it


def opened_in(view: str, seconds: float) -> list[str]:
    """Files opened through ``view`` during ``seconds``, each once. OSError, IndexError."""
    found: dict[str, None] = {}
    if not mountinfo.stacked(view):
        raise IndexError(f"nothing is mounted at {view}")
    targets = procfs.Targets([view])
    with fanotify.OpenWatch() as opens:
        opens.watch_filesystem(view)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(found) < MOST_IN_A_WINDOW:
            for descriptor, pid in opens.events():
                try:
                    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                    path = os.readlink(f"/proc/self/fd/{descriptor}") if is_file else ""
                finally:
                    os.close(descriptor)
                if pid == os.getpid() or not path:
                    continue
                shown, below = targets.of(pid, path)
                if shown:
                    found[below] = None
                if len(found) >= MOST_IN_A_WINDOW:
                    break
            time.sleep(0.01)
    return list(found)
