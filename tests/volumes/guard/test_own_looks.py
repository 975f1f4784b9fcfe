"""The agent's looks at whose each device is: when they are made, and what they do to the kernel."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import kit.child
import kit.errors
import kit.pause
from linux import blockdev, stack
from tests.testbed import waiting
from tests.volumes.guard.world import DEVICE, witness
from volumes import settings
from volumes.guard import controller, in_force, kernel, override, own, record, scope, without_agent

WANTED = settings.GuardSettings(drivers=("rbd",), scope="csi")
PLAIN = settings.GuardSettings(drivers=("rbd",))


class _Guard(kernel.Kernel):
    """Of a kernel that tells of new disks, or of one that does not. Notes what is done to it."""

    def __init__(self, ends_with_disk: bool = True, judges: kernel.Mode = kernel.Mode.OFF) -> None:
        self.ends_with_disk, self.no_watch = ends_with_disk, "no BPF events"
        self.judges = judges
        self.did: list[Any] = []
        self.maps = {}
        self.fails: Exception | None = None

    def reserve_own(self, numbers: Any) -> None:
        self.did.append("reserve")

    def judge(self, mode: kernel.Mode, own: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.did.append((str(mode), bool(own)))

    def add(self, majors: Any, devices: Any) -> None:
        self.did.append("guard")

    def release(self, numbers: Any) -> None:
        self.did.append("release")

    def close(self) -> None:
        pass

    def read(self) -> kernel.Present:
        raise kit.errors.HostError("guard", "it cannot be read", "look")

    def apply(self, wanted: kernel.Wanted) -> kernel.Present:
        self.did.append(str(wanted.mode))
        programs = () if wanted.mode is kernel.Mode.OFF else (cast(Any, "one"),)
        return kernel.Present(mode=wanted.mode, judges=self.judges, programs=programs)


@pytest.fixture(autouse=True)
def up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may have booted a moment ago."""
    monkeypatch.setattr(own, "BOOT_SECONDS", 0.0)
    monkeypatch.setattr(own, "SETTLE_SECONDS", 0.01)


def _write(folder: Path, text: str = '{"own": {}}') -> None:
    record.own_file(folder).parent.mkdir(exist_ok=True)
    record.own_file(folder).write_text(text)


@pytest.mark.parametrize(("ends", "file", "problem", "did"), [
    (False, None, "does not say when a number passes to a new disk", [("off", False)]),
    (True, "{", "guard-own.json: it cannot be used", ["reserve"]),
    (True, '{"format": 9}', "a newer agent wrote it", ["reserve"]),
    (True, '{"own": {}}', "", ["reserve", ("dry-run", True)]),
    (True, None, "", ["reserve", ("dry-run", True)]),
])  # fmt: skip
async def test_what_cannot_be_known_is_said(
    tmp_path: Path, ends: bool, file: str | None, problem: str, did: list[Any]
) -> None:
    """And a look guards no number and releases none: what it read is old when it is used."""
    if file is not None:
        _write(tmp_path, file)
    devices, guard = own.OwnDevices(tmp_path), _Guard(ends)
    devices.apply(guard, WANTED, 1)
    await devices.look()
    assert problem in devices.seen.problem and bool(problem) == bool(devices.seen.problem)
    assert guard.did == did
    assert record.own_file(tmp_path).exists() is (ends or file is not None)


async def test_without_a_scope_nothing_is_judged_and_nothing_written_down(tmp_path: Path) -> None:
    devices, guard = own.OwnDevices(tmp_path), _Guard()
    devices.apply(guard, settings.GuardSettings(), 1)
    await devices.look()
    assert (guard.did, devices.seen.problem) == ([("off", False)], "")
    assert not record.own_file(tmp_path).exists()


