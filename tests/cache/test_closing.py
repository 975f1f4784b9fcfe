"""Directories that are stored whole in a dataset that is not: no way through them asks the source.

What is read here is read by processes of their own, with a deadline: a source that is stopped hangs
whoever asks it.
"""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import mounts
from tests.testbed import leftovers, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

LEAVES = 24
READ = """
import os, sys
for path in sys.argv[1:]:
    try:
        if os.path.isdir(path):
            print(*sorted(os.listdir(path)))
        else:
            print(open(path, 'rb').read().hex())
    except OSError as error:
        print('errno', error.errno)
"""


def nested(root: Path) -> None:
    """``train/<leaf>/f*``, a directory deeper in each fourth leaf, and files at the root."""
    generator = random.Random(1)
    for number in range(LEAVES):
        leaf = root / "train" / f"c{number:02}"
        for folder in [leaf, leaf / "deep"] if number % 4 == 0 else [leaf]:
            folder.mkdir(parents=True)
            for each in range(12):
                trees.write(
                    folder / f"f{each}", generator.randbytes(generator.randrange(1, 16_000))
                )
    for number in range(4):
        trees.write(root / f"r{number}", b"at the root")
    trees.settle(root)


def files(root: Path) -> dict[str, set[str]]:
    """The names of files in each directory, by its path."""
    return {os.path.relpath(path, root): set(names) for path, _, names in os.walk(root)}


def whole(source: Path, stored: Path) -> list[str]:
    """Directories below the root that have files, all of which are stored."""
    kept = files(stored)
    return sorted(
        path
        for path, names in files(source).items()
        if path != "." and 0 < len(names & kept[path]) == len(names)
    )


class Reader:
    """Reads paths, a line each, in a process of its own."""

    def __init__(self, paths: list[Path]) -> None:
        command = [sys.executable, "-c", READ, *map(str, paths)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def lines(self) -> list[str]:
        return self.process.communicate(timeout=waiting.limit(20))[0].splitlines()


def read(paths: list[Path]) -> list[str]:
    reader = Reader(paths)
    try:
        return reader.lines()
    finally:
        reader.process.kill()


@pytest.fixture
def mounted(area: Path) -> Iterator[Path]:
    """``below`` by a FUSE server, which goes on at the end whatever happens."""
    nested(area / "below")
    target = area / "mounted"
    target.mkdir()
    # Nothing that it said is believed later: what asks it hangs as soon as it is stopped.
    never = "entry_timeout=0,attr_timeout=0,negative_timeout=0"
    subprocess.run(
        ["bindfs", "-o", never, str(area / "below"), str(target)],
        check=True, timeout=waiting.limit(30),
    )  # fmt: skip
    yield target
    send(target, signal.SIGCONT)


def send(target: Path, number: int) -> None:
    for pid in leftovers.processes(target):
        if Path(f"/proc/{pid}/comm").read_text().strip() == "bindfs":
            os.kill(pid, number)


@pytest.mark.parametrize("why", ["budget", "failure"])
def test_stored_directories_need_no_source_that_answers(
    area: Path, node: Agent, mounted: Path, why: str
) -> None:
    below, view = area / "below", node.view("a")
    size = sum(path.stat().st_size for path in below.rglob("*") if path.is_file())
    if why == "failure":
        (area / "other").mkdir()
        (below / "train/c05/other").mkdir()
        mounts.mount(str(area / "other"), mounted / "train/c05/other", None, mounts.MS_BIND)
    node.add_dir("a", mounted, **({"budget": size // 2 + 400_000} if why == "budget" else {}))
    node.start()
    node.wait_state("a", "partial")
    node.wait_for(lambda: whole(below, node.tree("a")), 60, "directories that are whole")
    node.wait_state("a", "partial")
    node.wait_served("a", "overlay")
    assert node.get("/healthz")["alive"]
    trees.assert_equal(below, view)

    stored = whole(below, node.tree("a"))
    if why == "budget":
        assert LEAVES // 4 < len(stored) < LEAVES
        kept = files(node.tree("a"))
        missing = next(f"{d}/{n}" for d, names in files(below).items() for n in names - kept[d])
    else:
        assert len(stored) == LEAVES + LEAVES // 4
        stored.remove("train/c05")  # an entry of it failed
        missing = "train/c05/none"
    paths = [below / path / name for path in stored for name in sorted(files(below)[path])]
    bytes_of = [path.read_bytes().hex() for path in paths]
    shown = [view / path.relative_to(below) for path in paths]
    names = [" ".join(sorted(os.listdir(below / path))) for path in stored]
    folders = [view / path for path in stored]

    send(mounted, signal.SIGSTOP)
    waits = Reader([view / missing])
    assert read(shown) == bytes_of
    assert read([*folders, *(each / "none" for each in folders)]) == names + [
        f"errno {errno.ENOENT}" for _ in folders
    ]
    assert waits.process.poll() is None, "what is not stored waits for the source"
    send(mounted, signal.SIGCONT)
    answer = waits.lines()
    expected = f"errno {errno.ENOENT}" if why == "failure" else (below / missing).read_bytes().hex()
    assert answer == [expected]

    send(mounted, signal.SIGKILL)
    assert read(shown) == bytes_of
    (lost,) = read([view / missing])
    assert lost in [f"errno {n}" for n in (errno.ENOTCONN, errno.ESTALE, errno.ECONNABORTED)]
    assert read(shown) == bytes_of, "for good"
    assert read(folders) == names
