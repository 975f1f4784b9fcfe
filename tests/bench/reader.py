"""The reader of ``reader.c``, compiled when it is first needed."""

import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.bench import harness
from tests.testbed import waiting

_SOURCE = Path(__file__).with_name("reader.c")
# Long enough that starting threads does not count, short enough for many rounds.
HOT_SECONDS = 1.0
_MOST_SECONDS = 120


class Reader:
    """Reads the files of one list under different roots."""

    def __init__(
        self,
        folder: Path,
        name: str,
        files: Sequence[bytes],
        size: int,
        hot_seconds: float = HOT_SECONDS,
    ) -> None:
        """``size``: bytes of all the files together; a side that reads less fails."""
        self._program = folder / "reader"
        if not self._program.exists():
            command = ["cc", "-O2", "-Wall", "-pthread", "-o", str(self._program), str(_SOURCE)]
            subprocess.run(command, check=True, timeout=waiting.limit(60))
        self._list = folder / f"{name}.list"
        self._list.write_bytes(b"".join(file + b"\0" for file in files))
        self._files, self._size = len(files), size
        self._seed = 1
        self._hot_seconds = hot_seconds

    def once(self, root: Path, threads: int, *, seed: int, passes: int = 1) -> float:
        """Files per second over ``passes`` of all files. Raises when one byte is missing."""
        done = subprocess.run(
            [str(self._program), str(root), str(self._list), str(threads), str(seed), str(passes)],
            capture_output=True, text=True, timeout=_MOST_SECONDS, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"reading {root} failed: {done.stderr[-500:]}")
        result = json.loads(done.stdout)
        if (result["files"], result["bytes"]) != (self._files * passes, self._size * passes):
            raise RuntimeError(f"{root} gave {result}, not {passes} x {self._size} bytes")
        return float(result["files"] / result["seconds"])

    def cold(self, root: Path, threads: int) -> harness.Side:
        """A side that reads everything once after all caches were dropped."""

        def side() -> float:
            harness.drop_caches()
            return self.once(root, threads, seed=self._next_seed())

        return side

    def hot(self, root: Path, threads: int) -> harness.Side:
        """A side that reads what is in memory, for ``hot_seconds``; warmed here."""
        rate = max(self.once(root, max(threads, 8), seed=1) for _ in range(2))
        rate = self.once(root, threads, seed=1) if threads < 8 else rate
        passes = max(1, math.ceil(self._hot_seconds * rate / self._files))
        return lambda: self.once(root, threads, seed=self._next_seed(), passes=passes)

    def _next_seed(self) -> int:
        # The sides of a round differ in it by one, which is a different order of the same files.
        self._seed += 1
        return self._seed


def files_below(root: Path) -> tuple[list[bytes], int]:
    """Regular files relative to ``root``, sorted, and their bytes together."""
    found: list[bytes] = []
    size = 0
    base = os.fsencode(root)
    for folder, _, names in os.walk(base):
        for name in names:
            path = os.path.join(folder, name)
            found.append(os.path.relpath(path, base))
            size += os.lstat(path).st_size
    return sorted(found), size
