"""Damage in generations beside the current one: found once, in all that share it, and mended."""

import asyncio
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

import kit.errors
import kit.files
from cache import mending
from cache.fill import control, copy, mend, protocol, verify_large
from cache.store import extents, generations, index, large, manifest, tree
from tests.cache import passes
from tests.testbed import trees
from tests.testbed.damage import flip

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

FILES = 64  # eight in each of eight directories
OWN, SHARED = (["d0"], "f00000"), (["d1"], "f00001")


class Pair:
    """An earlier generation and a current one, which share all files but one."""

    def __init__(self, area: Path) -> None:
        self.earlier, self.current = passes.Generation(area), passes.Generation(area / "next")
        trees.plain(self.earlier.source, FILES)
        self.current.source.parent.mkdir()
        shutil.copytree(self.earlier.source, self.current.source, copy_function=os.link)
        changed = self.at(self.current.source, OWN)
        changed.unlink()
        changed.write_bytes(b"another version")
        for each in (self.earlier, self.current):
            generations.save(str(each.folder), {"state": "complete", "done_files": FILES})
        assert self.earlier.fill().result == "complete"
        assert self.fill() == FILES - 1

    def fill(self) -> int:
        """The current one; how many files it shares."""
        task = protocol.FillTask(**self.current.common, before=str(self.earlier.folder))
        end = passes.run("fill", task)
        assert end.fill is not None
        return end.fill.shared_files

    @staticmethod
    def at(root: Path, file: tuple[list[str], str]) -> Path:
        return root.joinpath(*file[0], file[1])

    def scrub(self, current: bool = False) -> protocol.VerifyEnd:
        this, other = (self.current, self.earlier) if current else (self.earlier, self.current)
        task = protocol.VerifyTask(
            **this.common, against_source=False, reachable=False, scrub="round-1",
            ahead=[] if current else [str(other.folder)], also=[str(other.folder)],
        )  # fmt: skip
        found = passes.run("verify", task).verify
        assert found is not None
        return found

    def mend(self, *, reachable: bool = True, takes_out: bool = False) -> protocol.VerifyEnd:
        task = mend.MendTask(
            **self.earlier.common, reachable=reachable, takes_out=takes_out,
            others=[str(self.current.folder)],
        )  # fmt: skip
        found = passes.run("mend", task).verify
        assert found is not None
        return found

    def listed(self) -> list[tuple[list[str], str]]:
        return generations.read_quarantined(self.earlier.folder)


@pytest.fixture
def pair(area: Path) -> Pair:
    return Pair(area)


def test_what_generations_share_is_read_once_and_is_bad_in_both(pair: Pair) -> None:
    flip(pair.at(pair.earlier.tree, OWN))
    flip(pair.at(pair.earlier.tree, SHARED))
    found = pair.scrub()
    assert (found.checked_files, found.shared_files, found.bad) == (FILES, FILES - 1, 1)
    assert pair.listed() == [OWN]
    found = pair.scrub(current=True)
    assert (found.checked_files, found.shared_files, found.bad) == (FILES, 0, 1)
    assert found.also == {str(pair.earlier.folder): 1}
    assert pair.listed() == [OWN, SHARED]


def test_shared_file_is_linked_again_and_another_one_copied(pair: Pair) -> None:
    for file in (OWN, SHARED):
        flip(pair.at(pair.earlier.tree, file))
    pair.at(pair.earlier.tree, (["d2"], "f00002")).unlink()
    generations.write_quarantined(pair.earlier.folder, [OWN, SHARED, (["d2"], "")])
    good = pair.at(pair.current.tree, SHARED)
    good.unlink()  # as a fill of the current generation puts it right
    staged = pair.current.folder / "staged"
    shutil.copytree(pair.current.source / "d1", staged)
    source = staged / SHARED[1]
    os.setxattr(source, tree.CHECKSUM, tree_checksum(pair.earlier, SHARED))
    source.rename(good)
    found = pair.mend()
    assert (found.replaced, found.unreplaced, pair.listed()) == (3, 0, [])
    trees.assert_equal(pair.earlier.source, pair.earlier.tree)
    assert pair.at(pair.earlier.tree, SHARED).samefile(good)
    assert pair.scrub().bad == 0


