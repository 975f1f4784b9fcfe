"""Room for a block image: what the kubelet wants free counts, and it is looked at again."""

import contextlib
import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.fill import agent, blocks, protocol, space
from cache.fill.protocol import Least
from cache.store import filesystem, image_copy, ranges
from ceph import image
from ceph.protocol import ImageAccess, SnapshotFacts
from tests.cache import passes
from tests.testbed import waiting

CHUNK = image_copy.CHUNK_BYTES
COUNT = 12
DISK = 100 * CHUNK
FACTS = SnapshotFacts("f", 1, "i", 4, COUNT * CHUNK)
DATA = random.Random(5).randbytes(CHUNK)


class Snapshot:
    """Every chunk has data. ``arrived`` is called before each one with how many there were."""

    facts, thing = FACTS, "image"

    def __init__(self, arrived: Callable[[int], None] = lambda _: None) -> None:
        self.arrived = arrived

    def facts_now(self) -> SnapshotFacts:
        return FACTS

    def extents(self, beat: Callable[[], None]) -> Iterator[tuple[int, int]]:
        yield 0, FACTS.size

    def read(
        self, wanted: Iterable[tuple[int, int]], idle: Callable[[], None]
    ) -> Iterator[tuple[int, bytes]]:
        for number, (offset, _) in enumerate(wanted):
            self.arrived(number)
            yield offset, DATA


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A disk of 100 chunks; the first number: bytes of it that others have."""
    taken = [0]
    real = os.statvfs(tmp_path)

    def statvfs(path: Any) -> os.statvfs_result:
        free = max(0, DISK - taken[0] - image_copy.used(Path(path))) // 4096
        fields = list(real)
        fields[:5] = [4096, 4096, DISK // 4096, free, free]
        fields[5:8] = [10**6, 10**6, 10**6]
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(agent.AgentChannel, "commands", lambda _: [])
    monkeypatch.setattr(agent, "say", lambda _: None)
    monkeypatch.setattr(blocks, "BATCH_CHUNKS", 2)
    return taken


def fill(folder: Path, snapshot: Snapshot, **limits: Any) -> tuple[int, blocks.Pass]:
    """Bytes that were lacking."""
    allowed = dataclasses.replace(passes.LIMITS, **limits)
    partly = folder.name.startswith("part")  # jobs can read the rest from the source
    given = protocol.BlockTask(generation=str(folder), access=None, limits=allowed, partly=partly)
    done = blocks.Pass(given, "filling")
    with image_copy.opened(done.folder, FACTS) as held:
        left = blocks._fill(done, snapshot, held)  # type: ignore[arg-type]
        done.commit(held, force=True)
    os.close(done._lock)  # as the end of its process does
    return left, done


def test_all_is_stored_where_the_disk_has_room(tmp_path: Path, others: list[int]) -> None:
    left, done = fill(tmp_path / "g", Snapshot())
    assert left == 0
    assert done.done_chunks == COUNT


@pytest.mark.parametrize(
    "limits",
    [{"least": Least(share=0.95)}, {"least": Least(bytes=DISK - 6 * CHUNK)},
     {"least": Least(inodes=10**6)}, {"inodes": 1}],
)  # fmt: skip
def test_nothing_is_stored_where_the_kubelet_wants_it_free(
    tmp_path: Path, others: list[int], limits: dict[str, Any]
) -> None:
    left, _ = fill(tmp_path / "g", Snapshot(), **limits)
    assert left > 0
    assert image_copy.used(tmp_path / "g") < CHUNK


def test_fill_ends_when_others_fill_the_disk_meanwhile(tmp_path: Path, others: list[int]) -> None:
    def arrived(number: int) -> None:
        if number == 6:
            others[0] = DISK - 10 * CHUNK  # four of its own and the headroom are left

    left, done = fill(tmp_path / "g", Snapshot(arrived))
    assert left > 0
    assert done.done_chunks <= 8
    assert image_copy.used(tmp_path / "g") <= 8 * CHUNK + space.HEADROOM_BYTES


def test_fill_ends_when_a_threshold_rises_meanwhile(
    tmp_path: Path, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    higher = dataclasses.replace(passes.LIMITS, least=Least(share=0.93))
    said: list[protocol.Command] = []

    def commands(_: agent.AgentChannel) -> list[protocol.Command]:
        now = said[:]
        said.clear()
        return now

    monkeypatch.setattr(agent.AgentChannel, "commands", commands)

    def arrived(number: int) -> None:
        if number == 4:
            said.append(protocol.Command(limits=higher))

    left, done = fill(tmp_path / "g", Snapshot(arrived))
    assert left > 0
    assert done.done_chunks < COUNT


def stored(folder: Path) -> list[int]:
    with image_copy.existing_copy(folder) as held:
        return [chunk for chunk, state in held.states() if state is image_copy.State.STORED]


def test_part_of_an_image_is_the_same_within_the_same_budget(
    tmp_path: Path, others: list[int]
) -> None:
    """The first chunks, whatever was tried before; more of them within a larger budget."""
    folder = tmp_path / "part"
    room = 8 * CHUNK + space.HEADROOM_BYTES
    left, _ = fill(folder, Snapshot(), budget=room)
    first = stored(folder)
    assert first == list(range(len(first)))
    assert 0 < len(first) < COUNT
    assert left == (COUNT - len(first)) * CHUNK
    assert image_copy.used(folder) <= room * (ranges.SPARE - 1) // ranges.SPARE
    read: list[int] = []
    assert fill(folder, Snapshot(read.append), budget=room)[0] == left
    assert (stored(folder), read) == (first, [])
    other = tmp_path / "part of another node"
    fill(other, Snapshot(), budget=6 * CHUNK)
    assert 0 < len(stored(other)) < len(first)
    fill(other, Snapshot(), budget=room)
    assert stored(other) == first
    assert fill(other, Snapshot(), budget=2**40)[0] == 0
    assert len(stored(other)) == COUNT


def test_no_part_is_stored_where_the_budget_is_gone(tmp_path: Path, others: list[int]) -> None:
    left, done = fill(tmp_path / "part", Snapshot(), budget=1)
    assert (left, done.done_chunks) == (COUNT * CHUNK, 0)
    left, done = fill(tmp_path / "part2", Snapshot(), inodes=1)
    assert (left, done.done_chunks) == (COUNT * CHUNK, 0)


def test_room_that_is_just_enough_is_enough(tmp_path: Path, others: list[int]) -> None:
    """What grows beside the chunks has the headroom."""
    others[0] = DISK - int(DISK * passes.LIMITS.reserve) - space.HEADROOM_BYTES - COUNT * CHUNK
    others[0] -= 2 * 4096  # the records' header, which is there before room is looked at
    left, done = fill(tmp_path / "g", Snapshot())
    assert left == 0
    assert done.done_chunks == COUNT


def test_agent_hears_of_the_end_before_the_client_of_the_cluster_ends(
    tmp_path: Path, others: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def say(report: protocol.Report) -> None:
        if report.end is not None:
            order.append(report.end.result)

    @contextlib.contextmanager
    def opened(_: ImageAccess) -> Iterator[Snapshot]:
        yield Snapshot()
        order.append("closed")

    access = ImageAccess("", "gpu", "rbd", "", "image", "v1")
    given = protocol.BlockTask(
        generation=str(tmp_path / "g"), access=access, limits=passes.LIMITS, partly=False
    )
    monkeypatch.setattr(agent, "say", say)
    monkeypatch.setattr(agent, "first_task", lambda _: given)
    monkeypatch.setattr(image, "opened", opened)
    monkeypatch.setattr(filesystem, "is_clean", lambda *_: True)
    blocks.fill()
    assert order == ["complete", "closed"]


def test_what_only_the_agent_needs_is_not_loaded() -> None:
    """A third of a short fill would be the start of its process."""
    code = "import sys, cache.fill.blocks; print(*{'asyncio', 'sqlite3'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=waiting.limit(60),
    )
    assert done.stdout.split() == []
