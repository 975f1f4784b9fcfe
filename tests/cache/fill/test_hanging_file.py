"""A file of the source whose read never ends: only the worker that reads it is lost."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.fill import coordinator
from linux import mounts
from tests.cache import passes
from tests.cache.fill.test_fill import Fill, begin, silent_agent
from tests.testbed import blockdev, faultfs, trees, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

__all__ = ["begin", "silent_agent"]  # fixtures

FILES = 600


class Hanging:
    """A file that hangs while it is told to."""

    def __init__(self, area: Path) -> None:
        self.mountpoint = area / "faults"
        self.mountpoint.mkdir()
        backing, self.control = area / "backing", area / "control"
        trees.write(backing, os.urandom(50_000))
        self.hang(False)
        self.server = subprocess.Popen(
            [sys.executable, faultfs.__file__, str(self.mountpoint), str(backing),
             str(self.control)],
        )  # fmt: skip
        self.file = self.mountpoint / "disk"
        waiting.until(self.file.exists, 20, "the file system")

    def hang(self, really: bool) -> None:
        faults = [{"offset": 0, "length": 50_000, "hang": True}] if really else []
        new = self.control.with_name("control.new")
        new.write_text(json.dumps(faults))
        new.rename(self.control)

    def end(self) -> None:
        self.hang(False)
        self.server.kill()
        self.server.wait(waiting.limit(10))


@pytest.fixture
def hanging(area: Path) -> Iterator[Hanging]:
    made = Hanging(area)
    try:
        yield made
    finally:
        made.end()
        mounts.detach(made.mountpoint)


def test_worker_that_hangs_is_the_only_one_lost(
    area: Path,
    begin: Callable[..., Fill],
    hanging: Hanging,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(coordinator, "LOOK_SECONDS", 0.1)
    made = passes.Generation(area)
    trees.plain(area / "plain", FILES, directories=1)
    made.source.mkdir(exist_ok=True)
    # Of the source's own file system: what is mounted inside a source is not read.
    layers = f"lowerdir={area / 'plain'}:{hanging.mountpoint}"
    blockdev.run("mount", "-t", "overlay", "-o", layers, "none", str(made.source))
    target = made.source / hanging.file.name
    try:
        hanging.hang(True)
        fill = begin()
        assert fill.end().result == "partial"
        assert fill.run.totals.done_files == FILES
        failures = fill.run.index.failures(9)
        assert [(name, why) for _, name, why in failures] == [(target.name, coordinator.HANGS)]
        fill.stop()
        hanging.hang(False)
        assert begin().end().result == "complete"
        assert (made.tree / target.name).read_bytes() == target.read_bytes()
    finally:
        hanging.hang(False)
        mounts.detach(made.source)