def tree_checksum(made: passes.Generation, file: tuple[list[str], str]) -> bytes:
    return os.getxattr(Pair.at(made.tree, file), tree.CHECKSUM)


def test_only_bytes_that_were_stored_come_back(pair: Pair) -> None:
    """A source that has another version by now is no source of this one."""
    flip(pair.at(pair.earlier.tree, OWN))
    pair.scrub()
    path = pair.at(pair.earlier.source, OWN)
    before, data = path.stat(), path.read_bytes()
    path.write_bytes(data[::-1])
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    found = pair.mend()
    assert (found.replaced, found.unreplaced, pair.listed()) == (0, 1, [OWN])
    assert pair.at(pair.earlier.tree, OWN).exists(), "its readers are shown its source"


def test_what_has_no_source_is_taken_out_and_comes_back_with_it(pair: Pair) -> None:
    """It stays known, its directory is read on, and what is lost beside it is found."""
    gone = pair.at(pair.earlier.tree, OWN)
    flip(gone)
    assert pair.scrub().bad == 1
    found = pair.mend(reachable=False, takes_out=True)
    assert (found.replaced, found.unreplaced, pair.listed()) == (0, 1, [OWN])
    assert not gone.exists()
    assert pair.at(pair.current.tree, SHARED).exists()
    again = pair.scrub()
    assert (again.checked_files, again.bad, pair.listed()) == (FILES - 1, 0, [OWN])
    found = pair.mend()
    assert (found.replaced, pair.listed()) == (1, [])
    trees.assert_equal(pair.earlier.source, pair.earlier.tree)


def test_fill_takes_no_bad_file_from_the_generation_before(pair: Pair) -> None:
    """What was withdrawn would come back with the same bad bytes."""
    right = flip(pair.at(pair.current.tree, SHARED))
    pair.scrub(current=True)
    for part in ("marks", "files"):
        assert pair.current.withdraw(part).result == "withdrawn"
    assert pair.fill() == FILES - 2
    assert pair.at(pair.current.tree, SHARED).read_bytes() == right
    assert pair.mend().replaced == 1
    assert pair.at(pair.earlier.tree, SHARED).samefile(pair.at(pair.current.tree, SHARED))


def test_list_names_each_file_once_and_goes_with_its_generation(tmp_path: Path) -> None:
    generations.add_quarantined(tmp_path, [OWN])
    assert generations.read_quarantined(tmp_path) == []
    (tmp_path / "generation.json").write_text(json.dumps({}))
    generations.add_quarantined(tmp_path, [OWN])
    generations.add_quarantined(tmp_path, [SHARED, OWN])
    assert generations.read_quarantined(tmp_path) == [OWN, SHARED]


# --- the pass alone, in this process, over trees that no fill has made


class Agent:
    """Its end of the pipes: what it was told, and what it commands."""

    def __init__(self) -> None:
        self.reports: list[protocol.Report] = []
        self.command: Callable[[], protocol.Command | None] = lambda: None

    def say(self, report: protocol.Report) -> None:
        self.reports.append(report)

    def commands(self) -> list[protocol.Command]:
        found = self.command()
        return [] if found is None else [found]

    @property
    def progress(self) -> list[protocol.Progress]:
        return [each.progress for each in self.reports if each.progress is not None]

    @property
    def notes(self) -> list[str]:
        return [each.note for each in self.reports if each.note]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent()
    monkeypatch.setattr(protocol, "AgentChannel", lambda: made)
    monkeypatch.setattr(mend, "PROGRESS_SECONDS", 0.0)
    # A pass ends with its process, and its lock with it; these ones all have this process.
    monkeypatch.setattr(kit.files, "lock", lambda path, seconds: -1)
    return made


