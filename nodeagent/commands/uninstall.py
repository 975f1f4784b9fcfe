"""``nodeagent uninstall``: takes everything of ours off this node, and lists it first.

It works without an agent, and refuses while one runs. Nothing is removed while anything is in use.
Each step may be repeated, so an uninstall that was interrupted is run again. The settings file and
the image stay: whoever put them there takes them away.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
import kit.formats
import kit.traces
from nodeagent import configfile, rooms
from nodeagent.commands import units
from nodeagent.settings import Settings

FIND_SECONDS = 60.0
REMOVE_SECONDS = 6 * 3600.0  # a store holds millions of files
_STATE = (
    *("api.log", "api.log.1", "api-refused.log", "api-refused.log.1", "cluster.json", "lock"),
    "requests.json",
)
# The chart's init container and an operator leave these beside the state directory.
_BESIDE = ("settings.yaml", ".settings.yaml", "unguarded")


@dataclass(frozen=True)
class FoundTrace:
    """One trace. ``removed``: it is gone now."""

    room: str
    trace: kit.traces.Trace
    removed: bool = False


@dataclass(frozen=True)
class Report:
    """``troubles``: what could not be looked at or removed, and why."""

    found: tuple[FoundTrace, ...]
    troubles: tuple[str, ...] = ()


def find(settings: dict[str, Any], state_dir: str) -> list[dict[str, Any]]:
    """The process's own traces."""
    socket = Path(settings["socket"])
    paths = [Path(state_dir) / name for name in _STATE]
    paths += [kit.formats.aside(path) for path in paths]
    if Path(state_dir).name == "state" and _is_ours(Path(state_dir).parent):
        paths += [Path(state_dir).parent / name for name in _BESIDE]
    secrets = socket.parent / "secrets"  # keys that objects of the cluster refer to
    made = secrets.is_dir() and stat.S_IMODE(secrets.stat().st_mode) == 0o700  # as the agent does
    whole = made and socket.parent.name == "nodeagent"
    paths += [socket, *(secrets.iterdir() if whole else ())]
    found = units.find()
    found += [kit.traces.Trace("file", str(path)) for path in paths if os.path.lexists(path)]
    if made:
        why = "" if whole else "what is in it may be another program's: take our keys out by hand"
        found.append(kit.traces.Trace("folder", str(secrets), stays=why))
    folders = [Path(state_dir), Path(state_dir).parent, socket.parent]
    found += [
        kit.traces.Trace("folder", str(path))
        for path in dict.fromkeys(folders)
        if path.is_dir() and (path == Path(state_dir) or path.name == "nodeagent")
    ]
    return [trace.as_json() for trace in found]


def _is_ours(folder: Path) -> bool:
    """Whether the directory that holds the state directory is ours, too."""
    if folder.name == "nodeagent":
        return True
    try:
        configfile.load(folder / "settings.yaml")
    except kit.errors.SettingsError:
        return False
    return True


def remove(settings: dict[str, Any], state_dir: str, kind: str, name: str) -> None:
    path = Path(name)
    with contextlib.suppress(FileNotFoundError):
        if kind == "link":
            units.remove_link(path)
        elif kind == "file" and path.name.endswith(kit.formats.SUFFIX):
            kit.formats.forget(path)  # a directory, perhaps
        elif kind == "file":
            path.unlink()
        else:
            with contextlib.suppress(OSError):  # somebody else's files are in it
                path.rmdir()


@dataclass(frozen=True)
class _Part:
    name: str
    wanted: bool
    section: dict[str, Any]
    find: Callable[..., list[dict[str, Any]]]
    remove: Callable[..., None]


def _parts(settings: Settings) -> list[_Part]:
    """The rooms in the order in which they stop, then the process."""
    found = []
    for room in reversed(rooms.ROOMS):
        section = getattr(settings, room.name)
        if room.traces is not None:
            shown = settings.room(room).as_json()
            of = room.traces()
            found.append(_Part(room.name, section is not None, shown, of.find, of.remove))
    return [*found, _Part("agent", True, {"socket": str(settings.admin.socket)}, find, remove)]


async def _look(settings: Settings) -> Report:
    found: list[FoundTrace] = []
    troubles = []
    for part in _parts(settings):
        try:
            listed = await kit.child.call(
                part.find, part.section, str(settings.state_dir), deadline=FIND_SECONDS
            )
        except (kit.errors.AgentError, OSError, RuntimeError) as error:
            # What the settings leave out may well not be there. Where it is, it may hold what is
            # ours: they may have left it out a moment ago.
            if part.wanted or not isinstance(error, kit.errors.NotFoundError):
                troubles.append(f"{part.name}: {error}")
            continue
        found += [
            FoundTrace(part.name, kit.traces.Trace(**{**one, "users": tuple(one["users"])}))
            for one in listed
        ]
    return Report(tuple(found), tuple(troubles))


async def run(
    settings: Settings, yes: bool, say: Callable[[FoundTrace], None], forget: bool = False
) -> Report:
    """List the traces; with ``yes`` remove them and tell ``say`` of each, and of each that stays.

    ``forget``: traces that are a memory go too. InUseError: by whom.
    """
    with kit.traces.without_agent(settings.state_dir) if yes else contextlib.nullcontext():
        report = await _look(settings)
        if forget:
            report = replace(report, found=tuple(map(_forgotten, report.found)))
        if not yes:
            return report
        going = [each.trace for each in report.found if not each.trace.stays]
        if users := [user for trace in going for user in trace.users]:
            raise kit.errors.InUseError(
                "what is to be removed", f"in use by {kit.errors.some(users)}",
                "end them, then try again; nothing was removed",
            )  # fmt: skip
        parts = {part.name: part for part in _parts(settings)}
        done, troubles = [], list(report.troubles)
        blocked: set[str] = set()
        for each in report.found:
            part = parts[each.room]
            if blocked and each.room == "agent":
                break  # the state directory stays for the next attempt
            if each.trace.stays:
                done.append(each)
                say(each)
                continue
            try:
                await kit.child.call(
                    part.remove, part.section, str(settings.state_dir),
                    each.trace.kind, each.trace.name, deadline=REMOVE_SECONDS,
                )  # fmt: skip
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                troubles.append(f"{each.room}: {each.trace.kind} {each.trace.name}: {error}")
                blocked.add(each.room)
                continue
            if part.name == "agent" and os.path.lexists(each.trace.name):
                continue  # a folder that others, or what stays, have files in
            done.append(replace(each, removed=True))
            say(done[-1])
        return Report(tuple(done), tuple(troubles))


def _forgotten(each: FoundTrace) -> FoundTrace:
    return replace(each, trace=replace(each.trace, stays="")) if each.trace.memory else each
