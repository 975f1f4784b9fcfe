"""``make bench-scale``: what a file and a directory cost as a generation grows, and what it takes.

One process fills generations of a directory source, each size anew, and reads of /proc what its
coordinator and all workers took. The figures go to build/bench/scale.json. The machine's load is
kept beside them: figures of a loaded machine compare sizes of one run, and nothing else.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import kit.line_worker
from cache.fill import protocol
from cache.store import index
from tests.bench import harness
from tests.cache import passes
from tests.testbed import machine, trees

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.2
FILE_BYTES = 64
FILES_IN_A_DIRECTORY = 500
LIMITS = dataclasses.replace(passes.LIMITS, workers=4, budget=2**40)
DEADLINE = 3600.0


@dataclasses.dataclass
class Sampled:
    """Of a coordinator and its workers together, at their most."""

    seconds: float = 0.0
    cpu: float = 0.0  # seconds, all processes
    coordinator_cpu: float = 0.0  # seconds
    rss: int = 0  # bytes, all processes; pages that they share count in each
    pss: int = 0  # bytes, all processes; shared pages count once
    coordinator_rss: int = 0


def make(folder: Path, files: int, directories: int) -> None:
    """``files`` files of ``FILE_BYTES`` over ``directories`` directories."""
    data = os.urandom(FILE_BYTES)
    for number in range(directories):
        here = folder / f"{number % 1000:03}" / f"{number:07}"
        here.mkdir(parents=True)
        with contextlib.closing(_Directory(here)) as opened:
            for name in range(number, files, directories):
                opened.write(f"f{name:08}", data)


class _Directory:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def write(self, name: str, data: bytes) -> None:
        made = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=self._descriptor)
        os.write(made, data)
        os.close(made)

    def close(self) -> None:
        os.close(self._descriptor)


def _family(top: int) -> list[int]:
    """A process and all below it."""
    found = [top]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def _sample(sampled: Sampled, coordinator: int) -> None:
    rss = pss = 0
    for pid in _family(coordinator):
        with contextlib.suppress(OSError, StopIteration):
            own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
            rss += own
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            pss += int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024
            if pid == coordinator:
                sampled.coordinator_rss = max(sampled.coordinator_rss, own)
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                sampled.coordinator_cpu = (int(fields[11]) + int(fields[12])) / TICKS
    sampled.rss, sampled.pss = max(sampled.rss, rss), max(sampled.pss, pss)


def _spent() -> float:
    """Seconds of CPU of all processes that this one started and that have ended, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fill(generation: Path, source: Path) -> Sampled:
    generation.mkdir()
    task = protocol.FillTask(**passes.common(generation, source) | {"limits": LIMITS})
    sampled, over = Sampled(), threading.Event()

    def watch() -> None:
        me = os.getpid()
        while not over.wait(SAMPLE_SECONDS):
            for pid in _family(me)[1:]:
                with contextlib.suppress(OSError):
                    if b"cache.fill.fill" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        _sample(sampled, pid)
                        break

    async def run() -> protocol.End:
        worker = kit.line_worker.LineWorker(
            "cache.fill.fill:main", protocol.Report, about="fill", largest=2**20
        )
        try:
            async with contextlib.aclosing(worker.listen(task, DEADLINE)) as reports:
                async for report in reports:
                    if report.end is not None:
                        return report.end
        finally:
            await worker.close()
        raise RuntimeError("the coordinator did not say how the pass ended")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began, spent = time.monotonic(), _spent()
    end = asyncio.run(run())
    sampled.seconds, sampled.cpu = time.monotonic() - began, _spent() - spent
    over.set()
    watcher.join()
    if end.result != "complete":
        raise RuntimeError(f"the fill ended {end.result}: {end.why}")
    return sampled


def measure(folder: Path, files: int, directories: int) -> dict[str, float]:
    source, generation = folder / "source", folder / "generation"
    try:
        make(source, files, directories)
        trees.sync(folder)
        trees.drop_caches()
        sampled = fill(generation, source)
        size = (generation / index.NAME).stat().st_size
        began = time.monotonic()
        known = index.Index.open(generation / index.NAME)
        opened = time.monotonic() - began
        began = time.monotonic()
        totals = known.totals()
        counted = time.monotonic() - began
        known.close()
        if totals.done_files != files:
            raise RuntimeError(f"{totals} of {files} files")
        return {
            "files": files,
            "directories": totals.directories,
            "seconds": round(sampled.seconds, 2),
            "us_a_file": round(sampled.seconds / files * 1e6, 1),
            "us_a_directory": round(sampled.seconds / totals.directories * 1e6, 1),
            "cpu_us_a_file": round(sampled.cpu / files * 1e6, 1),
            "coordinator_cpu_share": round(sampled.coordinator_cpu / sampled.seconds, 3),
            "coordinator_us_a_file": round(sampled.coordinator_cpu / files * 1e6, 1),
            "coordinator_rss_mib": round(sampled.coordinator_rss / 2**20, 1),
            "all_rss_mib": round(sampled.rss / 2**20, 1),
            "all_pss_mib": round(sampled.pss / 2**20, 1),
            "index_bytes_an_entry": round(size / files, 1),
            "open_index_seconds": round(opened, 3),
            "totals_seconds": round(counted, 6),
            "load_1_minute": round(os.getloadavg()[0], 2),
        }
    finally:
        for each in (source, generation):
            shutil.rmtree(each, ignore_errors=True)


def shapes(sizes: list[int]) -> Iterator[tuple[str, int, int]]:
    for size in sizes:
        yield "files", size, max(1, size // FILES_IN_A_DIRECTORY)
    for size in sizes:
        yield "directories", size, size // 4
    for size in sizes:
        yield "one directory", size, 1
    for size in sizes:
        yield "a file in each directory", size, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=int, nargs="*", default=[100_000, 1_000_000])
    sizes = parser.parse_args().sizes
    results: dict[str, list[dict[str, float]]] = {}
    with machine.held(), harness.Workplace(harness.RESULTS / "scale") as place:
        for name, files, directories in shapes(sizes):
            found = measure(place.folder, files, directories)
            results.setdefault(name, []).append(found)
            harness.say(json.dumps({name: found}))
    out = harness.RESULTS / "scale.json"
    out.write_text(json.dumps({"cpus": os.cpu_count(), **results}, indent=1))
    harness.say(f"written to {out}")


if __name__ == "__main__":
    main()
