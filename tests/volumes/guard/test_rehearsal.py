"""What would have been refused or leased: what a device held before a write decides."""

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
from linux import blockdev, stack
from volumes import commands
from volumes.guard import denials, record, rehearsal, rehearsal_rows, scope
from volumes.guard.rehearsal_rows import Would
from volumes.probe.examine import Kind, Verdict

DEVICE = blockdev.BlockDevice("sdb", (8, 16), "sd", 2**30, False, diskseq=7)
ANOTHER = dataclasses.replace(DEVICE, diskseq=8)
BLANK, EXT4 = Verdict(Kind.BLANK_VERIFIED), Verdict(Kind.HAS_FS, type="ext4", uuid="1")
SICK = Verdict(Kind.UNREADABLE, where="blkid", errno=5)
UNPROVEN = scope.Judgement(scope.Whose.UNPROVEN, scope.Why.NEW)
OWN = scope.Judgement(scope.Whose.OWN, scope.Why.PATTERN)
DRIVER = scope.Judgement(scope.Whose.GUARDED, scope.Why.DRIVER, "rbd")
RAW = scope.Judgement(scope.Whose.GUARDED, scope.Why.KUBELET, "/k/volumeDevices/publish/pvc/uid")
PIDS = itertools.count(1)


def _write(
    program: str = "mkfs.ext4", device: str = "sdb", at: float | None = None
) -> denials.Denial:
    """Of a process of its own."""
    return denials.Denial(
        at=time.time() if at is None else at, device=device, volume="", title=device, denied=False,
        pid=next(PIDS), program=program, parent="", command=program, cgroup="", pod="",
        container="", whose="unproven: new",
    )  # fmt: skip


