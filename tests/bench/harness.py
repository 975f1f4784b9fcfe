"""What all benchmarks share: a place to work that is always cleared, sides taken in turn, results.

A room adds ``tests/bench/<room>.py`` with ``GROUPS``, a mapping of a group's name to a function
that takes a ``Workplace`` and yields ``(name, Entry)``; ``python -m tests.bench`` finds it.
``tests/bench/words.py`` says in plain words what each name is.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from linux import mountinfo
from tests.testbed import leftovers, trees, waiting

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "bench"
ROUNDS = 5

Side = Callable[[], float]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Entry:
    """One line of the results. ``ours`` and ``peer`` are medians in ``unit``.

    ``ratio`` is the median of the rounds' own ratios, ``spread`` their least and greatest: the
    sides of a round are a moment apart, so that what slows the machine down slows both. Where
    there is no peer, ``ratio`` is None and ``spread`` is that of ``ours``. ``rounds``: how many
    values the figure was made of.
    """

    ratio: float | None
    target: float
    reached: bool
    ours: float
    peer: float | None
    spread: tuple[float, float]
    unit: str
    note: str = ""
    rounds: int = 1


Results = Iterator[tuple[str, Entry]]
Group = Callable[["Workplace"], Results]


def at_least(
    ours: Sequence[float], peer: Sequence[float], target: float, unit: str, note: str = ""
) -> Entry:
    """Ours divided by the peer's, round by round; to be ``target`` or more."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    return Entry(
        ratio=ratio,
        target=target,
        reached=ratio >= target,
        ours=statistics.median(ours),
        peer=statistics.median(peer),
        spread=(min(ratios), max(ratios)),
        unit=unit,
        note=note,
        rounds=len(ratios),
    )


def at_most(
    ours: Sequence[float], target: float, unit: str, note: str = "", rounds: int = 0
) -> Entry:
    """A figure with a bound and no peer; its median must stay below ``target``.

    ``rounds``: where ``ours`` is not one value for each of them but, say, their least.
    """
    middle = statistics.median(ours)
    spread = (min(ours), max(ours))
    return Entry(
        None, target, middle < target, middle, None, spread, unit, note, rounds or len(ours)
    )


def in_turn(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """A, B, A, B, ...: what each side answered, round by round."""
    answers: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            answers[name].append(side())
        say(f"  {number + 1}: " + ", ".join(f"{n} {a[-1]:,.5g}" for n, a in answers.items()))
    return answers


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def drop_caches() -> None:
    """Page cache, names and inodes of the whole machine, after our disk was flushed."""
    trees.sync(RESULTS)
    trees.drop_caches()


class Workplace:
    """One folder on the real disk; whatever is mounted or runs in it ends with the block.

    A ``tiny`` one is for the suite: every benchmark in seconds, its figures without meaning.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tiny: bool = False,
        rounds: int = ROUNDS,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """``sizes``: by name, instead of what a benchmark takes by itself."""
        self.folder = folder
        self.tiny = tiny
        self.rounds = 1 if tiny else rounds
        self._sizes = dict(sizes or {})
        self.stack = contextlib.ExitStack()
        self._sigterm: Any = signal.SIG_DFL

    def size(self, full: Number, tiny: Number, name: str = "") -> Number:
        """How much a benchmark takes of something: files, seconds, bytes. ``name``: for who wants
        another size."""
        given: Any = self._sizes.get(name)
        return given if given is not None else tiny if self.tiny else full

    def in_turn(self, sides: Mapping[str, Side]) -> dict[str, list[float]]:
        return in_turn(sides, self.rounds)

    def __enter__(self) -> "Workplace":
        RESULTS.mkdir(parents=True, exist_ok=True)
        lock = self.stack.enter_context((RESULTS / "lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs on one machine would only measure each other
        self._clear()  # what a run that was killed has left
        self.folder.mkdir(parents=True)
        self.stack.callback(self._clear)
        self._sigterm = signal.signal(signal.SIGTERM, _end)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the clearing is not to be cut short
        self.stack.close()
        signal.signal(signal.SIGTERM, self._sigterm)

    @contextlib.contextmanager
    def room(self, name: str) -> Iterator[Path]:
        """A folder that goes, with all that is mounted or runs in it, when the block ends."""
        folder = self.folder / name
        folder.mkdir()
        try:
            yield folder
        finally:
            clear(folder)

    def _clear(self) -> None:
        clear(self.folder)


def _end(*_: object) -> None:
    raise SystemExit(143)


def clear(folder: Path) -> None:
    """End the processes that were started for ``folder``, unmount below it, delete it.

    A process is known by the folder in its command line or environment (ceph-mon has it only in
    CEPH_CONF): only those of a run here have it.
    """
    if not folder.exists():
        return
    inside = os.fsencode(folder) + b"/"
    for _ in range(100):
        pids = [pid for pid in _processes(inside) if pid != os.getpid()]
        # What serves a mount ends with it; SIGKILL before that would only leave a dead mount.
        for mount in reversed(mountinfo.read()):
            if os.fsencode(mount.target).startswith(inside):
                subprocess.run(
                    ["umount", "-l", mount.target], check=False, timeout=waiting.limit(60)
                )
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(0.1)
    leftovers.make_mutable(folder)
    shutil.rmtree(folder)


def _processes(inside: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if any(inside in (entry / part).read_bytes() for part in ("cmdline", "environ")):
                    found.append(int(entry.name))
    return found
