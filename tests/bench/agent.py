"""An agent for a benchmark, and what its processes cost."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import harness
from tests.testbed import held
from tests.testbed.agent import Agent


@contextlib.contextmanager
def running(folder: Path, cache: dict[str, Any], hold_after: int | None = None) -> Iterator[Agent]:
    """An agent with these ``cache`` settings beside store, views and state below ``folder``.

    ``hold_after``: its fills wait after so many files, see ``tests.testbed.held``.
    """
    places = {"store": str(folder / "store"), "views": str(folder / "views")}
    made = Agent(folder, {"cache": places | cache})
    try:
        if hold_after is not None:
            held.Fill(made, hold_after, chunks=True)
        made.start()
        yield made
    except BaseException:
        harness.say(made.said()[-3000:])
        raise
    finally:
        made.end()
        harness.clear(folder)  # views and sources outlive an agent by design; not this one's


def processes(nodeagent: Agent) -> list[int]:
    """The agent and all that descends from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found = [nodeagent.pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def memory(nodeagent: Agent) -> float:
    """MiB of the whole process tree: a page that several processes share counts once (PSS)."""
    kib = 0
    for pid in processes(nodeagent):
        with contextlib.suppress(OSError):
            said = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kib += int(said.partition("\nPss:")[2].split(maxsplit=1)[0])
    return kib / 1024


def peak_rss(pid: int) -> float:
    """MiB that a process has had at most; 0 when it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        if peak := status.partition("VmHWM:")[2].split(maxsplit=1):
            return int(peak[0]) / 1024
    return 0.0


def own_rss(nodeagent: Agent) -> float:
    """MiB of the agent's own process."""
    assert nodeagent.process is not None
    pages = int(Path(f"/proc/{nodeagent.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(nodeagent: Agent) -> float:
    """CPU that the tree has used, children that have ended and were waited for included."""
    seconds = 0.0
    for pid in processes(nodeagent):
        with contextlib.suppress(OSError):
            ticks = sum(int(field) for field in _stat(pid)[13:15])  # of ended children
            seconds += ticks / os.sysconf("SC_CLK_TCK")
            # In nanoseconds: at rest a tick of 10 ms would be most of what there is.
            for task in Path(f"/proc/{pid}/task").iterdir():
                seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (number 3)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
