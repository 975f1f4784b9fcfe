"""What would have been refused or leased: what a device held before a write decides."""

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from linux import blockdev, stack
from volumes.guard import denials, record, rehearsal, scope
from volumes.guard.rehearsal import Would
from volumes.probe.examine import Kind, Verdict

DEVICE = blockdev.BlockDevice("sdb", (8, 16), "sd", 2**30, False, diskseq=7)
ANOTHER = dataclasses.replace(DEVICE, diskseq=8)
BLANK, EXT4 = Verdict(Kind.BLANK_VERIFIED), Verdict(Kind.HAS_FS, type="ext4", uuid="1")
UNPROVEN = scope.Judgement(scope.Whose.UNPROVEN, scope.Why.NEW)
OWN = scope.Judgement(scope.Whose.OWN, scope.Why.ROOT)
DRIVER = scope.Judgement(scope.Whose.GUARDED, scope.Why.DRIVER, "rbd")


PIDS = itertools.count(1)


def _write(program: str = "mkfs.ext4", device: str = "sdb", at: float = 1.0) -> denials.Denial:
    """Of a process of its own."""
    return denials.Denial(
        at=at, device=device, volume="", title=device, denied=False, pid=next(PIDS),
        program=program, parent="", command=program, cgroup="", pod="", container="",
        whose="unproven: new",
    )  # fmt: skip


class _Prober:
    """Answers with ``found``; ``asked``: of which devices."""

    def __init__(self, found: Verdict) -> None:
        self.found = found
        self.asked: list[str] = []

    async def probe(self, device: str, below: str = "", cluster: str = "") -> Verdict:
        self.asked.append(device)
        return self.found


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, blockdev.BlockDevice]:
    devices = {"sdb": DEVICE}
    monkeypatch.setattr(blockdev, "identify", devices.get)
    monkeypatch.setattr(rehearsal, "AGAIN_SECONDS", 0.01)
    return devices


def _of(folder: Path, found: Verdict) -> tuple[rehearsal.Rehearsal, _Prober]:
    prober = _Prober(found)
    it = rehearsal.Rehearsal(folder, prober)  # type: ignore[arg-type]
    it.rows = rehearsal.Rows(0.0)
    return it, prober


def _meet(it: rehearsal.Rehearsal, **found: scope.Judgement) -> None:
    devices = tuple(stack.StackedDevice(name, (8, 0), size=1) for name in found)
    it.meet(devices, found)


async def _idle(it: rehearsal.Rehearsal) -> None:
    while it._probes:
        await asyncio.gather(*it._probes.values(), return_exceptions=True)
        await asyncio.sleep(0)


def _rows(it: rehearsal.Rehearsal) -> list[tuple[str, str, int]]:
    assert it.rows is not None
    return [(str(each.would), each.held, each.times) for each in it.rows.kept.values()]


@pytest.mark.parametrize(("held", "now", "expected"), [
    (BLANK, DEVICE, ("lease", "blank_verified")),
    (EXT4, DEVICE, ("refuse", "has_fs ext4 1")),
    (Verdict(Kind.UNREADABLE, where="blkid", errno=5), DEVICE, ("refuse", "unreadable")),
    (BLANK, ANOTHER, ("look", "")),  # another disk has its name: nobody looked at that
    (BLANK, None, ("look", "")),
])  # fmt: skip
async def test_what_it_held_before_decides(
    tmp_path: Path, there: Any, held: Verdict, now: blockdev.BlockDevice | None, expected: Any
) -> None:
    it, _ = _of(tmp_path, held)
    _meet(it, sdb=UNPROVEN)
    await _idle(it)
    it.wrote(_write(), now)
    (would, told, _), (wanted, begins) = _rows(it)[0], expected
    assert (would, told[: len(begins)], bool(told)) == (wanted, begins, bool(begins))
    await it.stop()


async def test_a_formatted_device_is_not_blank_any_more(tmp_path: Path, there: Any) -> None:
    it, prober = _of(tmp_path, BLANK)
    _meet(it, sdb=UNPROVEN)
    await _idle(it)
    it.wrote(_write(), DEVICE)
    it.wrote(_write(), DEVICE)  # at once: nobody knows
    prober.found = EXT4
    await _idle(it)
    it.wrote(_write(), DEVICE)
    assert _rows(it) == [
        ("lease", "blank_verified", 1),
        ("look", "", 1),
        ("refuse", "has_fs ext4 1", 1),
    ]
    await it.stop()


async def test_a_formatter_that_opens_a_device_many_times_is_one_write(
    tmp_path: Path, there: Any
) -> None:
    it, prober = _of(tmp_path, BLANK)
    _meet(it, sdb=UNPROVEN)
    await _idle(it)
    write = _write()
    for found in (BLANK, EXT4, EXT4):
        it.wrote(write, DEVICE)
        prober.found = found
        await _idle(it)
    assert _rows(it) == [("lease", "blank_verified", 1)]
    it.wrote(write, ANOTHER)  # the pid is another's, or it is another disk
    assert len(_rows(it)) == 2
    await it.stop()


