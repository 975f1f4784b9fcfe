"""Verify over a damaged store: it names what is bad, goes on, and never says good of a loss."""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from cache.fill import control, protocol, worker
from cache.store import generations, index, sample
from linux import loop, mountinfo
from tests.cache import passes
from tests.cache.test_space import disk
from tests.testbed import blockdev, trees, waiting
from tests.testbed.agent import Agent
from tests.testbed.damage import flip

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

FILES = 80  # ten in each of eight directories


@pytest.fixture
def complete(area: Path) -> passes.Generation:
    return passes.complete(area, FILES)


def run(generation: passes.Generation, *, reachable: bool = True, scrub: str = "") -> protocol.End:
    """A verify; without the source the tree stands for it, as the agent does."""
    common = generation.common
    if not reachable:
        common |= {"source": str(generation.tree), "stamp": ""}
    task = protocol.VerifyTask(**common, against_source=False, reachable=reachable, scrub=scrub)
    return passes.run("verify", task)


def quarantined(generation: passes.Generation) -> list[str]:
    return [
        "/".join([*path, name]) for path, name in generations.read_quarantined(generation.folder)
    ]


def counted(end: protocol.End) -> tuple[str, int, int, int]:
    found = end.verify
    assert found is not None
    return end.result, found.bad, found.replaced, found.unreplaced


def test_lost_name_is_bad_while_the_source_is_away(complete: passes.Generation) -> None:
    (complete.tree / "d3" / "f00003").unlink()
    assert counted(run(complete, reachable=False)) == ("bad", 1, 0, 1)
    assert quarantined(complete) == ["d3/"]


def test_name_that_nobody_stored_is_bad(complete: passes.Generation) -> None:
    (complete.tree / "d3" / "stray").write_text("x")
    assert counted(run(complete, reachable=False)) == ("bad", 2, 0, 2)


def test_manifest_has_the_version_that_replaced_another(
    area: Path, complete: passes.Generation
) -> None:
    origin = area / "source" / "d3" / "f00003"
    origin.write_bytes(b"longer than it was" * 1000)
    task = protocol.VerifyTask(**complete.common, against_source=True, reachable=True)
    assert counted(passes.run("verify", task)) == ("good", 1, 1, 0)
    assert (complete.tree / "d3" / "f00003").read_bytes() == origin.read_bytes()
    with contextlib.closing(index.Index.read_only(complete.folder / index.NAME)) as opened:
        kept = {item.entry.name: item for item in opened.kept(opened.find(["d3"]) or 0)}
    assert len(kept) == FILES / 8
    assert sample.difference(kept["f00003"].entry, origin.stat()) == ""
    assert kept["f00003"].checksum == xxhash.xxh3_128_hexdigest(origin.read_bytes())


