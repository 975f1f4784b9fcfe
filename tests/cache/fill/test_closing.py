"""Directories that are stored whole in a dataset that is not: no way through them asks the source.

What is read here is read by processes of their own, with a deadline: a source that is stopped hangs
whoever asks it.
"""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.fill import closing, evict, opened, protocol
from cache.store import generations, index, tree
from cache.views import view
from linux import mounts
from tests.cache import passes
from tests.testbed import leftovers, trees, waiting
from tests.testbed.agent import Agent
from tests.testbed.damage import flip

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
    """Directories below the root that have files, all of which are stored, as are those of each
    directory above."""
    kept, there = files(stored), files(source)
    closed = {path for path, names in there.items() if names <= kept.get(path, set())} | {"."}
    return sorted(
        path
        for path, names in there.items()
        if names and path != "." and closed >= {path, *map(str, Path(path).parents)}
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


def rests(node: Agent) -> bool:
    """Whether no round of the fill runs or begins: between two of them it is partial, too, and a
    round that the source stops leaves directories open."""
    before = node.said()
    time.sleep(1.0)
    return node.dataset("a")["state"] == "partial" and node.said() == before


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
    node.wait_for(
        lambda: len(whole(below, node.tree("a"))) > LEAVES // 8, 60, "directories that are whole"
    )
    node.wait_for(lambda: rests(node), 60, "the last round to end")
    node.wait_served("a", "overlay")
    assert node.get("/healthz")["alive"]
    trees.assert_equal(below, view)

    stored = whole(below, node.tree("a"))
    if why == "budget":
        assert LEAVES // 8 < len(stored) < LEAVES
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


# --- the passes

SHARE = 1600


class Partial(passes.Generation):
    """A generation that keeps a part of a ``nested`` source."""

    def __init__(self, area: Path) -> None:
        super().__init__(area)
        self.area = area
        self.folder = area / "d" / "generation"  # "d" decides what is kept
        self.tree = self.folder / "tree"
        self.folder.mkdir(parents=True)
        nested(self.source)
        self.fill_share(SHARE)

    def fill_share(self, share: int) -> protocol.End:
        return passes.run("fill", protocol.FillTask(**self.common, share=share))

    def evict(self, part: str, share: int) -> None:
        passes.run("evict", evict.EvictTask(**self.common, part=part, share=share))

    def closed(self) -> set[str]:
        marked = {path for path, *_ in os.walk(self.tree) if tree.OPAQUE in os.listxattr(path)}
        return {os.path.relpath(path, self.tree) for path in marked}

    def assert_shown(self) -> None:
        """An overlay of the tree over the source shows what the source has."""
        shown = self.area / "view"
        view.publish(
            str(shown), view.Stage.OVERLAY, str(self.source), str(self.tree),
            str(self.area / "scratch"),
        )  # fmt: skip
        try:
            trees.assert_equal(self.source, shown)
        finally:
            mounts.detach(shown)


@pytest.fixture
def partial(area: Path) -> Partial:
    made = Partial(area)
    assert {"train", *whole(made.source, made.tree)} >= made.closed() > {"train"}
    made.assert_shown()
    return made


class Killed(BaseException):
    pass


@pytest.mark.parametrize("what", ["closing", "opening"])
def test_killed_at_each_mark_the_view_shows_the_source(
    partial: Partial, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, steps, left, ended = partial.closed(), 0, 0, False
    call = os.setxattr if what == "closing" else os.removexattr

    def killed(*arguments: object) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        call(*arguments)  # type: ignore[arg-type]

    while not ended:
        if what == "closing":
            partial.evict("marks", SHARE)
            assert partial.closed() == set()
        else:
            partial.fill_share(SHARE)
            assert partial.closed() == marks
        task = evict.EvictTask(**partial.common, part="marks", share=SHARE)
        with monkeypatch.context() as patched:
            left = steps
            patched.setattr(os, call.__name__, killed)
            patched.setattr(evict.Evict, "_obey", lambda _: None)  # no agent speaks to it
            if what == "closing":
                run = opened.OpenGeneration(task)
                with contextlib.suppress(Killed):
                    ended = closing.Closing(run).step()
                run.index.close()
                os.close(run._lock)
            else:
                one = evict.Evict(task)
                with contextlib.suppress(Killed):
                    one._unmark()
                    ended = True
                one._index.close()
                os.close(one._run._lock)
        partial.assert_shown()
        steps += 1
    assert partial.closed() == (marks if what == "closing" else set())
    assert steps > len(marks)


def test_what_leaves_the_store_comes_from_the_source(partial: Partial) -> None:
    """By an eviction, and by a withdrawal."""
    stored = whole(partial.source, partial.tree)
    partial.evict("marks", SHARE // 2)
    partial.assert_shown()
    partial.evict("files", SHARE // 2)
    assert 0 < len(whole(partial.source, partial.tree)) < len(stored)
    assert {"train", *whole(partial.source, partial.tree)} == partial.closed(), "closed at once"
    partial.assert_shown()
    path = whole(partial.source, partial.tree)[0]
    name = min(files(partial.tree)[path])
    flip(partial.tree / path / name)
    generations.write_quarantined(partial.folder, [(path.split("/"), name)])
    assert partial.withdraw("marks").result == "withdrawn"
    assert partial.withdraw("files").result == "withdrawn"
    assert not (partial.tree / path / name).exists()
    partial.assert_shown()
    assert partial.fill_share(SHARE).result == "partial"
    partial.assert_shown()
    assert partial.fill().result == "complete"
    trees.assert_equal(partial.source, partial.tree)


def test_new_names_of_a_source_are_seen(partial: Partial) -> None:
    """Of one that was promised to be frozen. A directory is listed again when something failed."""
    path = whole(partial.source, partial.tree)[0]
    for folder in (partial.source / path, partial.source / "train"):
        times = folder.stat()
        (folder / "new").mkdir()
        (folder / "new" / "file").write_bytes(b"new")
        (folder / "newer").write_bytes(b"newer")
        os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))
    with contextlib.closing(index.Index.open(partial.folder / index.NAME)) as opened:
        for names in (["train"], path.split("/")):
            number = opened.find(names)
            assert number is not None
            with opened.transaction():
                opened.fail(number, "x", "failed", lasting=False)
    assert partial.fill_share(0).result == "partial"
    partial.assert_shown()


def test_index_that_was_lost_takes_nothing_closed_for_complete(partial: Partial) -> None:
    index.Index.discard(partial.folder / index.NAME)
    assert partial.verify().result in ("good", "bad")
    with contextlib.closing(index.Index.open(partial.folder / index.NAME)) as opened:
        assert opened.totals().sealed == 0
    assert partial.fill().result == "complete"
    trees.assert_equal(partial.source, partial.tree)
