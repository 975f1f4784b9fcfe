"""Mode and kill switch, straight at the kernel: they work whether or not an agent runs.

An operator in an incident must be able to stop the guard although the agent hangs, its settings
file is wrong or its disk takes nothing. So ``set_mode`` and ``detach`` change the kernel first.
Then they write an *override* into the state directory, which the agent respects from then on, also
after a restart, until ``set-mode settings`` clears it. Each action is a line in the operator log.

Where the state directory cannot be written within ``WRITE_SECONDS``, a symbolic link beside the
guard's pins holds the override instead: a bpf file system is memory that host and pods share, until
the next boot. The agent moves it to the disk as soon as the disk takes it.
"""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic

import kit.child
import kit.errors
import kit.tasks
from volumes import settings
from volumes.guard import kernel, pins, record

READ_SECONDS = 3.0
WRITE_SECONDS = 3.0


@dataclass(frozen=True)
class Override:
    """``mode``: in force until it is cleared; off means detached. ``at``: Unix seconds."""

    mode: kernel.Mode
    by: str
    reason: str
    at: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "mode": str(self.mode)}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Override":
        """ValueError, KeyError or TypeError when ``fields`` are damaged."""
        mode, at = kernel.Mode(fields["mode"]), float(fields["at"])
        return cls(mode, str(fields["by"]), str(fields["reason"]), at)


@dataclass(frozen=True)
class Recalled:
    """What is remembered of the guard. ``error``: why the override is not known; empty: it is.

    ``last``: the guard's settings that were last in force, None when unknown. ``unsaved``: the
    override is in memory alone. ``noted``: the newest lines of the operator log. ``lost``: why the
    last settings are not known, or not all of them, while those of now name no mode. ``least``: the
    mode that an operator set, while more of the override is not known; off: nor is that.
    """

    override: Override | None = None
    error: str = ""
    last: settings.GuardSettings | None = None
    unsaved: bool = False
    noted: tuple[dict[str, Any], ...] = ()
    lost: str = ""
    least: kernel.Mode = kernel.Mode.OFF


@dataclass(frozen=True)
class Done:
    """What an action did. ``warnings``: what could not be written down, and what that means.

    ``kept``: the next agent knows of ``override`` too.
    """

    attached: bool
    override: Override | None
    kept: bool = True
    warnings: tuple[str, ...] = ()


def handle(wanted: settings.GuardSettings, program: Path | None = None) -> kernel.Kernel:
    """The guard of the settings' cgroup. HostError without a cgroup v2 hierarchy."""
    cgroup = wanted.cgroup or kernel.find_cgroup()
    return kernel.Kernel(cgroup, wanted.pins, program or kernel.OBJECT)


def present(wanted: settings.GuardSettings) -> kernel.Present:
    """What is attached there and in force now. HostError, InUseError, OSError."""
    with contextlib.closing(handle(wanted)) as guard:
        return guard.read()


# --- what is remembered


async def recall(wanted: settings.GuardSettings, state_dir: Path) -> Recalled:
    """What operators and earlier settings said. Never raises: the disk may hang or be damaged."""
    held = _held(wanted, state_dir)
    try:
        found = await kit.child.call(record.read, str(state_dir), deadline=READ_SECONDS)
    except (kit.errors.AgentError, OSError, RuntimeError) as error:
        errors = {"override": str(error), "wanted": str(error)}
        found = {"override": None, "wanted": None, "errors": errors, "noted": [], "word": ""}
    noted = tuple(found["noted"])
    last, unusable = _settings(found["wanted"])
    lost = found["errors"].get("wanted", "")
    if unusable:
        lost = f"{record.wanted_file(state_dir)} cannot be used ({unusable})"
    if lost and "mode" not in wanted.model_fields_set:
        lost += "; name volumes.guard.mode in the settings"
    else:
        lost = ""  # they say it themselves, and are written down anew
    if held is not None:
        return Recalled(held[0], "", last, True, noted, lost)
    problem = found["errors"].get("override", "")
    try:
        override = None if found["override"] is None else Override.of(found["override"])
    except (ValueError, KeyError, TypeError) as error:
        override, problem = None, f"{record.override_file(state_dir)} cannot be used ({error})"
    least = kernel.Mode.OFF
    if problem:
        least = _mode(found["word"])
        problem += "; set the mode again, or remove the file"
    return Recalled(override, problem, last, noted=noted, lost=lost, least=least)