class Made(passes.Generation):
    """A generation with all files in one directory."""

    def __init__(self, area: Path) -> None:
        super().__init__(area)
        for each in (self.source, self.tree):
            (each / "d").mkdir(parents=True)

    def add(self, *names: str, data: bytes = b"right", xattrs: bool = True) -> None:
        """Store files of the source, and have them in the index."""
        items = []
        copier = copy.Copier(control.Throttle(control.Control.create(), 0), immutable=True)
        with tree.opened_root(self.source / "d") as d, tree.opened_root(self.tree / "d") as stored:
            for name in names:
                (self.source / "d" / name).write_bytes(data)
                status = os.stat(name, dir_fd=d)
                entry = tree.entry_of(name, status)._replace(xattrs=xattrs)
                copier.copy(d, entry, stored)
                items.append(manifest.Item(entry, manifest.State.STORED, copier.checksum))
        self.know(items)

    def know(self, items: list[manifest.Item]) -> None:
        known = index.Index.open(self.folder / index.NAME)
        with tree.opened_root(self.source) as root:
            known.add_root(tree.entry_of("", os.fstat(root)))
            known.add_directories(index.ROOT, [tree.entry_of("d", os.stat("d", dir_fd=root))])
        number = known.find(["d"])
        assert number is not None
        known.keep(number, items)
        known.close()

    def task(
        self, *others: "Made", reachable: bool = True, takes_out: bool = False
    ) -> mend.MendTask:
        return mend.MendTask(
            **self.common, reachable=reachable, takes_out=takes_out,
            others=[str(each.folder) for each in others],
        )  # fmt: skip

    def bad(self, *names: str) -> None:
        for name in names:
            flip(self.tree / "d" / name)
        self.lists(*names)

    def lists(self, *names: str) -> None:
        generations.write_quarantined(self.folder, [(["d"], name) for name in names])

    @property
    def listed(self) -> list[str]:
        return [name for _, name in generations.read_quarantined(self.folder)]

    def stored(self, name: str) -> Path:
        return self.tree / "d" / name


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def mended(task: mend.MendTask) -> protocol.VerifyEnd:
    found = mend.Mend(task).run().verify
    assert found is not None
    return found


@pytest.mark.parametrize("gone", ["file", "directory"])
def test_what_its_source_has_deleted_is_taken_out(made: Made, agent: Agent, gone: str) -> None:
    made.add("a", "b")
    made.bad("a")
    (made.source / "d" / "a").unlink()
    if gone == "directory":
        shutil.rmtree(made.source / "d")
    found = mended(made.task(takes_out=True))
    assert (found.unreplaced, made.listed) == (1, ["a"])
    assert os.listdir(made.tree / "d") == ["b"], "wrong bytes are read by nobody"


def test_list_of_a_large_directory_does_not_grow(made: Made, agent: Agent) -> None:
    """Not even one that an earlier pass has doubled."""
    names = [f"f{i:04}" for i in range(1100)]
    like = tree.entry_of("", os.stat(made.source))._replace(mode=0o100644)
    lost = [manifest.Item(like._replace(name=each), manifest.State.STORED) for each in names]
    made.know(lost)
    made.lists(*names, *names)
    for _ in range(2):
        found = mended(made.task(reachable=False, takes_out=True))
        assert (found.unreplaced, sorted(made.listed)) == (1100, names)


