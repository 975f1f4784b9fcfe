"""Attach the guard without an agent: at boot, and in the pod's init container.

The guard only becomes weaker because somebody said so by name. So settings that cannot be used
leave the kernel as it is, and so do settings without the section; ``volumes: null`` takes the guard
off. After a boot, when nothing is attached, the settings that were last in force count instead.
"""

import asyncio
from typing import Any

from kit.room import RoomSection
from linux import blockdev
from volumes import settings
from volumes.guard import kernel, memory, override, status

_NO_SECTION = (
    "the settings have no section 'volumes': the guard stays as it was last wanted "
    "('volumes: null' takes it off)"
)


async def attach(section: RoomSection) -> dict[str, Any]:
    """The guard's status afterwards. SettingsError when nothing says what is to be attached and
    when something is attached already; HostError when the kernel does not take the guard."""
    given: settings.GuardSettings | None = section.settings.guard if section.settings else None
    recalled = await override.recall(given or settings.GuardSettings(), section.state_dir)
    if given is not None:
        given = override.in_force(given, recalled.last)
    known = given or recalled.last
    if section.off:
        return await _take_off(known or settings.GuardSettings(), section)
    if given is None and (known is None or (await _present(known)).attached):
        if section.error is not None:
            raise section.error
        return await _status(known or settings.GuardSettings(), section, _NO_SECTION)
    assert known is not None
    mode = override.settings_mode(known, recalled.last)
    if recalled.override is not None:
        mode = recalled.override.mode
    elif recalled.error or recalled.lost:
        mode = override.stronger(mode, recalled.least, (await _present(known)).mode)
    await asyncio.to_thread(_apply, known, mode, bool(recalled.lost))
    if given is None:
        return await _status(known, section, "" if section.error else _NO_SECTION)
    problem = recalled.error or recalled.lost
    if not problem:
        by_settings = override.settings_mode(given, recalled.last)
        problem = await override.remember(given, by_settings, recalled, section.state_dir)
    return await _status(known, section, problem)


async def _status(
    wanted: settings.GuardSettings, section: RoomSection, *warnings: str
) -> dict[str, Any]:
    now = await status.without_agent(wanted, section.state_dir)
    return now | {"warnings": [each for each in warnings if each]}


async def _take_off(wanted: settings.GuardSettings, section: RoomSection) -> dict[str, Any]:
    await asyncio.to_thread(_apply, wanted, kernel.Mode.OFF)
    problem = await override.forget_settings(section.state_dir)
    return await _status(wanted, section, problem)


async def _present(wanted: settings.GuardSettings) -> kernel.Present:
    guard = override.handle(wanted)
    try:
        return await asyncio.to_thread(guard.read)
    finally:
        guard.close()


def _apply(wanted: settings.GuardSettings, mode: kernel.Mode, lost: bool = False) -> None:
    """In a thread: milliseconds. ``lost``: what was last in force is not known."""
    guard = override.handle(wanted)
    try:
        new = kernel.wanted(wanted, mode, blockdev.majors())
        guard.apply(memory.at_least(new, guard.read()) if lost else new)
    finally:
        guard.close()
