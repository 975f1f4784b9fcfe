"""The operator's override and log: on disk, else in memory."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kit.child
import kit.errors
from linux import bpf
from tests.testbed import waiting
from volumes import settings
from volumes.guard import kernel, override, pins, record

ME = override.Override(kernel.Mode.DRY_RUN, "me", "why", 1.5)


def wanted(tmp_path: Path, **given: Any) -> settings.GuardSettings:
    return settings.GuardSettings(pins=tmp_path / "bpf" / "nodeagent", **given)


async def test_override_survives_and_damaged_file_is_told(tmp_path: Path) -> None:
    guard = wanted(tmp_path)
    assert await override.recall(guard, tmp_path) == override.Recalled()
    assert await override.save(guard, tmp_path, ME) == (True, "")
    assert (await override.recall(guard, tmp_path)).override == ME
    record.override_file(tmp_path).write_text("{")
    found = await override.recall(guard, tmp_path)
    assert found.override is None
    assert "set the mode again" in found.error
    assert await override.save(guard, tmp_path, None) == (True, "")
    assert await override.recall(guard, tmp_path) == override.Recalled()


async def test_override_of_a_newer_agent_is_left_alone(tmp_path: Path) -> None:
    guard = wanted(tmp_path)
    await override.save(guard, tmp_path, ME)
    file = record.override_file(tmp_path)
    newer = file.read_text().replace('"format": 1', '"format": 2')
    assert newer != file.read_text()
    file.write_text(newer)
    assert "newer agent wrote it" in (await override.recall(guard, tmp_path)).error
    assert file.read_text() == newer


@pytest.mark.parametrize("text", ["{", '{"format": 2}'])
async def test_an_override_that_cannot_be_read_lowers_nothing(tmp_path: Path, text: str) -> None:
    """It may be the word of an operator who wants more than the settings do."""
    plain = wanted(tmp_path, mode="dry-run")
    strict = override.Override(kernel.Mode.ENFORCE, "me", "why", 1.5)
    file = record.override_file(tmp_path)

    async def in_the_kernel() -> kernel.Mode:
        return kernel.Mode.ENFORCE

    known = override.Memory(tmp_path)
    await override.save(plain, tmp_path, strict)
    await known.refresh(plain, in_the_kernel)
    assert known.mode(plain) is kernel.Mode.ENFORCE
    file.write_text(text)
    await known.refresh(plain)
    assert known.error and known.mode(plain) is kernel.Mode.ENFORCE  # the last that was read
    anew = override.Memory(tmp_path)
    await anew.refresh(plain, in_the_kernel)
    assert anew.error and anew.mode(plain) is kernel.Mode.ENFORCE  # what an earlier agent left
    await anew.refresh(plain)
    assert anew.mode(plain) is kernel.Mode.ENFORCE
    file.unlink()
    await anew.refresh(plain)
    assert anew.mode(plain) is kernel.Mode.DRY_RUN


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "mode": "enforcd", "by": "me", "reason": "why", "at": 1.5}',
        '{"format": 1, "mode": "enforce", "by": "me", "reason": "why"}',
    ],
)
@pytest.mark.parametrize(
    ("said", "word", "then"),
    [
        ("enforce", None, "enforce"),
        ("off", None, "dry-run"),  # by halves nothing is taken off
        ("enforce", "a mode of later", "dry-run"),
        ("enforce", b"\xff", "dry-run"),
    ],
)
async def test_after_a_boot_the_word_of_a_damaged_override_counts(
    tmp_path: Path, text: str, said: str, word: str | bytes | None, then: str
) -> None:
    """Then the kernel has no guard whose mode could be kept."""
    plain = wanted(tmp_path, mode="dry-run")

    async def in_the_kernel() -> kernel.Mode:
        return kernel.Mode.OFF

    await override.save(plain, tmp_path, override.Override(kernel.Mode(said), "me", "why", 1.5))
    record.override_file(tmp_path).write_text(text)
    if word is not None:
        record.word_file(tmp_path).write_bytes(word if isinstance(word, bytes) else word.encode())
    known = override.Memory(tmp_path)
    await known.refresh(plain, in_the_kernel)
    assert (known.error != "", known.mode(plain)) == (True, kernel.Mode(then))
    await override.save(plain, tmp_path, None)  # set-mode settings
    assert not record.word_file(tmp_path).exists()
    await known.refresh(plain)
    assert known.mode(plain) is kernel.Mode.DRY_RUN


async def test_note_is_recalled(tmp_path: Path) -> None:
    assert (await override.recall(wanted(tmp_path), tmp_path)).noted == ()
    await override.note(tmp_path, "detach", "me", "why", mode="off")
    (line,) = (await override.recall(wanted(tmp_path), tmp_path)).noted
    assert (line["action"], line["by"], line["reason"], line["mode"]) == (
        *("detach", "me", "why", "off"),
    )


async def test_what_the_disk_does_not_take_is_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bpf").mkdir()
    monkeypatch.setattr(pins, "file_system", lambda _: None)
    guard, state = wanted(tmp_path), tmp_path / "state"
    state.write_text("no directory")  # as a disk that is full or read-only
    kept, warning = await override.save(guard, state, ME)
    assert kept
    assert "until the next boot" in warning
    with pytest.raises(kit.errors.HostError, match=r"operator\.log"):
        await override.note(state, "detach", "me", "why")
    found = await override.recall(guard, state)
    assert (found.override, found.unsaved) == (ME, True)
    # Another agent's directory is no concern of this override.
    assert (await override.recall(guard, tmp_path / "other")).override is None
    # 'set-mode settings' clears it there, too.
    assert (await override.save(guard, state, None))[0]
    found = await override.recall(guard, state)
    assert (found.override, found.unsaved, found.error) == (None, True, "")
    # As soon as the disk takes it, memory holds nothing more.
    state.unlink()
    assert await override.save(guard, state, ME) == (True, "")
    assert override.held_at(guard) is None
    assert (await override.recall(guard, state)).override == ME


async def test_without_disk_and_memory_only_the_running_agent_knows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    guard = settings.GuardSettings(pins=tmp_path / "file" / "bpf" / "nodeagent")
    kept, warning = await override.save(guard, tmp_path / "file" / "state", ME)
    assert not kept
    assert "ends with the agent that runs now" in warning


async def test_mode_that_the_settings_leave_out_lowers_nothing(tmp_path: Path) -> None:
    enforcing = wanted(tmp_path, mode="enforce")
    recalled = await override.recall(enforcing, tmp_path)
    assert await override.remember(enforcing, kernel.Mode.ENFORCE, recalled, tmp_path) == ""
    last = (await override.recall(enforcing, tmp_path)).last
    assert last is not None
    assert last.mode == "enforce"
    assert override.settings_mode(wanted(tmp_path), last) is kernel.Mode.ENFORCE
    assert override.settings_mode(wanted(tmp_path), None) is kernel.Mode.DRY_RUN
    for mode in ("off", "dry-run", "enforce"):  # said by name
        assert override.settings_mode(wanted(tmp_path, mode=mode), last) == mode


async def test_settings_of_a_newer_agent_are_taken_as_far_as_they_are_known(
    tmp_path: Path,
) -> None:
    fields = {"mode": "enforce", "drivers": ["loop"], "a_setting_of_later": 1}
    record.write_wanted(str(tmp_path), fields)
    last = (await override.recall(wanted(tmp_path), tmp_path)).last
    assert last is not None
    assert (last.mode, last.drivers) == ("enforce", ("loop",))
    record.write_wanted(str(tmp_path), {"mode": "enforce", "drivers": "none of ours"})
    last = (await override.recall(wanted(tmp_path), tmp_path)).last
    assert last is not None
    assert (last.mode, last.drivers) == ("enforce", settings.GuardSettings().drivers)


def test_what_is_left_out_with_the_mode_is_as_it_was(tmp_path: Path) -> None:
    last = wanted(tmp_path, mode="enforce", drivers=("rbd", "loop"), openers=("mount",))
    lost = settings.GuardSettings()
    assert override.in_force(lost, last) == last
    named = settings.GuardSettings(drivers=("rbd",))  # said by name
    found = override.in_force(named, last)
    assert (found.mode, found.drivers, found.openers) == ("enforce", ("rbd",), ("mount",))
    for said in (settings.GuardSettings(mode="enforce"), settings.GuardSettings(mode="dry-run")):
        assert override.in_force(said, last) is said
    weak = last.model_copy(update={"mode": "dry-run"})
    # In another mode, too: an operator may have set it to enforce over these settings.
    assert override.in_force(lost, weak) == weak
    taken_off = last.model_copy(update={"mode": "off"})
    assert override.in_force(lost, taken_off).mode == "dry-run"  # as the mode that is left out
    assert override.in_force(lost, None) is lost
    # Nobody has named it, also for who is asked about what is in force.
    assert "mode" not in found.model_fields_set


@pytest.mark.parametrize("left", [kernel.Mode.ENFORCE, kernel.Mode.OFF])
async def test_last_settings_that_are_damaged_lower_nothing_and_are_told(
    tmp_path: Path, left: kernel.Mode
) -> None:
    file = record.wanted_file(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("{")

    async def in_the_kernel() -> kernel.Mode:
        return left

    known = override.Memory(tmp_path)
    lost = wanted(tmp_path)
    await known.refresh(lost, in_the_kernel)
    assert known.mode(lost) is override.stronger(left, kernel.Mode.DRY_RUN)
    assert "guard-wanted.json cannot be used" in known.lost
    await known.refresh(lost)
    assert known.mode(lost) is override.stronger(left, kernel.Mode.DRY_RUN)
    await known.keep(lost)
    assert file.read_text() == "{"  # nothing weaker is written over it
    named = wanted(tmp_path, mode="enforce")
    await known.refresh(named)
    assert known.mode(named) is kernel.Mode.ENFORCE and not known.lost
    await known.keep(named)
    assert (await override.recall(lost, tmp_path)).last == named


async def test_kill_switch_waits_for_no_other_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads that the rooms share hang, as on a disk that does not answer."""
    over, reached = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    stuck = asyncio.create_task(asyncio.to_thread(over.wait))

    def to_kernel(_: settings.GuardSettings, mode: kernel.Mode, weaker: bool) -> bool:
        assert mode is kernel.Mode.OFF
        loop.call_soon_threadsafe(reached.set)
        return False

    monkeypatch.setattr(override, "_to_kernel", to_kernel)
    switched = asyncio.create_task(override.detach(wanted(tmp_path), tmp_path, "me", "why"))
    try:
        async with asyncio.timeout(waiting.limit(60)):
            await reached.wait()
    finally:
        over.set()
        await asyncio.gather(stuck, switched)


