"""The 1st, 2nd, ... call that a pass makes on the store fails, until none fails.

After each: what is in the tree is the source's, a directory that hides the source has all its
names, ``complete`` was said only of what is, and a pass without faults goes on to the end.
"""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache.fill import evict, protocol
from cache.store import subset, tree
from tests.cache import passes
from tests.testbed import trees, waiting

# 'make test-faults' has all of them: each call, instead of this many spread over all.
TRIES = int(os.environ.get("NTH_CALLS", "2"))
SOURCE = Path(__file__).with_name("nth_call.c")
CHANGES, OPENS, READS, WRITES, LIES = 1, 2, 4, 8, 16
FAULTS = {
    "EIO": (CHANGES | OPENS | READS | WRITES, errno.EIO),
    "ENOSPC": (CHANGES | OPENS | WRITES, errno.ENOSPC),
    "EMFILE": (OPENS, errno.EMFILE),
    "short": (WRITES, 0),
}
OPAQUE = "trusted.overlay.opaque"

pytestmark = [pytest.mark.real, pytest.mark.timeout(300 + 60 * min(TRIES, 100))]


class Control(ctypes.Structure):
    """As in nth_call.c."""

    _fields_ = [(name, ctypes.c_int) for name in ("kinds", "error", "wanted", "count", "failed")]


class Calls:
    """Has a call on ``folder`` fail in the passes that are started while it is armed."""

    def __init__(self, area: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
        built, file = area / "nth_call.so", area / "nth_call"
        build = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(built), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True, timeout=waiting.limit(60))
        # LD_PRELOAD ends a path at a space. This one lies in memory, and goes with this process.
        self._library = os.memfd_create("nth_call.so", 0)
        os.write(self._library, built.read_bytes())
        library = f"/proc/{os.getpid()}/fd/{self._library}"
        file.write_bytes(bytes(mmap.PAGESIZE))
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
        self.state = Control.from_buffer(self._page)
        self.fired = 0  # calls that were made to fail
        patch.setenv("LD_PRELOAD", library)
        patch.setenv("NTH_CALL", str(file))
        patch.setenv("NTH_CALL_FOLDER", str(folder))

    def count(self, fault: str, act: Callable[[], object]) -> int:
        """How many calls ``act`` makes that could fail so."""
        self._arm(fault, 0)
        act()
        return self._disarm()

    def lie(self) -> None:
        """From now on nothing is synced, and every syncfs says that it is."""
        self.state.kinds = LIES

    def fail(self, fault: str, wanted: int, act: Callable[[], protocol.End]) -> protocol.End:
        self._arm(fault, wanted)
        try:
            return act()
        finally:
            self._disarm()
            self.fired += self.state.failed

    def sweep(
        self, what: str, fault: str, fresh: Callable[[], None], act: Callable[[], protocol.End]
    ) -> Iterator[tuple[protocol.End, str]]:
        """Have one call after the other fail in ``act``: how it ended, and what to call that.

        ``fresh`` makes what ``act`` begins with.
        """
        fresh()
        count = self.count(fault, act)
        results = []
        for wanted in spread(count):
            fresh()
            end = self.fail(fault, wanted, act)
            results.append(end.result)
            yield end, f"{fault} at call {wanted} of {count}, which ended {end}"
        assert not self.failed, "the last one was beyond all calls"
        self.report(what, fault, count, results)

    def report(self, what: str, fault: str, count: int, results: list[str]) -> None:
        """And see to it that the test has tested something."""
        assert self.fired >= len(results) // 2
        ends = ", ".join(f"{results.count(each)} {each}" for each in sorted(set(results)))
        print(f"{what}, {fault}: {self.fired} of {count} calls failed; {ends}")

    @property
    def failed(self) -> bool:
        return bool(self.state.failed)

    def _arm(self, fault: str, wanted: int) -> None:
        kinds, error = FAULTS[fault]
        self.state.count = self.state.failed = 0
        self.state.wanted, self.state.error, self.state.kinds = wanted, error, kinds

    def _disarm(self) -> int:
        self.state.kinds = 0
        return int(self.state.count)


