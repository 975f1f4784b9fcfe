"""How slow this machine is today: one factor, measured when a run starts.

The seconds of a test are for a quiet machine of two cores. ``tests/testbed/waiting.py`` multiplies
all of them: waits, limits of tests, timeouts of HTTP and of subprocesses, and the product's own
deadlines where they are not what is tested. The factor is in the environment, so that workers,
agents under test and second looks have the same one. ``TEST_PATIENCE`` says it instead.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NAME = "TEST_PATIENCE"
MOST = 8.0
# Medians on a quiet machine of two cores with a virtual disk.
START_SECONDS = 0.42
FSYNC_SECONDS = 0.02
ROUNDS = 3
WRITTEN = b"x" * 65536


def factor(starts: Sequence[float], fsyncs: Sequence[float]) -> float:
    """1 to MOST: how many times longer the slower of both takes than on a quiet machine."""
    slower = max(
        statistics.median(starts) / START_SECONDS, statistics.median(fsyncs) / FSYNC_SECONDS
    )
    return round(min(MOST, max(1.0, slower)), 2)


def ensure(folder: Path) -> float:
    """The factor of this run. ``folder`` is on the disk that the tests use.

    ValueError when TEST_PATIENCE is no number of 1 or more.
    """
    if not (told := os.environ.get(NAME)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            measured = factor(_times(_start), _times(lambda: _fsync(folder)))
        except (OSError, subprocess.CalledProcessError) as error:
            # A folder of root's, an agent that does not start: that is for the tests to say.
            print(f"{NAME} is 1, because nothing could be measured: {error}", file=sys.stderr)
            measured = 1.0
        os.environ[NAME] = told = f"{measured:g}"
    return check(told)


def check(told: str) -> float:
    """``told`` as a number; ValueError names what is wrong."""
    try:
        value = float(told)
    except ValueError:
        value = 0.0
    if not 1.0 <= value < float("inf"):
        raise ValueError(f"{NAME} is {told!r}; it must be a number of 1 or more")
    return value


def _times(work: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(ROUNDS):
        begin = time.monotonic()
        work()
        taken.append(time.monotonic() - begin)
    return taken


def _start() -> None:
    command = [sys.executable, "-c", "import nodeagent.main"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])


def _fsync(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(WRITTEN)
        file.flush()
        os.fsync(file.fileno())