def _mode(word: str) -> kernel.Mode:
    try:
        return kernel.Mode(word)
    except ValueError:  # no word, or one of another version
        return kernel.Mode.OFF


def _settings(fields: dict[str, Any] | None) -> tuple[settings.GuardSettings | None, str]:
    """What another version wrote and this one does not know is left out. Also says which fields
    it knows and cannot use."""
    known = {
        name: value
        for name, value in (fields or {}).items()
        if name in settings.GuardSettings.model_fields
    }
    unusable: list[str] = []
    while known:
        try:
            return settings.GuardSettings.model_validate(known), ", ".join(unusable)
        except pydantic.ValidationError as error:
            bad = {str(each["loc"][0]) for each in error.errors() if each["loc"]} & known.keys()
            for name in sorted(bad or known):
                unusable.append(name)
                del known[name]
    return None, ", ".join(unusable)


def settings_mode(
    wanted: settings.GuardSettings, last: settings.GuardSettings | None
) -> kernel.Mode:
    """The mode of the settings. One that they leave out never lowers the mode of the last ones: a
    line that is lost from a file is no word of anybody's."""
    mode = kernel.Mode(wanted.mode)
    if "mode" in wanted.model_fields_set or last is None:
        return mode
    return stronger(mode, kernel.Mode(last.mode))


def in_force(
    wanted: settings.GuardSettings, last: settings.GuardSettings | None
) -> settings.GuardSettings:
    """The settings that count. Where they name no mode, the guard's lines may be lost. So all that
    they leave out is as it was, too: drivers and openers, without which a guard is weaker in any
    mode and under an operator's, and where it is attached."""
    if last is None or "mode" in wanted.model_fields_set:
        return wanted
    left_out = last.model_fields_set - wanted.model_fields_set - {"mode"}
    as_it_was = {name: getattr(last, name) for name in left_out}
    mode = str(settings_mode(wanted, last))
    found = wanted.model_copy(update={**as_it_was, "mode": mode})
    found.model_fields_set.discard("mode")  # nobody has named it
    return found


def stronger(*modes: kernel.Mode) -> kernel.Mode:
    return max(modes, key=lambda mode: mode.number)


async def remember(
    wanted: settings.GuardSettings, mode: kernel.Mode, recalled: Recalled, state_dir: Path
) -> str:
    """Keep the settings that are in force. Returns why they could not be kept, or nothing."""
    now = wanted.model_copy(update={"mode": str(mode)})
    last = recalled.last
    # Equal values do not say which of them somebody named.
    if last is not None and last == now and last.model_fields_set == now.model_fields_set:
        return ""
    # A default is no word of anybody's: a later version may have a better one.
    fields = now.model_dump(mode="json", exclude_unset=True)
    return await _write(record.write_wanted, str(state_dir), fields)


async def forget_settings(state_dir: Path) -> str:
    """The settings name the guard as switched off. Returns why that could not be written."""
    return await _write(record.write_wanted, str(state_dir), None)


async def note(state_dir: Path, action: str, by: str, reason: str, **fields: Any) -> dict[str, Any]:
    """The line, on disk when it returns. HostError otherwise: for what must not be done unless it
    is written down."""
    line = {"at": time.time(), "action": action, "by": by, "reason": reason, **fields}
    if problem := await _write(record.write_line, str(state_dir), line):
        raise kit.errors.HostError(str(record.log(state_dir)), problem, "make it writable")
    return line


