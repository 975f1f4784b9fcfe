"""The part of ``tests.testbed.held`` that runs in the agent under test and in its fills.

The agent starts fills, and the process that fills of images are forked from, by ``kit.child_main``.
``install`` has it start ``main`` instead, which makes a worker wait before it counts one file (of
an image: one chunk) too many, and then runs what was to be started. A worker waits where a limit
makes it wait, and in the same way: it gives signs of life and obeys a cancel. So the agent cannot
tell a held fill from one with a very low limit. A held worker dies with its fill, and the fill with
its agent; when the folder is gone, it goes on.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path

TYPE_CHECKING = False  # as in typing, whose import costs a child's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from cache.fill import blocks, control, protocol, worker

FOLDER = "NODEAGENT_TEST_HELD"  # in the environment
WANTED = "wanted.json"  # in the folder: how far fills may go; without it they go to their end
PAUSE_SECONDS = 0.05
_IMAGES = "cache.fill.blocks"


def install() -> None:
    """In an agent whose test wants to hold its fills: have it start them by ``main``."""
    if not os.path.isdir(os.environ.get(FOLDER, "")):
        return
    from kit import child_main

    command = child_main.command

    def command_of_main(job: str, target: str, *rest: str) -> list[str]:
        if job == "run" and target in _HOLDS:
            return command(job, f"{__name__}:main", target, *rest)
        return command(job, target, *rest)

    child_main.command = command_of_main


def main() -> None:
    """A process whose fills can be held; the last argument names its own main function."""
    _HOLDS[sys.argv[-1]](Path(os.environ[FOLDER]))
    module, _, name = sys.argv[-1].partition(":")
    getattr(importlib.import_module(module), name)()


def hold_files(folder: Path) -> None:
    """From now on the workers of this process go as far as ``folder`` says."""
    from cache.fill import control, worker

    step, copy, chunk_seconds = control.Throttle.step, worker.Worker.copy, worker.CHUNK_SECONDS

    def held_step(self: "control.Throttle", files: int, size: int) -> None:
        if files:
            _wait(folder, self._control, self.beat)
        step(self, files, size)

    def held_copy(self: "worker.Worker", job: "protocol.Copy") -> "protocol.Copied":
        # A worker that waits keeps what it has of its chunk. So it copies one file in each job.
        wanted = _wanted(folder)
        alone = wanted is not None and not wanted["chunks"]
        worker.CHUNK_SECONDS = 0.0 if alone else chunk_seconds
        return copy(self, job)

    control.Throttle.step = held_step  # type: ignore[method-assign]
    worker.Worker.copy = held_copy  # type: ignore[method-assign]


def hold_forks(folder: Path) -> None:
    """From now on fills of images that are forked from here go as far as ``folder`` says."""
    from kit import fork_server

    child = fork_server._child

    def held_child(server: int, job: str, module: str, name: str, streams: list[int]) -> None:
        if module == _IMAGES:  # only then: its import would make the start of every agent longer
            hold_image(folder)
        child(server, job, module, name, streams)

    fork_server._child = held_child


def hold_image(folder: Path) -> None:
    """From now on a fill of an image in this process goes as far as ``folder`` says."""
    from cache.fill import blocks

    pause = blocks.Pass.pause

    def held_pause(self: "blocks.Pass", size: int = 0) -> None:
        if self.phase == "filling":
            _wait(folder, self.agent.page, self.beat)
        pause(self, size)

    blocks.Pass.pause = held_pause  # type: ignore[method-assign]


_HOLDS = {"cache.fill.fill:main": hold_files, "kit.fork_server:main": hold_forks}


def _wait(folder: Path, page: "control.Control", beat: "Callable[[], None]") -> None:
    """While the fill has copied what it may. A file with this process's number says so."""
    if not _far_enough(folder, page):
        return
    mark = folder / str(os.getpid())
    with contextlib.suppress(FileNotFoundError):
        mark.touch()
    try:
        while _far_enough(folder, page) and not page.cancelled:
            beat()
            time.sleep(PAUSE_SECONDS)
    finally:
        mark.unlink(missing_ok=True)


def _far_enough(folder: Path, page: "control.Control") -> bool:
    wanted = _wanted(folder)
    return wanted is not None and page.counted()[0] >= wanted["files"]


def _wanted(folder: Path) -> "dict[str, Any] | None":
    with contextlib.suppress(FileNotFoundError):
        wanted: dict[str, Any] = json.loads((folder / WANTED).read_bytes())
        return wanted
    return None
