"""What the agent itself costs once everything is complete: memory, and CPU as jobs read."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import agent, cache_view, harness, reader, trees
from tests.testbed.agent import Agent

WINDOW_SECONDS = 6.0  # five of each kind: 30 s at rest, 30 s with readers
READERS = 2
MEMORY_MIB = 100.0
CPU_PERCENT = 1.0


def run(place: harness.Workplace) -> harness.Results:
    with place.room("rest") as room:
        source = room / "source"
        number = place.size(50_000, 200)
        window = place.size(WINDOW_SECONDS, 0.2)
        trees.make(source, number, cache_view.SMALLEST, cache_view.LARGEST, skew=cache_view.SKEW)
        with agent.running(room / "agent", cache_view.settings(source)) as nodeagent:
            nodeagent.wait_state(cache_view.NAME, "complete", seconds=cache_view.FILL_SECONDS)
            files, size = reader.files_below(source)
            read = reader.Reader(room, "all", files, size)
            view = nodeagent.view(cache_view.NAME)
            read.once(view, READERS, seed=1)
            time.sleep(place.size(5.0, 0.1))
            memory: list[float] = []

            def rest() -> float:
                memory.append(agent.memory(nodeagent))
                return _cpu_percent(nodeagent, window)

            def readers() -> float:
                with _looping(read, view):
                    return _cpu_percent(nodeagent, window)

            percent = place.in_turn({"rest": rest, "readers": readers})
            yield "agent_memory_mib", harness.at_most(memory, MEMORY_MIB, "MiB")
            text = "% of a core"
            yield "agent_cpu_rest_percent", harness.at_most(percent["rest"], CPU_PERCENT, text)
            yield (
                "agent_cpu_readers_percent",
                harness.at_most(percent["readers"], CPU_PERCENT, text),
            )


def _cpu_percent(nodeagent: Agent, window: float) -> float:
    """Of one core, over a window of seconds."""
    before, since = agent.cpu_seconds(nodeagent), time.monotonic()
    time.sleep(window)
    return 100 * (agent.cpu_seconds(nodeagent) - before) / (time.monotonic() - since)


@contextlib.contextmanager
def _looping(read: reader.Reader, view: Path) -> Iterator[None]:
    """Readers that go over the view again and again while the block runs."""
    end = threading.Event()
    errors: list[Exception] = []

    def loop() -> None:
        seed = 2
        while not end.is_set():
            try:
                read.once(view, READERS, seed=seed, passes=5)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                errors.append(error)
                return
            seed += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if errors:
        raise errors[0]