class _Prober:
    """Answers with ``found``; ``asked``: of which devices."""

    def __init__(self, found: Verdict) -> None:
        self.found = found
        self.asked: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def probe(self, device: str, below: str = "", cluster: str = "") -> Verdict:
        self.asked.append(device)
        found = self.found
        await self.goes_on.wait()
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Goes on by what is added to it."""
    ahead = [0.0]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    yield ahead


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, blockdev.BlockDevice]:
    devices = {"sdb": DEVICE}
    monkeypatch.setattr(blockdev, "identify", devices.get)
    monkeypatch.setattr(rehearsal, "WRITTEN_SECONDS", 0.01)
    call = kit.child.call

    async def calls(function: Any, *arguments: Any, deadline: float) -> Any:
        if function is not rehearsal_rows.try_read:
            return await call(function, *arguments, deadline=deadline)
        return None

    monkeypatch.setattr(kit.child, "call", calls)
    return devices


def _of(folder: Path, found: Verdict) -> tuple[rehearsal.Rehearsal, _Prober]:
    prober = _Prober(found)
    it = rehearsal.Rehearsal(folder, prober)  # type: ignore[arg-type]
    it.rows = rehearsal_rows.Rows(0.0)
    return it, prober


async def _met(it: rehearsal.Rehearsal, raw_block: bool = True, **found: scope.Judgement) -> None:
    """And the probes have ended."""
    devices = tuple(stack.StackedDevice(name, (8, 0), size=1) for name in found)
    it.meet(devices, found, raw_block)
    while it._probes:
        await asyncio.gather(*it._probes.values(), return_exceptions=True)
        await asyncio.sleep(0)


def _rows(it: rehearsal.Rehearsal) -> list[tuple[str, str, int]]:
    assert it.rows is not None
    return [(str(each.would), each.held, each.times) for each in it.rows.kept.values()]


@pytest.mark.parametrize(("held", "now", "expected"), [
    (BLANK, DEVICE, ("lease", "blank_verified")),
    (EXT4, DEVICE, ("refuse", "has_fs ext4 1")),
    (SICK, DEVICE, ("refuse", "unreadable")),
    (BLANK, ANOTHER, ("look", "")),  # another disk has its name: nobody looked at that
    (BLANK, None, ("look", "")),
])  # fmt: skip
async def test_what_it_held_before_decides(
    tmp_path: Path, there: Any, held: Verdict, now: blockdev.BlockDevice | None, expected: Any
) -> None:
    it, _ = _of(tmp_path, held)
    await _met(it, sdb=UNPROVEN)
    it.wrote(_write(), now)
    (would, told, _), (wanted, begins) = _rows(it)[0], expected
    assert (would, told[: len(begins)], bool(told)) == (wanted, begins, bool(begins))
    await it.stop()


@pytest.mark.parametrize(("seen_after", "seconds", "last"), [
    (BLANK, 0.0, "look"),  # a guest may write through what it opened, or a formatter is at work
    (BLANK, 300.0, "look"),
    (BLANK, 1e6, "look"),
    (EXT4, 300.0, "refuse"),
])  # fmt: skip
async def test_after_a_write_a_device_is_never_taken_for_blank(
    tmp_path: Path, there: Any, clock: list[float], seen_after: Verdict, seconds: float, last: str
) -> None:
    it, prober = _of(tmp_path, BLANK)
    await _met(it, sdb=UNPROVEN)
    it.wrote(_write(), DEVICE)
    prober.found = seen_after
    clock[0] += seconds
    await _met(it, sdb=UNPROVEN)
    it.wrote(_write(), DEVICE)
    assert [would for would, *_ in _rows(it)] == ["lease", last]
    it.wrote(_write(), ANOTHER)
    it._seen["sdb"] = rehearsal.KnownContent(ANOTHER.attachment, BLANK, time.monotonic())
    it._writers.clear()
    it.wrote(_write(), ANOTHER)
    assert it.rows is not None and it.rows.times["lease"] == 2, "of another disk it may be said"
    await it.stop()


@pytest.mark.parametrize(("found", "seconds", "asked", "would"), [
    (BLANK, 100.0, 1, "lease"), (BLANK, 300.0, 2, "lease"), (EXT4, 1e6, 1, "refuse"),
    (SICK, 100.0, 1, "refuse"), (SICK, 300.0, 2, "refuse"),
])  # fmt: skip
async def test_what_was_blank_or_silent_is_looked_at_again(
    tmp_path: Path, there: Any, clock: list[float], found: Verdict, seconds: float, asked: int,
    would: str,
) -> None:  # fmt: skip
    it, prober = _of(tmp_path, found)
    await _met(it, sdb=UNPROVEN)
    clock[0] += seconds
    await _met(it, sdb=UNPROVEN)
    assert len(prober.asked) == asked
    it.wrote(_write(), DEVICE)
    assert [each for each, *_ in _rows(it)] == [would]
    await it.stop()


async def test_what_was_blank_long_ago_is_not_known(
    tmp_path: Path, there: Any, clock: list[float]
) -> None:
    it, _ = _of(tmp_path, BLANK)
    await _met(it, sdb=UNPROVEN)
    clock[0] += rehearsal.BLANK_SECONDS + 1
    it.wrote(_write(), DEVICE)
    assert [would for would, *_ in _rows(it)] == ["look"]
    await it.stop()


async def test_a_formatter_that_opens_a_device_many_times_is_one_write(
    tmp_path: Path, there: Any, clock: list[float]
) -> None:
    it, prober = _of(tmp_path, BLANK)
    await _met(it, sdb=UNPROVEN)
    write = _write()
    prober.found = EXT4
    for _ in range(5):
        it.wrote(write, DEVICE)
        clock[0] += rehearsal.SAME_SECONDS / 2
        await _met(it, sdb=UNPROVEN)
    assert _rows(it) == [("lease", "blank_verified", 1)]
    for other in (dataclasses.replace(write, program="dd"), _write()):
        it.wrote(other, DEVICE)
    clock[0] += 10 * rehearsal.SAME_SECONDS
    it.wrote(write, DEVICE)
    it.wrote(write, ANOTHER)
    assert it.rows is not None and it.rows.times.total() == 5
    await it.stop()


async def test_a_probe_that_runs_during_a_write_counts_for_nothing(
    tmp_path: Path, there: Any
) -> None:
    it, prober = _of(tmp_path, BLANK)
    prober.goes_on.clear()
    meets = asyncio.create_task(_met(it, sdb=UNPROVEN))
    while not prober.asked:
        await asyncio.sleep(0.01)
    it.wrote(_write(), DEVICE)
    prober.goes_on.set()
    await meets
    assert it._seen == {}
    prober.found = EXT4
    await _met(it, sdb=UNPROVEN)
    it.wrote(_write(), DEVICE)
    assert [would for would, *_ in _rows(it)] == ["look", "refuse"]
    await it.stop()


async def test_own_devices_drivers_and_what_others_lie_on_are_not_probed(
    tmp_path: Path, there: Any
) -> None:
    it, prober = _of(tmp_path, BLANK)
    names = ("sda", "rbd0", "dm-0", "sdd")
    there.update({name: dataclasses.replace(DEVICE, name=name) for name in names})
    devices = (
        stack.StackedDevice("sda", (8, 0), size=1),
        stack.StackedDevice("sdb", (8, 16), size=1),
        stack.StackedDevice("sdc", (8, 32), size=0),
        stack.StackedDevice("sdd", (8, 48), size=1),
        stack.StackedDevice("rbd0", (252, 0), size=1),
        stack.StackedDevice("dm-0", (253, 0), size=1, below=("sdb",)),
    )
    found = {
        "sda": OWN, "sdb": UNPROVEN, "sdc": UNPROVEN, "sdd": RAW, "rbd0": DRIVER, "dm-0": UNPROVEN
    }  # fmt: skip

    async def meet() -> None:
        it.meet(devices, found, True)
        while it._probes:
            await asyncio.gather(*it._probes.values())
            await asyncio.sleep(0)

    for _ in range(3):  # once for an attachment
        await meet()
    assert prober.asked == ["/dev/dm-0"]
    there["dm-0"] = dataclasses.replace(there["dm-0"], diskseq=9)
    await meet()
    assert prober.asked == ["/dev/dm-0"] * 2
    await it.stop()


@pytest.mark.parametrize(("raw_block", "rows"), [(True, 0), (False, 1)])
async def test_a_published_raw_block_volume_would_be_written_to(
    tmp_path: Path, there: Any, raw_block: bool, rows: int
) -> None:
    it, _ = _of(tmp_path, EXT4)
    await _met(it, raw_block, sdb=RAW)
    it.wrote(_write("qemu-kvm"), DEVICE)
    assert len(_rows(it)) == len(it.denials.findings(time.time())) == rows
    await it.stop()


async def test_what_was_named_own_and_what_is_old_goes(tmp_path: Path, there: Any) -> None:
    it, _ = _of(tmp_path, EXT4)
    await _met(it, sdb=UNPROVEN)
    it.wrote(_write("dd"), DEVICE)
    it.wrote(_write("lvm", "sdz", at=time.time() - rehearsal.OLD_SECONDS - 60), None)
    await _met(it, sdb=UNPROVEN)
    assert [(would, times) for would, _, times in _rows(it)] == [("refuse", 1)]
    await _met(it, sdb=OWN)
    assert _rows(it) == []
    assert it.rows is not None and it.rows.times.total() == 0
    await it.stop()


async def test_what_was_known_is_forgotten_with_the_scope(tmp_path: Path, there: Any) -> None:
    it, _ = _of(tmp_path, BLANK)
    await _met(it, sdb=UNPROVEN)
    it.end()
    it.wrote(_write(), DEVICE)
    assert [would for would, *_ in _rows(it)] == ["look"]
    await it.stop()


async def test_rows_outlive_an_agent(tmp_path: Path, there: Any) -> None:
    first = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    await _met(first, sdb=UNPROVEN)
    first.wrote(_write(), DEVICE)  # before the file was read
    told = first.describe()
    assert (told["times"]["lease"], "not read yet" in told["problem"]) == (1, True)
    await first.stop()
    second = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    second.start()
    while second.rows is None:
        await asyncio.sleep(0.01)
    await _met(second, sdb=UNPROVEN)
    second.wrote(_write(), None)
    await second.stop()
    told = second.describe()
    assert [row["would"] for row in told["rows"]] == ["lease", "look"]
    assert told["since"] == first.describe()["since"] > 0
    saved = rehearsal_rows.load(str(tmp_path))
    assert saved is not None and saved["rows"] == told["rows"]


async def test_without_a_scope_no_file_is_made(tmp_path: Path) -> None:
    it = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    it.start()
    while it.rows is None:
        await asyncio.sleep(0.01)
    await it.stop()
    assert os.listdir(tmp_path) == []
    assert it.describe()["since"] == 0


@pytest.mark.parametrize("text", ["{", '{"rows": [{}], "since": 1, "lost": 0}', '{"rows": 1}'])
async def test_a_damaged_file_begins_anew(tmp_path: Path, text: str) -> None:
    file = record.rehearsal_file(tmp_path)
    file.parent.mkdir()
    file.write_text(text)
    it = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    it.wrote(_write(), None)
    await it.stop()
    assert (len(it.describe()["rows"]), it.problem) == (1, "")
    saved = rehearsal_rows.load(str(tmp_path))
    assert saved is not None and len(saved["rows"]) == 1


@pytest.mark.parametrize("error", [
    kit.errors.HostError("file", "a newer agent wrote it", ""), OSError(5, "I/O error"),
    RuntimeError("it ended"),
])  # fmt: skip
async def test_a_file_that_cannot_be_used_now_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise error

    it = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(kit.child, "call", fails)
        it.wrote(_write(), None)
        await it._write(1.0)
        assert it.describe()["problem"] == str(error)
        assert it.describe()["times"]["look"] == 1
    await it.stop()
    assert it.problem == ""
    assert rehearsal_rows.load(str(tmp_path)) is not None, "it was written later"


def test_a_file_that_cannot_be_read_is_no_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.write_rehearsal(str(tmp_path), rehearsal_rows.Rows(7.0).as_json())

    def fails(*_: object, **__: object) -> int:
        raise OSError(5, "I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails)
        with pytest.raises(kit.errors.HostError):
            rehearsal_rows.load(str(tmp_path))
    assert rehearsal_rows.load(str(tmp_path)) is not None


def test_rows_are_bounded_and_none_pushes_out_a_refusal() -> None:
    rows = rehearsal_rows.Rows(1.0)
    rows.add(rehearsal.row(_write("wipefs"), "", EXT4))
    for n in range(3000):
        rows.add(rehearsal.row(_write(device=f"sd{n}"), "", BLANK))
        rows.add(rehearsal.row(_write(device=f"sd{n}"), "", None))
    assert [(row.would, row.times) for row in rows.kept.values()] == [
        (Would.REFUSE, 1), (Would.LEASE, 3000), (Would.LOOK, 3000),
    ]  # fmt: skip
    for n in range(1000):
        rows.add(rehearsal.row(_write("wipefs", device=f"sd{n}"), "", EXT4))
    assert sum(row.would is Would.REFUSE for row in rows.kept.values()) == rehearsal_rows.MOST_ROWS
    assert (rows.times["refuse"], rows.lost) == (1001, 1001 - rehearsal_rows.MOST_ROWS)
    for n in range(3000):
        rows.add(rehearsal.row(_write(f"program-{n}"), "", None))
    assert len(rows.kept) <= 2 * rehearsal_rows.MOST_ROWS
    again = rehearsal_rows.of_json(rows.as_json())
    assert again.as_json() == rows.as_json()


@pytest.mark.parametrize(("device", "expected"), [
    (stack.StackedDevice("sda", (8, 0), links=("by-id/wwn-1", "by-path/x")), "by-id:wwn-1"),
    (stack.StackedDevice("dm-0", (253, 0), mapping="vg-lv", links=("by-id/dm-1",)), "vg-lv"),
    (stack.StackedDevice("loop0", (7, 0), backing="/disk"), "/disk"),
    (stack.StackedDevice("vdb", (252, 0), model="QEMU"), "QEMU"),
])  # fmt: skip
def test_a_title_tells_devices_apart(device: stack.StackedDevice, expected: str) -> None:
    assert rehearsal.title(device) == expected


def test_the_command_says_it_for_people() -> None:
    assert list(commands._WOULD) == [str(each) for each in (Would.REFUSE, Would.LOOK, Would.LEASE)]
    rows = rehearsal_rows.Rows(1.0)
    for held in (BLANK, EXT4, None):
        rows.add(rehearsal.row(_write(), "by-id:wwn-1", held))
    told = {**rows.as_json(), "scope": "csi", "problem": "the disk hangs"}
    said = "\n".join(commands._rehearsal_lines(told))
    for part in (
        "this may not be all: the disk hangs", "1 writes would be refused", "has_fs ext4 1",
        "sdb by-id:wwn-1", "volumes.guard.own", "not known",
    ):  # fmt: skip
        assert part in said
    assert "openers" not in said, "that would open the volumes of Ceph, too"
    empty = {**rehearsal_rows.Rows(0.0).as_json(), "scope": "ceph", "problem": ""}
    assert "since now" in "\n".join(commands._rehearsal_lines(empty))