@pytest.mark.parametrize("reachable", [True, False])
def test_lost_directory_does_not_hide_what_is_bad_behind_it(
    complete: passes.Generation, reachable: bool
) -> None:
    shutil.rmtree(complete.tree / "d2")
    flip(complete.tree / "d7" / "f00007")
    end = run(complete, reachable=reachable)
    assert end.verify is not None
    assert end.result == "bad"
    assert end.verify.checked_files == FILES - FILES // 8
    listed = quarantined(complete)
    assert "d2" in listed
    assert ("d7/f00007" in listed) is not reachable  # replaced
    if reachable:
        assert complete.withdraw("marks").result == "withdrawn"
        assert complete.withdraw("files").result == "withdrawn"
        assert complete.fill().result == "complete"
        trees.assert_equal(complete.source, complete.tree)
        assert counted(run(complete)) == ("good", 0, 0, 0)


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EBADMSG])
@pytest.mark.parametrize("call", ["scandir", "stat", "open"])
def test_damaged_directory_is_a_bad_entry(
    complete: passes.Generation, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    setup = protocol.Setup(
        source=str(complete.source), stamp="", generation=str(complete.folder), immutable=False,
        native=None,
    )  # fmt: skip
    own = worker.Worker(0, control.Control.create().descriptor, setup)
    real = getattr(os, call)

    def fails(thing: object, *arguments: object, **more: object) -> object:
        if call == "scandir" or thing == "f00003":
            raise OSError(number, os.strerror(number))
        return real(thing, *arguments, **more)

    monkeypatch.setattr(os, call, fails)
    entries = FILES // 8
    found = own.do(protocol.Verify(directory=2, path=["d3"], entries=entries, against_source=False))
    assert isinstance(found, protocol.Verified)
    if call == "scandir":
        assert found.unreadable
        assert os.strerror(number) in found.fault
    else:
        ((item, fault),) = found.bad
        assert item.name == "f00003"
        assert os.strerror(number) in fault
        assert found.checked_files == entries - (call == "stat")


@pytest.fixture
def ssd(area: Path) -> Iterator[Path]:
    with disk(area, "ext4", 100 * 2**20) as mounted:
        yield mounted


def test_directory_that_the_file_system_lost(area: Path, ssd: Path, node: Agent) -> None:
    """debugfs clears the inode of a directory: looking it up is EUCLEAN or EIO from now on."""
    source = area / "source"
    trees.plain(source, FILES)
    node.put_store(ssd / "store")
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")
    inside = (node.tree("a") / "d2").relative_to(ssd)
    assert node.stop() == 0
    for mount in reversed(mountinfo.read()):  # the view, and the generation by its id
        if mount.target.startswith(f"{node.views}/"):
            subprocess.run(["umount", mount.target], check=True, timeout=waiting.limit(30))
    subprocess.run(["umount", str(ssd)], check=True, timeout=waiting.limit(30))
    image = area / "ext4.img"
    # Its loop device goes with its last mount. Another test's namespace may have a copy of it for a
    # moment, and through that the file system would be mounted as it was.
    waiting.until(lambda: not loop.over(str(image)), 30, "the file system to be let go")
    command = ["debugfs", "-w", "-R", f"clri /{inside}", str(image)]
    subprocess.run(command, check=True, timeout=waiting.limit(30), capture_output=True)
    blockdev.mount_image(image, ssd)
    node.start()
    node.wait_state("a", "complete")
    node.tell("a", "verify")
    node.wait_for(lambda: node.dataset("a")["verify"].get("at"), 60, "the verify")
    found = node.dataset("a")["verify"]
    assert found["bad"] >= 1, found
    assert found["checked_files"] == FILES - FILES // 8
    node.wait_served("a", "source")  # the kernel's log says that the file system is damaged
    trees.assert_equal(source, node.view("a"))
    node.end()


# --- an index that was lost


def lose_index(generation: passes.Generation) -> None:
    index.Index.discard(generation.folder / index.NAME)


@pytest.mark.parametrize("scrub", ["", "round-1"])
def test_index_is_made_again_from_the_tree(complete: passes.Generation, scrub: str) -> None:
    known = index.Index.read_only(complete.folder / index.NAME)
    before = known.totals()
    known.close()
    lose_index(complete)
    end = run(complete, scrub=scrub)
    assert (counted(end), end.verify and end.verify.checked_files) == (("good", 0, 0, 0), FILES)
    known = index.Index.read_only(complete.folder / index.NAME)
    assert known.totals() == before
    known.close()
    flip(complete.tree / "d7" / "f00007")
    assert counted(run(complete)) == ("good", 1, 1, 0)


@pytest.mark.parametrize("reachable", [True, False])
def test_index_made_again_hides_no_loss(complete: passes.Generation, reachable: bool) -> None:
    lose_index(complete)
    moment = (complete.tree / "d3").stat().st_mtime_ns
    (complete.tree / "d3" / "f00003").unlink()
    os.utime(complete.tree / "d3", ns=(moment, moment))
    end = run(complete, reachable=reachable)
    every_directory = 9  # of which one lacks a file: nobody knows which
    wanted = ("good", 1, 1, 0) if reachable else ("bad", 1, 0, every_directory)
    assert counted(end) == wanted
    if reachable:
        trees.assert_equal(complete.source, complete.tree)
    else:
        assert "1 stored files are lost" in end.why
        for part in ("marks", "files"):
            assert complete.withdraw(part).result == "withdrawn"
        assert complete.fill().result == "complete"
        trees.assert_equal(complete.source, complete.tree)
