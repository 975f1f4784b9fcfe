"""Fills that wait where a test wants to meet them, instead of being slow and over too early.

    fill = held.Fill(node, files=30)  # before the agent starts
    node.start()
    fill.wait()  # it has copied 30 files, and is at work until:
    fill.go_on()

Each fill of the agent is held like that, also the one after a kill or a restart. Of an RBD image
chunks are counted, and not files. ``holding`` says how.
"""

import json
import os
from pathlib import Path

from tests.testbed import holding
from tests.testbed.agent import Agent


class Fill:
    """What fills of one agent do. A fill that is held obeys pause, cancel and signals as ever."""

    def __init__(self, node: Agent, files: int | None = None, *, chunks: bool = False) -> None:
        """``files``, ``chunks``: as for ``hold``; without them fills go to their end."""
        runs = node.process is not None and node.process.poll() is None
        assert not runs or node.holds.exists(), "this agent was started without the hook"
        self._node = node
        self._folder = node.holds
        self._folder.mkdir(exist_ok=True)
        if files is not None:
            self.hold(files, chunks=chunks)

    def hold(self, files: int, *, chunks: bool = False) -> None:
        """Let a fill copy so many files (each worker may be at one more), and hold it then.

        The store gets all that were copied. With ``chunks`` workers copy whole chunks, as without a
        hold: that is faster, and what a worker copied of its chunk is at risk while it waits.
        """
        new = self._folder / "new"
        new.write_text(json.dumps({"files": files, "chunks": chunks}))
        new.rename(self._folder / holding.WANTED)

    def go_on(self) -> None:
        """Let fills go to their end."""
        (self._folder / holding.WANTED).unlink(missing_ok=True)

    def workers(self) -> list[int]:
        """Processes that are held now."""
        found = [int(each) for each in os.listdir(self._folder) if each.isdigit()]
        return [pid for pid in found if Path(f"/proc/{pid}").exists()]

    def wait(self, seconds: float = 30.0) -> list[int]:
        """Wait until the agent's fill is held; its workers that are."""

        def held() -> list[int]:
            running = self._node.passes()
            return [pid for pid in self.workers() if pid in running]

        found: list[int] = self._node.wait_for(held, seconds, "a held fill")
        return found