async def save(
    wanted: settings.GuardSettings, state_dir: Path, new: Override | None
) -> tuple[bool, str]:
    """Keep ``new`` (None: there is no override) on disk, else in memory. Returns whether one of
    them has it, and a warning unless the disk has."""
    fields = None if new is None else new.as_json()
    problem = await _write(record.write_override, str(state_dir), fields)
    link = _link(wanted)
    if not problem:
        if _held(wanted, state_dir) is not None:
            link.unlink(missing_ok=True)
        return True, ""
    kept, where = True, "is kept in memory until the next boot"
    try:
        pins.file_system(wanted.pins)
        text = json.dumps({"state_dir": str(state_dir), "override": fields})
        other = link.with_name(f"{link.name}-new")
        other.unlink(missing_ok=True)
        other.symlink_to(text)
        other.rename(link)
    except OSError as error:
        kept, where = False, f"ends with the agent that runs now ({link}: {error.strerror})"
    return kept, f"the mode {where}: {problem}"


def _link(wanted: settings.GuardSettings) -> Path:
    return wanted.pins.with_name(f"{wanted.pins.name}-override")


def _held(wanted: settings.GuardSettings, state_dir: Path) -> tuple[Override | None] | None:
    """What memory holds of this state directory; None when it holds nothing."""
    try:
        fields = json.loads(os.readlink(_link(wanted)))
        if fields["state_dir"] != str(state_dir):
            return None
        given = fields["override"]
        return (None if given is None else Override.of(given),)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget(wanted: settings.GuardSettings) -> None:
    """Remove what memory holds."""
    _link(wanted).unlink(missing_ok=True)


def held_at(wanted: settings.GuardSettings) -> Path | None:
    """The link, when it is there."""
    link = _link(wanted)
    return link if link.is_symlink() else None


async def _write(function: Any, state_dir: str, fields: Any) -> str:
    """Why it could not be written, or nothing."""
    try:
        await kit.child.call(function, state_dir, fields, deadline=WRITE_SECONDS)
    except OSError as error:
        return f"{state_dir}: {error.strerror or error}"
    except (kit.errors.AgentError, RuntimeError) as error:
        return f"{state_dir}: {error}"
    return ""


class Memory:
    """What a running agent knows of the mode that was asked for, whatever the disk does.

    ``override``: the last one that was read or given. ``error``: why it is not known whether
    there is one. ``lost``: why the settings that were last in force are not known, or not all of
    them, where those of now name no mode. ``unwritten``: why what is in force is not on disk."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.override: Override | None = None
        self.error = self.lost = ""
        self.unwritten = ""
        self.noted: Sequence[dict[str, Any]] = ()  # the operator log's newest lines
        self._recalled = Recalled()
        self._held: Recalled | None = None  # what neither disk nor kernel could take
        self._last: settings.GuardSettings | None = None  # the settings that were last in force
        self._floor = kernel.Mode.OFF  # not weaker than this while an override may be unread

    def mode(self, wanted: settings.GuardSettings) -> kernel.Mode:
        """The mode that must be in force: an operator's, else that of the settings."""
        if self.override is not None:
            return self.override.mode
        return stronger(self.settings_mode(wanted), self._floor)

    def settings_mode(self, wanted: settings.GuardSettings) -> kernel.Mode:
        return settings_mode(wanted, self._last)

    def in_force(self, wanted: settings.GuardSettings) -> settings.GuardSettings:
        return in_force(wanted, self._last)

    def add(self, line: dict[str, Any]) -> None:
        """A line that has just come to the operator log."""
        self.noted = (*self.noted, line)[-record.MOST_NOTED :]

    def hold(self, new: Override | None) -> None:
        """An operator's word that could be kept nowhere else."""
        self._held = Recalled(
            new, last=self._last, unsaved=True, noted=tuple(self.noted), lost=self.lost
        )

    async def refresh(
        self,
        wanted: settings.GuardSettings,
        left: Callable[[], Awaitable[kernel.Mode]] | None = None,
    ) -> None:
        """Read what commands may have written. ``left``: asks for the mode that an earlier agent
        left in the kernel; only before this one has changed it."""
        found = self._held or await recall(wanted, self._state_dir)
        whole = self._last is not None and not self.lost
        if not found.lost:
            self._last, self.lost = found.last or self._last, ""
        elif not whole:  # else this agent knows them better than the disk
            self._last, self.lost = self._last or found.last, found.lost
        self.noted = found.noted
        self._recalled, self.error = found, found.error
        if not found.error:  # else the last one known stays in force
            self.override = found.override
        if not (self.error or self.lost):
            self._floor = kernel.Mode.OFF
        else:
            floor = self._floor if left is None else await left()
            self._floor = stronger(floor, found.least)

    async def keep(self, wanted: settings.GuardSettings) -> None:
        """Bring to disk what is in force."""
        found, self.unwritten = self._recalled, ""
        if found.unsaved:
            kept, self.unwritten = await save(wanted, self._state_dir, found.override)
            self._held = None if kept else found
        if not self.unwritten and not self.lost:
            mode = self.settings_mode(wanted)
            self.unwritten = await remember(wanted, mode, found, self._state_dir)


