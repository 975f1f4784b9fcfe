"""A job as the cache sees one: reads random files in a loop and checks every byte.

    python -m tests.testbed.reader ROOT MANIFEST REPORT SEED

Runs until SIGTERM, or through everything once with SEED ``all``. A third of the reads is by mmap.
REPORT gets one JSON object at the end: reads, errors and wrong (the first few by name).
REPORT.reads always holds the number of reads so far, in eight bytes (little-endian).
"""

import functools
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

# A job computes between its reads; readers that never pause would take the whole of a small
# machine from what they watch. Times what the read took, and at most so many seconds.
PAUSE = 6.0
PAUSE_SECONDS = 0.05


def paced(function: Callable[[], None]) -> None:
    """Call it, then pause in proportion to what it took."""
    began = time.monotonic()
    function()
    time.sleep(min((time.monotonic() - began) * PAUSE, PAUSE_SECONDS))


class Reader:
    def __init__(self, root: str, manifest: dict[str, list[object]], counter: mmap.mmap) -> None:
        self.root = root
        self.manifest = manifest
        self.names = sorted(manifest)
        self.reads = 0
        self._counter = counter
        self.mapped = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.stopped = False

    def read(self, name: str, *, mapped: bool) -> None:
        size, digest = self.manifest[name]
        self.reads += 1
        self._counter[:] = self.reads.to_bytes(8, "little")
        try:
            descriptor = os.open(f"{self.root}/{name}", os.O_RDONLY)
            try:
                if mapped and size:
                    self.mapped += 1
                    length = os.fstat(descriptor).st_size
                    with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as page:
                        data = bytes(page)
                else:
                    parts = []
                    while part := os.read(descriptor, 1024 * 1024):
                        parts.append(part)
                    data = b"".join(parts)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.errors.append(f"{name!a}: {error!a}")
            return
        if len(data) != size or xxhash.xxh3_128_hexdigest(data) != digest:
            self.wrong.append(f"{name!a}: {len(data)} of {size} bytes")

    def loop(self, seed: int) -> None:
        generator = random.Random(seed)
        while not self.stopped:
            name, mapped = generator.choice(self.names), generator.random() < 1 / 3
            paced(functools.partial(self.read, name, mapped=mapped))

    def everything(self) -> None:
        """List and read all, in random order."""
        listed = set()
        for folder, _, files in os.walk(self.root):
            below = os.path.relpath(folder, self.root)
            listed |= {os.path.normpath(os.path.join(below, file)) for file in files}
        for name in sorted(listed ^ set(self.names))[:20]:
            self.errors.append(f"{name!a}: listed or expected, not both")
        names = list(self.names)
        random.Random(5).shuffle(names)
        for number, name in enumerate(names):
            self.read(name, mapped=number % 3 == 0)

    def report(self) -> dict[str, object]:
        return {
            "reads": self.reads,
            "mapped": self.mapped,
            "errors": len(self.errors),
            "wrong": len(self.wrong),
            "first": (self.errors + self.wrong)[:10],
        }


def main() -> None:
    root, manifest, report, seed = sys.argv[1:5]
    with open(f"{report}.reads", "w+b") as file:
        file.write(bytes(8))
        file.flush()
        counter = mmap.mmap(file.fileno(), 8)
    reader = Reader(root, json.loads(Path(manifest).read_text()), counter)

    def stop(*_: object) -> None:
        reader.stopped = True

    signal.signal(signal.SIGTERM, stop)
    Path(f"{report}.ready").touch()
    if seed == "all":
        if not os.isatty(0):
            sys.stdin.read(1)  # PodReader.begin
        reader.everything()
    else:
        reader.loop(int(seed))
    temporary = Path(f"{report}.new")
    temporary.write_text(json.dumps(reader.report()))
    temporary.rename(report)


if __name__ == "__main__":
    main()