def test_cancel_is_heard_within_one_file(made: Made, agent: Agent) -> None:
    """A limit is heard, too. It delays the pass, which goes on to report that it lives."""
    made.add("a", data=bytes(range(256)) * 3 * 4096)
    made.bad("a")
    os.utime(made.tree / "d", ns=(1, 1))
    size = made.stored("a").stat().st_size

    def command() -> protocol.Command | None:
        beats = [each.beats for each in agent.progress if each.copied_bytes]
        if len(set(beats)) > 1:
            return protocol.Command(cancel=True)
        return protocol.Command(limits=dataclasses.replace(passes.LIMITS, bytes_per_second=2**18))

    agent.command = command
    end = mend.Mend(made.task()).run()
    assert end.result == "cancelled"
    read = [each.copied_bytes for each in agent.progress]
    assert 0 < read[-1] <= size, "it ended in the first reading of its only file"
    assert made.listed == ["a"]
    assert (made.tree / "d").stat().st_mtime_ns != 1, "its time is that of the index again"
    agent.command = lambda: None
    assert mended(made.task()).replaced == 1


def test_agent_that_has_ended_is_no_bad_file(made: Made, agent: Agent) -> None:
    made.add("a")
    made.lists("a")

    def say(report: protocol.Report) -> None:
        raise BrokenPipeError

    agent.say = say  # type: ignore[method-assign]
    assert mend.Mend(made.task(reachable=False, takes_out=True)).run().result == "cancelled"
    assert made.stored("a").exists()


def test_link_brings_no_xattrs_of_another_generation(
    made: Made, tmp_path: Path, agent: Agent
) -> None:
    """A change of xattrs changes only the ctime: the bytes and all else that is compared stay."""
    made.add("changed", "lost", "equal")
    other = Made(tmp_path / "next")
    other.source = made.source
    for each in ("changed", "lost"):
        os.setxattr(made.source / "d" / each, "user.label", b"new")
    status = {each: os.stat(made.source / "d" / each) for each in os.listdir(made.source / "d")}
    shutil.copytree(made.tree / "d", other.tree / "d", dirs_exist_ok=True)
    for name, known in status.items():
        checksum = os.getxattr(made.stored(name), tree.CHECKSUM)
        os.setxattr(other.stored(name), tree.CHECKSUM, checksum)
        item = manifest.Item(tree.entry_of(name, known), manifest.State.STORED, checksum.decode())
        other.know([item])
        if name != "equal":
            os.setxattr(other.stored(name), "user.label", b"new")
            os.removexattr(made.source / "d" / name, "user.label")  # as its snapshot has it
    made.bad("changed", "lost", "equal")
    made.stored("lost").unlink()
    assert mended(made.task(other)).replaced == 3
    for name in ("changed", "lost"):
        assert os.listxattr(made.stored(name)) == [tree.CHECKSUM]
    assert made.stored("equal").samefile(other.stored("equal"))
    # What is lost is linked too where both sources had one version of it.
    made.stored("equal").unlink()
    made.lists("equal")
    assert mended(made.task(other, reachable=False)).replaced == 1
    assert made.stored("equal").samefile(other.stored("equal"))