async def test_a_probe_that_ran_during_a_write_counts_for_nothing(
    tmp_path: Path, there: Any
) -> None:
    it, prober = _of(tmp_path, BLANK)
    goes_on = asyncio.Event()
    answer = prober.probe

    async def slowly(*about: Any) -> Verdict:
        found = await answer(*about)
        await goes_on.wait()
        return found

    prober.probe = slowly  # type: ignore[method-assign,assignment]
    _meet(it, sdb=UNPROVEN)
    while not prober.asked:
        await asyncio.sleep(0.01)
    it.wrote(_write(), DEVICE)
    prober.found = EXT4
    goes_on.set()
    await _idle(it)
    it.wrote(_write(), DEVICE)
    assert [would for would, *_ in _rows(it)] == ["look", "refuse"]
    await it.stop()


async def test_own_devices_drivers_and_what_others_lie_on_are_not_probed(
    tmp_path: Path, there: Any
) -> None:
    it, prober = _of(tmp_path, BLANK)
    there.update({name: dataclasses.replace(DEVICE, name=name) for name in ("sda", "rbd0", "dm-0")})
    devices = (
        stack.StackedDevice("sda", (8, 0), size=1),
        stack.StackedDevice("sdb", (8, 16), size=1),
        stack.StackedDevice("sdc", (8, 32), size=0),
        stack.StackedDevice("rbd0", (252, 0), size=1),
        stack.StackedDevice("dm-0", (253, 0), size=1, below=("sdb",)),
    )
    found = {"sda": OWN, "sdb": UNPROVEN, "sdc": UNPROVEN, "rbd0": DRIVER, "dm-0": UNPROVEN}
    for _ in range(3):  # once for an attachment
        it.meet(devices, found)
        await _idle(it)
    assert prober.asked == ["/dev/dm-0"]
    there["dm-0"] = dataclasses.replace(there["dm-0"], diskseq=9)
    it.meet(devices, found)
    await _idle(it)
    assert prober.asked == ["/dev/dm-0"] * 2
    await it.stop()


async def test_rows_outlive_an_agent(tmp_path: Path, there: Any) -> None:
    first = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    _meet(first, sdb=UNPROVEN)
    await _idle(first)
    first.wrote(_write(), DEVICE)  # before the file was read
    await first.stop()
    second = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    _meet(second, sdb=UNPROVEN)
    second.wrote(_write(at=9.0), None)
    await second.stop()
    told = second.describe()
    assert [row["would"] for row in told["rows"]] == ["lease", "look"]
    assert told["since"] == first.describe()["since"]
    saved = rehearsal.load(str(tmp_path))
    assert saved is not None and saved["rows"] == told["rows"]


@pytest.mark.parametrize("text", ["{", '{"rows": [{}], "since": 1, "lost": 0}', '{"rows": 1}'])
async def test_a_damaged_file_begins_anew(tmp_path: Path, text: str) -> None:
    file = record.rehearsal_file(tmp_path)
    file.parent.mkdir()
    file.write_text(text)
    it = rehearsal.Rehearsal(tmp_path, _Prober(BLANK))  # type: ignore[arg-type]
    it.wrote(_write(), None)
    await it.stop()
    assert len(it.describe()["rows"]) == 1
    saved = rehearsal.load(str(tmp_path))
    assert saved is not None and len(saved["rows"]) == 1


def test_rows_are_bounded_and_blank_devices_are_one_row() -> None:
    rows = rehearsal.Rows(0.0)
    for n in range(1000):
        rows.add(rehearsal.row(_write(device=f"sd{n}"), "", BLANK))
    assert [row.times for row in rows.kept.values()] == [1000]
    for n in range(1000):
        rows.add(rehearsal.row(_write("wipefs", device=f"sd{n}"), "", EXT4))
    assert len(rows.kept) == rehearsal.MOST_ROWS
    assert rows.lost == 1001 - rehearsal.MOST_ROWS
    assert rehearsal.of_json(rows.as_json()) == rows


@pytest.mark.parametrize(("device", "expected"), [
    (stack.StackedDevice("sda", (8, 0), links=("by-id/wwn-1", "by-path/x")), "by-id:wwn-1"),
    (stack.StackedDevice("dm-0", (253, 0), mapping="vg-lv", links=("by-id/dm-1",)), "vg-lv"),
    (stack.StackedDevice("loop0", (7, 0), backing="/disk"), "/disk"),
    (stack.StackedDevice("vdb", (252, 0), model="QEMU"), "QEMU"),
])  # fmt: skip
def test_a_title_tells_devices_apart(device: stack.StackedDevice, expected: str) -> None:
    assert rehearsal.title(device) == expected


def test_words_of_the_command_are_those_of_the_module() -> None:
    from volumes import commands

    assert list(commands._WOULD) == [str(each) for each in (Would.REFUSE, Would.LOOK, Would.LEASE)]
