"""A guarded corner of the machine: a child cgroup, commands in it, and an agent that guards it.

The guard is never attached above the child cgroup, so that nothing else on the machine meets it.
"""

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.testbed import blockdev, waiting
from tests.testbed.agent import Agent
from volumes.guard import kernel

# Of a device or a cluster that does answer; an interpreter may start within it. The settings allow
# no more than 60 s.
ANSWER_SECONDS = min(60.0, waiting.limit(10.0))
_JOIN = 'echo 0 > "$CELL/cgroup.procs" && exec "$@"'


class Cell:
    """``run`` runs commands in the cgroup, as kubelet and CSI drivers do: no terminal."""

    def __init__(self, path: Path, pins: Path) -> None:
        self.path = path
        self.pins = pins

    def run(
        self, *command: str, cgroup: Path | None = None, timeout: float = waiting.limit(60.0)
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", _JOIN, "sh", *command],
            env={**os.environ, "CELL": str(cgroup or self.path)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def popen(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", _JOIN, "sh", *command],
            env={**os.environ, "CELL": str(self.path)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def guard(self, object_file: Path | None = None) -> kernel.Kernel:
        """The cell's guard in the kernel; the caller closes it."""
        if object_file is None:
            return kernel.Kernel(self.path, self.pins)
        return kernel.Kernel(self.path, self.pins, object_file)


def _clear_stale(root: Path) -> None:
    """Remove programs and cgroups that a killed run left an hour ago or earlier."""
    for old in root.glob("nodeagent-test-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 3600 and not (old / "cgroup.procs").read_text():
                kernel.Kernel(old, Path("/nonexistent")).detach()
                for child in sorted(old.glob("**/"), reverse=True):
                    child.rmdir()


def _removed(cgroup: Path) -> bool:
    try:
        for child in sorted(cgroup.glob("**/"), reverse=True):
            child.rmdir()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def cell(folder: Path) -> Iterator[Cell]:
    """A fresh child cgroup; whatever was attached to it is detached at the end."""
    _clear_stale(kernel.find_cgroup())
    path = kernel.find_cgroup() / f"nodeagent-test-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    pins = folder / "bpf" / "nodeagent"
    made = Cell(path, pins)
    try:
        yield made
    finally:
        guard = made.guard()
        guard.detach()
        blockdev.run("umount", str(pins.parent), check=False)
        waiting.until(lambda: _removed(path), 10, f"the processes of {path} to end")


def settings(where: Cell, **guard: Any) -> dict[str, Any]:
    """Of a guard for the cell's loop devices."""
    return {
        "mode": "enforce",
        "drivers": ["loop"],
        "names": [blockdev.NAMES],
        "cgroup": str(where.path),
        "pins": str(where.pins),
        "probe_timeout": f"{ANSWER_SECONDS:g}s",
        "cluster_timeout": f"{ANSWER_SECONDS:g}s",
        "quiet": "0s",  # the faults of earlier tests are still in the kernel's log
        **guard,
    }


def volumes(where: Cell, **guard: Any) -> dict[str, Any]:
    """Of a guard for the cell's loop devices, and of an audit that watches only these."""
    return {"guard": settings(where, **guard), "audit": {"names": [blockdev.NAMES]}}


def answers_within(made: Agent, seconds: float) -> None:
    """Change how long the agent waits for a device from now on: short where one does not answer."""
    made.settings["volumes"]["guard"]["probe_timeout"] = f"{seconds:g}s"
    made.write()


@contextlib.contextmanager
def agent(folder: Path, where: Cell, program: Path | None = None, **guard: Any) -> Iterator[Agent]:
    """An agent that guards the cell's loop devices, started, and stopped at the end. ``program``:
    in place of the one that is compiled."""
    made = Agent(folder, {"volumes": volumes(where, **guard)})
    if program is not None:
        made.constants = {"volumes.guard.kernel": {"OBJECT": str(program)}}
    made.start()
    try:
        yield made
    finally:
        made.stop()