def test_large_file_comes_back_from_its_source(
    made: Made, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad extents, lost records, all of it: whatever has gone."""
    monkeypatch.setattr(large, "LARGEST_SMALL", 2**20)
    made.add("small")
    source = made.source / "d" / "large"
    right = os.urandom(extents.EXTENT_BYTES) + bytes(extents.EXTENT_BYTES) + b"the end"
    source.write_bytes(right)
    os.setxattr(source, "user.label", b"kept")
    summed = copy.checksum(
        fd := os.open(source, os.O_RDONLY), control.Throttle(control.Control.create(), 0),
        memoryview(b""), by_extents=True,
    )  # fmt: skip
    os.close(fd)
    entry = tree.entry_of("large", source.stat())
    made.know([manifest.Item(entry, manifest.State.STORED, summed)])
    made.lists("large")

    def comes_back() -> None:
        found = mended(made.task(takes_out=True))
        assert (found.replaced, found.unreplaced, made.listed) == (1, 0, [])
        trees.assert_equal(made.source / "d", made.tree / "d")
        with tree.opened_root(made.folder) as top, tree.opened_root(made.tree / "d") as stored:
            throttle = control.Throttle(control.Control.create(), 0)
            assert not verify_large.check(top, stored, "large", summed, throttle, None).fault
        assert len(records()) == 1

    def records() -> list[Path]:
        return list((made.folder / large.RECORDS).iterdir())

    comes_back()
    made.bad("large")
    before = made.stored("large").stat().st_ino
    comes_back()
    assert made.stored("large").stat().st_ino == before, "its bad extent is put right in place"
    made.bad("large")
    records()[0].unlink()
    comes_back()
    made.bad("large")
    assert mended(made.task(reachable=False, takes_out=True)).unreplaced == 1
    assert not made.stored("large").exists()
    assert records() == [], "they would stay for ever"
    comes_back()
    made.bad("large")
    flip(source)
    for _ in range(2):
        assert mended(made.task()).unreplaced == 1
        assert made.stored("large").stat().st_size == len(right)
        assert os.listdir(made.folder / "staging") == []
        for each in records():
            each.unlink()


def test_without_an_index_wrong_bytes_are_taken_out_too(made: Made, agent: Agent) -> None:
    shutil.copy(__file__, made.tree / "top")
    os.setxattr(made.tree / "top", tree.CHECKSUM, b"0" * 32)
    generations.write_quarantined(made.folder, [([], "top")])
    found = mended(made.task(reachable=False, takes_out=True))
    assert (found.unreplaced, os.listdir(made.tree)) == (1, ["d"])


def test_same_bad_files_are_named_once(made: Made, agent: Agent) -> None:
    """The verify that found them has named them; a pass every ten minutes does not again."""
    made.add("a", "b")
    made.bad("a")
    made.stored("b").unlink()
    notes = []
    for _ in range(3):
        mended(made.task(reachable=False))
        notes.append(len(agent.notes))
    assert notes == [2, 2, 2]


# --- what the agent makes of it


class Earlier:
    id = "old"
    noted = 0.0
    leaves = unmended = False

    def __init__(self, damaged: int) -> None:
        new = generations.new("a", "{}")
        self.record = dataclasses.replace(new, damaged=damaged, why=mending.FOUND)

    async def change(self, **changes: Any) -> None:
        self.record = dataclasses.replace(self.record, **changes)


@pytest.fixture
def frozen() -> Any:
    """A frozen dataset with an earlier generation."""
    return SimpleNamespace(
        name="a", lock=asyncio.Lock(), earlier=[Earlier(2)], no_store=None, wake=lambda: None,
        settings=SimpleNamespace(freshness="frozen"),
        refused=lambda cause, remedy: kit.errors.RefusedError("dataset a", cause, remedy),
    )  # fmt: skip


async def test_what_a_pass_left_is_said_when_it_is_new(frozen: Any) -> None:
    (each,) = frozen.earlier
    with structlog.testing.capture_logs() as said:
        for left in (2, 2, 1, 1, 0):
            good = each.record.damaged - left
            verified = protocol.VerifyEnd(replaced=good, unreplaced=left)
            why = "'a': its source has another version of it" if left else ""
            end = protocol.End("bad" if left else "good", why, verify=verified)
            await mending.ended(frozen, each, end, "")
    assert [(entry["event"], entry["left"]) for entry in said] == [
        ("bad files cannot be put right", 2), ("bad files cannot be put right", 1),
        ("bad files were put right", 0),
    ]  # fmt: skip


async def test_rollback_is_refused_with_what_is_known(frozen: Any) -> None:
    """Before a pass has tried, nothing is said of the source."""
    (each,) = frozen.earlier
    with pytest.raises(
        kit.errors.RefusedError, match="2 files of old .*; they are being put right"
    ):
        await mending.refuse_damaged(frozen, each)
    why = "'a': its source has another version of it"
    await each.change(damaged=1, why=why)
    with pytest.raises(kit.errors.RefusedError, match=f"1 files of old .*: {why}"):
        await mending.refuse_damaged(frozen, each)
