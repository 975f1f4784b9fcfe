"""Reads a dataset that tells itself what it holds, and counts what does not fit together.

``manifest.json`` at its root has the checksum of every other file. Each round opens the root once,
and everything below it from there: all of that must be one version, whole. Run it as a module:
``python -m tests.testbed.whole_reader ROOT REPORT SEED``; SIGTERM ends it.
"""

import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import xxhash

from tests.testbed import reader as readers

FILES = 24  # in a round


def describe(root: Path) -> None:
    """Write the manifest of what is there now."""
    found = {
        str(path.relative_to(root)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    new = root / "manifest.new"
    new.write_text(json.dumps(found))
    new.rename(root / "manifest.json")


def _read(directory: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=directory), "rb") as stream:
        return stream.read()


class Reader:
    def __init__(self, root: str, seed: str) -> None:
        self.root = root
        self.rounds = self.opens = 0
        self.troubles: list[str] = []
        self.versions: set[str] = set()
        self._random = random.Random(seed)

    def round(self) -> None:
        directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            text = _read(directory, "manifest.json")
            manifest = json.loads(text)
            self.versions.add(xxhash.xxh3_64_hexdigest(text))
            for name in self._random.sample(sorted(manifest), min(FILES, len(manifest))):
                data = _read(directory, name)
                self.opens += 1
                if xxhash.xxh3_128_hexdigest(data) != manifest[name]:
                    self.troubles.append(f"{name} has other bytes than its manifest says")
            folder = self._random.choice(sorted({os.path.dirname(name) for name in manifest}))
            with contextlib.ExitStack() as stack:
                opened = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory)
                stack.callback(os.close, opened)
                names = sorted(os.listdir(opened))
            wanted = sorted(os.path.basename(n) for n in manifest if os.path.dirname(n) == folder)
            if folder and names != wanted:
                self.troubles.append(f"{folder} has {names}, its manifest says {wanted}")
        except OSError as error:
            self.troubles.append(repr(error))
        finally:
            os.close(directory)
        self.rounds += 1

    def report(self) -> dict[str, object]:
        return {
            "rounds": self.rounds, "opens": self.opens, "troubles": self.troubles[:20],
            "count": len(self.troubles), "versions": len(self.versions),
            "stamps": sorted(self.versions),
        }  # fmt: skip


def main() -> None:
    root, report, seed = sys.argv[1:]
    reader, ended = Reader(root, seed), []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    while not ended:
        readers.paced(reader.round)
        if reader.rounds == 1:
            Path(f"{report}.begun").touch()
    Path(report).write_text(json.dumps(reader.report()))


if __name__ == "__main__":
    main()
