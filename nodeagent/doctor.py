"""``nodeagent doctor``: what works on this node, what is missing, what that costs, how to get it.

It needs no running agent, and it changes nothing. A check of a room that the settings leave out is
made all the same, but is not *wanted*: its result does not count.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kit.child
import kit.errors
import kit.files
from kit.checks import Check
from linux import syscalls
from nodeagent import configfile, door, rooms
from nodeagent.settings import Settings

AT_ONCE = 4


@dataclass(frozen=True)
class Result:
    """``said``: what works, or what is missing."""

    room: str
    name: str
    well: bool
    wanted: bool
    said: str
    cost: str = ""
    remedy: str = ""

    @property
    def word(self) -> str:
        return "ok" if self.well else "MISSING" if self.wanted else "absent"


def root() -> str:
    if os.geteuid() != 0:
        raise kit.errors.HostError("root", "this is not run as root", "run it as root")
    bits = next(
        int(line.split()[1], 16)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("CapEff")
    )
    if not bits >> 21 & 1:
        raise kit.errors.HostError("root", "it lacks CAP_SYS_ADMIN", "in a pod: privileged: true")
    return "root with CAP_SYS_ADMIN"


def state(path: str) -> str:
    there = kit.files.existing(path)
    if os.statvfs(there).f_flag & os.ST_RDONLY or not os.access(there, os.W_OK):
        raise kit.errors.HostError(f"state_dir {path}", "cannot be written", "make it writable")
    return f"{path} can be written"


def clock() -> str:
    state = syscalls.clock_state()
    if not state.synchronised:
        raise kit.errors.HostError(
            "the clock", "the kernel says it is not synchronised", "run chrony or systemd-timesyncd"
        )
    return f"synchronised within {state.max_error_seconds:.3f}s"


def _own(settings: Settings) -> Sequence[Check]:
    return (
        Check("root", root, (), "the agent does not start"),
        Check("state", state, (str(settings.state_dir),), "the agent does not start"),
        Check("clock", clock, (), "Ceph may refuse its keys; times in findings are wrong"),
        *door.checks(settings.admin, settings.this_node),
    )


async def _make(room: str, check: Check, wanted: bool, turn: asyncio.Semaphore) -> Result:
    wanted = wanted and check.wanted
    try:
        async with turn:
            said = await kit.child.call(check.look, *check.arguments, deadline=check.deadline)
    except kit.errors.AgentError as error:
        why = f"{error.thing}: {error.cause}"
        return Result(room, check.name, False, wanted, why, check.cost, error.remedy)
    except (OSError, RuntimeError) as error:
        remedy = "see the kernel log"
        return Result(room, check.name, False, wanted, str(error), check.cost, remedy)
    return Result(room, check.name, True, wanted, said)


async def examine(config: Path) -> list[Result]:
    """Every check. The settings file decides what is wanted; without one nothing of a room is."""
    turn = asyncio.Semaphore(AT_ONCE)
    try:
        settings = configfile.load(config)
        file = Result("agent", "settings", True, True, f"{config} can be used")
    except kit.errors.SettingsError as error:
        settings = Settings()
        file = Result(
            "agent", "settings", False, config.exists(), f"{error.thing}: {error.cause}",
            "the defaults are looked at, and no room counts as wanted", error.remedy,
        )  # fmt: skip
    made = [_make("agent", check, True, turn) for check in _own(settings)]
    for room in rooms.ROOMS:
        section = getattr(settings, room.name)
        if room.checks is not None:
            found = room.checks(settings.room(room), settings.state_dir)
            made += [_make(room.name, check, section is not None, turn) for check in found]
    return [file, *await asyncio.gather(*made)]