def spread(count: int) -> Iterator[int]:
    """Which calls are to fail: all, or some of the whole range, and one that no pass makes."""
    step = max(1, count // TRIES)
    yield from range(1, count + 1, step)
    yield 10 * count + 1000  # a slow pass commits more often, and makes more calls


def copy(one: Path, two: Path) -> None:
    """With links, owners, times and attributes."""
    subprocess.run(["cp", "-a", str(one), str(two)], check=True, timeout=waiting.limit(60))


def assert_sound(made: passes.Generation) -> None:
    """A reader of an overlay over the source gets the source's bytes and names."""
    for path in made.tree.rglob("*"):
        there = made.source / path.relative_to(made.tree)
        assert there.exists(), path
        if path.is_file():
            assert path.read_bytes() == there.read_bytes(), path
        elif OPAQUE in os.listxattr(path):
            assert sorted(os.listdir(path)) == sorted(os.listdir(there)), path


def assert_whole(made: passes.Generation) -> None:
    trees.assert_equal(made.source, made.tree)
    assert os.listdir(made.folder / "staging") == []


def finished(act: Callable[[], protocol.End], what: str, *results: str) -> None:
    """``act`` without faults comes to one of ``results``, by default to ``complete``, perhaps at
    its second try: an index that cannot be used is made again by the pass after the one that found
    that."""
    wanted = results or ("complete",)
    end = act()
    if end.result not in wanted:
        end = act()
    assert end.result in wanted, f"{what}: {end}"


@pytest.fixture
def source(area: Path) -> Path:
    folder = area / "source"
    trees.plain(folder, 16, directories=3, mean=6000)
    os.link(folder / "d0" / "f00000", folder / "d1" / "linked")
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_fill_survives_each_call_that_fails(
    area: Path, source: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    made = passes.Generation(area)
    calls = Calls(area, made.folder, monkeypatch)

    def fresh() -> None:
        shutil.rmtree(made.folder, ignore_errors=True)
        made.folder.mkdir()

    for end, what in calls.sweep("fill", fault, fresh, made.fill):
        assert_sound(made)
        if end.result == "complete":
            assert_whole(made)
        finished(made.fill, what)
        assert_whole(made)
        assert made.verify().result == "good"


@pytest.mark.parametrize("fault", FAULTS)
def test_eviction_survives_each_call_that_fails(
    area: Path, source: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    made = passes.Generation(area)
    made.folder.mkdir()
    assert made.fill().result == "complete"
    pristine = area / "pristine"
    copy(made.folder, pristine)
    calls = Calls(area, made.folder, monkeypatch)

    def fresh() -> None:
        shutil.rmtree(made.folder)
        copy(pristine, made.folder)

    def out() -> protocol.End:
        for part in ("marks", "files"):
            task = evict.EvictTask(**made.common, part=part, share=subset.SHARES // 2)
            end = passes.run("evict", task)
            if end.result != "evicted":
                return end
        return end

    for _, what in calls.sweep("evict", fault, fresh, out):
        assert_sound(made)
        again = out()
        assert again.result == "evicted", f"{what}: {again}"
        assert_sound(made)
        finished(made.fill, what)
        assert_whole(made)


@pytest.mark.parametrize("fault", FAULTS if TRIES > 2 else ["EIO"])
def test_scrub_and_withdrawal_survive_each_call_that_fails(
    area: Path, source: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """One bad file is replaced from the source, one is withdrawn. What is bad is the checksum: the
    bytes are the source's throughout."""
    made = passes.Generation(area)
    made.folder.mkdir()
    assert made.fill().result == "complete"
    bad = [made.tree / "d1" / "f00001", made.tree / "d2" / "f00005"]
    for path in bad:
        os.setxattr(path, tree.CHECKSUM, b"0" * 32)
    pristine = area / "pristine"
    copy(made.folder, pristine)
    calls = Calls(area, made.folder, monkeypatch)
    gone = made.source / "d2" / "f00005"
    elsewhere = area / "elsewhere"

    def fresh() -> None:
        shutil.rmtree(made.folder)
        copy(pristine, made.folder)

    def scrub() -> protocol.End:
        moved = os.stat(gone.parent)
        gone.rename(elsewhere)
        try:
            task = protocol.VerifyTask(
                **made.common, against_source=False, reachable=True, scrub="round-0"
            )
            end = passes.run("verify", task)
        finally:
            elsewhere.rename(gone)
            os.utime(gone.parent, ns=(moved.st_atime_ns, moved.st_mtime_ns))
        for part in ("marks", "files"):  # as the agent: also after a scrub that failed
            if end.result in ("bad", "withdrawn"):
                end = made.withdraw(part)
        return end

    for end, what in calls.sweep("scrub and withdraw", fault, fresh, scrub):
        assert_sound(made)
        if end.result == "withdrawn":
            assert not (made.tree / "d2" / "f00005").exists(), what
        finished(scrub, what, "good", "withdrawn")
        assert_sound(made)
        finished(made.fill, what)
        assert_whole(made)
        assert made.verify().result == "good", what


@pytest.mark.parametrize("fault", FAULTS)
def test_update_survives_each_call_that_fails(
    area: Path, source: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Whatever becomes of the new generation, the one before it stays what it is."""
    (area / "old").mkdir()
    (area / "new").mkdir()
    old, new = passes.Generation(area / "old"), passes.Generation(area / "new")
    subprocess.run(
        ["cp", "-al", str(source), str(old.source)], check=True, timeout=waiting.limit(60)
    )
    subprocess.run(
        ["cp", "-al", str(source), str(new.source)], check=True, timeout=waiting.limit(60)
    )
    changed = new.source / "d1" / "f00001"
    data = changed.read_bytes()
    changed.unlink()
    changed.write_bytes(data[::-1])
    trees.settle(new.source)
    old.folder.mkdir()
    assert old.fill().result == "complete"
    calls = Calls(area, area, monkeypatch)

    def update() -> protocol.End:
        task = protocol.FillTask(**new.common, before=str(old.folder), beside=True)
        return passes.run("fill", task)

    def fresh() -> None:
        shutil.rmtree(new.folder, ignore_errors=True)
        new.folder.mkdir()

    monkeypatch.setenv("NTH_CALL_FOLDER", str(new.folder))
    for end, what in calls.sweep("update", fault, fresh, update):
        assert_sound(new)
        if end.result == "complete":
            assert_whole(new)
        finished(update, what)
        assert_whole(new)
        trees.assert_equal(old.source, old.tree)
    assert new.verify().result == "good"