# --- actions

_SWITCH = kit.tasks.Apart("kill switch")


async def set_mode(
    wanted: settings.GuardSettings, state_dir: Path, mode: str, by: str, reason: str
) -> Done:
    """Change the kernel at once, then remember the mode and write it down.

    ``settings`` returns to the settings file; ``off`` detaches. When nothing is attached that could
    be changed, the mode is remembered all the same.
    """
    weaker = True
    if mode == "settings":
        kept = await recall(wanted, state_dir)
        new, override = settings_mode(wanted, kept.last), None
        weaker = not kept.lost  # else nobody has said by name that it may be
    else:
        new = kernel.Mode(mode)
        override = Override(new, by, reason, time.time())
    line = {"action": "set-mode", "by": by, "reason": reason, "mode": mode}
    return await _act(wanted, state_dir, new, override, line, weaker)


async def detach(wanted: settings.GuardSettings, state_dir: Path, by: str, reason: str) -> Done:
    """The kill switch: detach first, then remember it and write it down."""
    override = Override(kernel.Mode.OFF, by, reason, time.time())
    line = {"action": "detach", "by": by, "reason": reason}
    return await _act(wanted, state_dir, override.mode, override, line)


async def _act(
    wanted: settings.GuardSettings,
    state_dir: Path,
    mode: kernel.Mode,
    override: Override | None,
    line: dict[str, str],
    weaker: bool = True,
) -> Done:
    await _switch(wanted, mode, weaker)
    if "mode" not in wanted.model_fields_set:  # then they may not say either where it is attached
        wanted = in_force(wanted, (await recall(wanted, state_dir)).last)

    async def save_and_switch() -> tuple[bool, bool, str]:
        kept, warning = await save(wanted, state_dir, override)
        # Meanwhile an agent may have brought back what it knew.
        return await _switch(wanted, mode, weaker), kept, warning

    # Each may wait for a disk that hangs, and an operator waits for both.
    (attached, kept, warning), missed = await asyncio.gather(
        save_and_switch(), _noted(state_dir, line)
    )
    return Done(attached, override, kept, tuple(filter(None, (warning, missed))))


async def _noted(state_dir: Path, line: dict[str, str]) -> str:
    """Why the line could not be written, or nothing."""
    try:
        await note(state_dir, **line)
    except kit.errors.HostError as error:
        return f"the action is not in the operator log: {error}"
    return ""


async def _switch(wanted: settings.GuardSettings, mode: kernel.Mode, weaker: bool) -> bool:
    """A caller who leaves takes nothing back: the next one's turn comes after this one, and is not
    refused."""
    return await asyncio.shield(_SWITCH.call(_to_kernel, wanted, mode, weaker))


def _to_kernel(wanted: settings.GuardSettings, mode: kernel.Mode, weaker: bool) -> bool:
    """In a thread: nothing but short calls to the kernel. Whether a guard is attached now.
    ``weaker``: than what is in force it may be."""
    with contextlib.closing(handle(wanted)) as guard:
        if mode is kernel.Mode.OFF:
            guard.detach()
            return False
        now = guard.read()
        if now.attached:
            guard.set_mode(mode if weaker else stronger(mode, now.mode))
        return now.attached