@pytest.mark.parametrize("upper", ["loop0", "md0", "dm-0"])
async def test_what_lies_on_a_guarded_device_is_neither_guarded_nor_released_by_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upper: str
) -> None:
    disk = stack.StackedDevice("rbd0", (252, 0), "rbd", 1)
    made = stack.StackedDevice(
        upper, (7, 0), upper.rstrip("-0").replace("dm", "device-mapper"), 1, below=("rbd0",)
    )
    seen = [stack.Stack((disk, made)), stack.Stack((disk,))]
    monkeypatch.setattr(stack, "decoded", lambda _: seen.pop(0))
    _write(tmp_path)
    devices, guard = own.OwnDevices(tmp_path), _Guard()
    devices.apply(guard, WANTED, 1)
    await devices.look()
    await devices.look()
    devices.apply(guard, PLAIN, 1)
    await devices.look()
    assert not {"guard", "release"} & {each for each in guard.did if isinstance(each, str)}


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(waiting.limit(60)):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("wanted", "error", "last"), [
    (WANTED, KeyError("sda"), ("dry-run", True)),
    (WANTED, TypeError("no text"), ("dry-run", True)),
    (WANTED, OSError(12, "no memory"), ("dry-run", True)),
    (PLAIN, OSError(12, "no memory"), ("off", False)),
])  # fmt: skip
async def test_looks_go_on_after_any_error_and_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: settings.GuardSettings,
    error: Exception, last: tuple[str, bool],
) -> None:  # fmt: skip
    pauses: list[int] = []

    def pause(self: kit.pause.Backoff) -> float:
        self.attempts += 1
        pauses.append(self.attempts)
        if self.attempts == 3:
            guard.fails = None
        return 0.0

    monkeypatch.setattr(kit.pause.Backoff, "next", pause)
    _write(tmp_path)
    devices, guard = own.OwnDevices(tmp_path), _Guard()
    guard.fails = error
    devices.apply(guard, wanted, 1)
    assert guard.did == [], "nobody waits for a look"
    devices.start()
    # The look sets ``seen`` only after its last call.
    await _until(lambda: last in guard.did and not devices.seen.problem)
    await devices.stop()
    assert pauses == [1, 2, 3]


async def test_settings_without_a_scope_end_what_was_judged(tmp_path: Path) -> None:
    _write(tmp_path)
    devices, guard = own.OwnDevices(tmp_path), _Guard()
    devices.apply(guard, WANTED, 1)
    devices.start()
    await _until(lambda: ("dry-run", True) in guard.did)
    devices.apply(guard, PLAIN, 1)
    await _until(lambda: guard.did[-1] == ("off", False))
    before, looks = len(guard.did), 0

    async def look() -> None:
        nonlocal looks
        looks += 1

    devices.look = look  # type: ignore[method-assign]
    for _ in range(3):
        devices.heard()
        await _until(lambda: not devices._heard.is_set())
        await asyncio.sleep(0.05)
    await devices.stop()
    assert (len(guard.did), looks) == (before, 0), "without a scope no event starts a look"


async def test_until_the_node_has_started_nothing_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is for ever, and what uses the node's disks may start after the agent."""
    monkeypatch.setattr(own, "BOOT_SECONDS", time.clock_gettime(time.CLOCK_BOOTTIME) + 3600)
    disk = stack.StackedDevice("sda", (8, 0), "sd", 1, wwid="naa.5000")
    seen = [stack.Stack((disk,), opened={}), stack.Stack((disk,), opened={"sda": ("ceph-osd",)})]
    monkeypatch.setattr(stack, "decoded", lambda _: seen[0])
    devices, guard = own.OwnDevices(tmp_path), _Guard()
    devices.apply(guard, WANTED, 1)
    await devices.look()
    assert str(devices.seen.found["sda"].whose) == "unproven"
    assert guard.did[-1][0] == "dry-run", "but it judges"
    seen.pop(0)
    await devices.look()
    assert devices.seen.found["sda"].whose is scope.Whose.OWN
    assert not record.own_file(tmp_path).exists()
    monkeypatch.setattr(own, "BOOT_SECONDS", 0.0)
    await devices.look()
    assert record.read_own(str(tmp_path)) == {"wwid:naa.5000": "open at the first attach"}


async def test_a_scope_that_ended_during_a_look_stays_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path)
    devices, guard = own.OwnDevices(tmp_path), _Guard()
    devices.apply(guard, WANTED, 1)

    def decoded(_: str) -> stack.Stack:
        devices.apply(guard, PLAIN, 1)
        return stack.Stack(())

    monkeypatch.setattr(stack, "decoded", decoded)
    await devices.look()
    assert guard.did == ["reserve"]