async def test_kill_switch_waits_once_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The override and the line of the log: both writes are under way before one of them ends."""
    both = asyncio.Barrier(2)

    async def hang(*_: object, deadline: float) -> None:
        await both.wait()
        raise kit.errors.HostError("the disk", "hangs", "")

    monkeypatch.setattr(kit.child, "call", hang)
    monkeypatch.setattr(override, "_to_kernel", lambda *_: False)
    monkeypatch.setattr(pins, "file_system", lambda _: None)
    guard = wanted(tmp_path, mode="enforce")
    guard.pins.parent.mkdir()
    async with asyncio.timeout(waiting.limit(30)):
        done = await override.detach(guard, tmp_path, "me", "why")
    assert done.kept
    in_memory, missed = done.warnings
    assert "until the next boot" in in_memory and "not in the operator log" in missed


async def test_of_damaged_settings_the_rest_counts_and_the_damage_is_told(tmp_path: Path) -> None:
    lost = wanted(tmp_path)
    record.write_wanted(
        str(tmp_path), {"mode": "enforce", "drivers": 7, "openers": ["mount"], "lease": "never"}
    )
    found = await override.recall(lost, tmp_path)
    assert found.last is not None
    assert (found.last.mode, found.last.openers) == ("enforce", ("mount",))
    assert "guard-wanted.json cannot be used (drivers, lease)" in found.lost
    known = override.Memory(tmp_path)
    await known.refresh(lost)
    assert known.lost == found.lost
    # Whoever knew all of them keeps that, and mends the file.
    record.write_wanted(str(tmp_path), {"mode": "enforce", "drivers": ["loop"]})
    known = override.Memory(tmp_path)
    await known.refresh(lost)
    record.write_wanted(str(tmp_path), {"mode": "enforce", "drivers": 7})
    await known.refresh(lost)
    assert (known.lost, known.in_force(lost).drivers) == ("", ("loop",))
    await known.keep(known.in_force(lost))
    last = (await override.recall(lost, tmp_path)).last
    assert last is not None and last.drivers == ("loop",)


async def test_a_default_of_an_earlier_version_does_not_stay(tmp_path: Path) -> None:
    said = wanted(tmp_path, mode="enforce", openers=("mount",))
    assert not await override.remember(said, kernel.Mode.ENFORCE, override.Recalled(), tmp_path)
    kept = json.loads(record.wanted_file(tmp_path).read_text())
    assert "lease" not in str(kept) and "mount" in str(kept)
    last = (await override.recall(settings.GuardSettings(), tmp_path)).last
    assert last is not None and override.in_force(settings.GuardSettings(), last).mode == "enforce"


async def test_an_operators_word_in_memory_alone_hides_no_damage(tmp_path: Path) -> None:
    file = record.wanted_file(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    lost = wanted(tmp_path)
    known = override.Memory(tmp_path)
    await known.refresh(lost)
    known.hold(override.Override(kernel.Mode.DRY_RUN, "me", "why", 1.0))
    await known.refresh(lost)
    assert known.lost
    await known.keep(lost)
    assert file.read_text() == "{"


async def test_a_disk_that_does_not_answer_leaves_the_last_settings_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object, deadline: float) -> None:
        raise kit.errors.HostError("the disk", "hangs", "")

    monkeypatch.setattr(kit.child, "call", hang)
    assert "hangs" in (await override.recall(wanted(tmp_path), tmp_path)).lost
    assert not (await override.recall(wanted(tmp_path, mode="enforce"), tmp_path)).lost


def test_lost_settings_take_no_driver_and_admit_nobody() -> None:
    default = kernel.wanted(settings.GuardSettings(), kernel.Mode.ENFORCE, {252: "rbd"})
    there = kernel.Present(
        kernel.Mode.ENFORCE, frozenset({7}), openers=frozenset({"mount"}),
        programs=(bpf.ProgramInfo(1, kernel.PROGRAM, "", 0, ()),),
    )  # fmt: skip
    found = kernel.at_least(default, there)
    assert found.mode is kernel.Mode.ENFORCE
    assert found.majors == {7, 252}
    assert found.openers == {"mount"}
    assert not found.allowed()
    assert kernel.at_least(default, kernel.Present()) == default  # nothing is attached


async def test_a_caller_who_leaves_does_not_block_the_kill_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waits for a lock of the kernel's directory, and a client that goes away."""
    begun, over, did = threading.Event(), threading.Event(), list[kernel.Mode]()

    def to_kernel(_: settings.GuardSettings, mode: kernel.Mode, weaker: bool) -> bool:
        begun.set()
        over.wait()
        did.append(mode)
        return False

    monkeypatch.setattr(override, "_to_kernel", to_kernel)
    guard = wanted(tmp_path, mode="enforce")
    first = asyncio.create_task(override.set_mode(guard, tmp_path, "dry-run", "me", "why"))
    try:
        assert await asyncio.to_thread(begun.wait, 60)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(override.detach(guard, tmp_path, "me", "why"))
    finally:
        over.set()
    done = await second
    assert did == [kernel.Mode.DRY_RUN, kernel.Mode.OFF, kernel.Mode.OFF]
    assert done.override is not None and done.override.mode is kernel.Mode.OFF


async def test_a_line_that_says_the_default_is_kept_and_a_default_is_not(tmp_path: Path) -> None:
    default = settings.GuardSettings()
    # Every default, as 84e85b5 and earlier agents wrote them.
    record.write_wanted(
        str(tmp_path), default.model_copy(update={"mode": "enforce"}).model_dump(mode="json")
    )
    said = settings.GuardSettings(mode="enforce", drivers=default.drivers)
    recalled = await override.recall(said, tmp_path)
    assert not await override.remember(said, kernel.Mode.ENFORCE, recalled, tmp_path)
    kept = json.loads(record.wanted_file(tmp_path).read_text())
    assert "lease" not in kept
    less = settings.GuardSettings(mode="enforce")
    recalled = await override.recall(less, tmp_path)
    assert not await override.remember(less, kernel.Mode.ENFORCE, recalled, tmp_path)
    recalled = await override.recall(said, tmp_path)
    assert not await override.remember(said, kernel.Mode.ENFORCE, recalled, tmp_path)
    assert "drivers" in json.loads(record.wanted_file(tmp_path).read_text())