async def test_a_scan_starts_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no event is heard, scans are all that tells of a new device."""
    monkeypatch.setattr(blockdev.Known, "all", lambda _: [])
    made = controller.Controller(WANTED, (), witness(), state_dir=tmp_path)
    assert not made.in_force.own._heard.is_set()
    await made._scan()
    assert made.in_force.own._heard.is_set()


@pytest.mark.parametrize(("written", "seconds"), [(False, 60.0), (True, 10.0)])
async def test_the_first_look_has_time_for_all_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool, seconds: float
) -> None:
    given: dict[Any, float] = {}
    answers: dict[Any, Any] = {record.read_own: {} if written else None, stack.encoded: "text"}

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        given[function] = deadline
        return answers.get(function)

    monkeypatch.setattr(kit.child, "call", call)
    monkeypatch.setattr(stack, "decoded", lambda _: stack.Stack((), opened={}))
    devices = own.OwnDevices(tmp_path)
    devices.apply(_Guard(), WANTED, 1)
    await devices.look()
    assert (devices.seen.problem, given[stack.encoded]) == ("", seconds)


@pytest.mark.parametrize(("written", "judges", "did"), [
    (False, kernel.Mode.OFF, ["enforce", "reserve"]),
    (True, kernel.Mode.OFF, ["enforce", "reserve", ("dry-run", True)]),
    (True, kernel.Mode.DRY_RUN, ["enforce"]),
])  # fmt: skip
async def test_a_command_reads_what_is_own_and_never_writes_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: bool,
    judges: kernel.Mode,
    did: list[Any],
) -> None:
    """It may see too little: an init container has no /dev/disk, and at boot disks are missing."""
    guard = _Guard(judges=judges)
    monkeypatch.setattr(override, "handle", lambda _: guard)
    if written:
        _write(tmp_path)
    assert await without_agent._apply(WANTED, kernel.Mode.ENFORCE, tmp_path) == ""
    assert guard.did == did
    assert record.own_file(tmp_path).exists() is written


async def test_a_command_without_a_scope_ends_what_an_agent_left_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = _Guard(judges=kernel.Mode.DRY_RUN)
    monkeypatch.setattr(override, "handle", lambda _: guard)
    assert await without_agent._apply(PLAIN, kernel.Mode.ENFORCE, tmp_path) == ""
    assert guard.did == ["enforce", ("off", False)]


@pytest.mark.parametrize(("wanted", "judges", "did", "judged"), [
    (PLAIN, kernel.Mode.OFF, [], False),
    (PLAIN, kernel.Mode.DRY_RUN, [("off", False)], True),
    (WANTED, kernel.Mode.DRY_RUN, [], True),
    (WANTED, kernel.Mode.OFF, [], True),
])  # fmt: skip
def test_the_end_of_a_scope_waits_for_no_look(
    tmp_path: Path, wanted: settings.GuardSettings, judges: kernel.Mode, did: list[Any],
    judged: bool,
) -> None:  # fmt: skip
    made, guard = in_force.InForce(wanted, tmp_path, blockdev.Known()), _Guard(judges=judges)
    guard.read = lambda: kernel.Present(mode=kernel.Mode.OFF, judges=judges)  # type: ignore[method-assign]
    made._apply_now(guard)
    assert [each for each in guard.did if isinstance(each, tuple)] == did
    assert made.own.judged is judged


async def test_a_guard_that_cannot_be_read_is_taken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = _Guard()
    monkeypatch.setattr(override, "handle", lambda _: guard)
    await without_agent._apply(PLAIN, kernel.Mode.OFF, tmp_path)
    assert guard.did == ["off"]


_LOOP = blockdev.BlockDevice("loop0", (7, 0), "loop", 1, False)
_LUKS = blockdev.BlockDevice("dm-0", (253, 0), "device-mapper", 1, False, below=(DEVICE,))


@pytest.mark.parametrize(("wanted", "name", "number", "device", "said"), [
    (PLAIN, "sdb", (8, 16), _LOOP, ""),
    (None, "sdb", (8, 16), _LOOP, "unproven: not in use at the first attach"),
    (WANTED, "loop0", (7, 0), _LOOP, "guarded: driver (rbd0)"),
    (WANTED, "sdb", (8, 16), _LOOP, "unproven: not in use at the first attach"),
    (WANTED, "sda", (8, 0), _LOOP, "unproven: not in use at the first attach"),
    (WANTED, "8:32", (8, 32), None, "unproven: not in use at the first attach"),
    (WANTED, "252:16", (252, 16), None, ""),
    (WANTED, "253:9", (253, 9), None, ""),
    (WANTED, DEVICE.name, DEVICE.number, DEVICE, ""),
    (WANTED, "dm-0", (253, 0), _LUKS, ""),
], ids=["no scope", "of a scope that ended", "on a guarded one", "new",
        "new with an own one's name", "gone", "guarded, gone", "on a guarded one, gone", "guarded",
        "made of a guarded one"])  # fmt: skip
def test_what_the_drivers_guard_is_not_told_as_the_scope_s(
    tmp_path: Path, wanted: settings.GuardSettings | None, name: str, number: kernel.Number,
    device: blockdev.BlockDevice | None, said: str,
) -> None:  # fmt: skip
    """Of a guarded device it would say that nothing is wrong. But of another one that is reported
    a moment after a scope ended, the other finding would say that data may be gone."""
    made = in_force.InForce(wanted or PLAIN, tmp_path, blockdev.Known())
    made._majors, made.parts = frozenset({252}), frozenset({(253, 9)})
    made.own.judged = wanted is not PLAIN
    made.own.seen = own.LastLook(found={
        "loop0": scope.Judgement(scope.Whose.GUARDED, scope.Why.DRIVER, "rbd0"),
        "sda": scope.Judgement(scope.Whose.OWN, scope.Why.ROOT, "/"),
    })  # fmt: skip
    assert made.whose(number, name, device) == said
