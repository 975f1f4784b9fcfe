"""What a running agent knows of the mode that was asked for, whatever the disk does."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from volumes import settings
from volumes.guard import kernel, override, record


class Memory:
    """``override``: the last one that was read or given. ``error``: why it is not known whether
    there is one. ``lost``: why the settings that were last in force are not known, or not all of
    them, where those of now name no mode. ``unwritten``: why what is in force is not on disk."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self.override: override.Override | None = None
        self.error = self.lost = ""
        self.unwritten = ""
        self.noted: Sequence[dict[str, Any]] = ()  # the operator log's newest lines
        self._recalled = override.Recalled()
        self._held: override.Recalled | None = None  # what neither disk nor kernel could take
        self._last: settings.GuardSettings | None = None  # the settings that were last in force
        self._floor = kernel.Mode.OFF  # not weaker than this while an override may be unread

    def mode(self, wanted: settings.GuardSettings) -> kernel.Mode:
        """The mode that must be in force: an operator's, else that of the settings."""
        if self.override is not None:
            return self.override.mode
        return override.stronger(self.settings_mode(wanted), self._floor)

    def settings_mode(self, wanted: settings.GuardSettings) -> kernel.Mode:
        return override.settings_mode(wanted, self._last)

    def in_force(self, wanted: settings.GuardSettings) -> settings.GuardSettings:
        return override.in_force(wanted, self._last)

    def add(self, line: dict[str, Any]) -> None:
        """A line that has just come to the operator log."""
        self.noted = (*self.noted, line)[-record.MOST_NOTED :]

    def hold(self, new: override.Override | None) -> None:
        """An operator's word that could be kept nowhere else."""
        self._held = override.Recalled(
            new, last=self._last, unsaved=True, noted=tuple(self.noted), lost=self.lost
        )

    async def refresh(
        self,
        wanted: settings.GuardSettings,
        left: Callable[[], Awaitable[kernel.Mode]] | None = None,
    ) -> None:
        """Read what commands may have written. ``left``: asks for the mode that an earlier agent
        left in the kernel; only before this one has changed it."""
        found = self._held or await override.recall(wanted, self._state_dir)
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
            self._floor = override.stronger(floor, found.least)

    async def keep(self, wanted: settings.GuardSettings) -> None:
        """Bring to disk what is in force."""
        found, self.unwritten = self._recalled, ""
        if found.unsaved:
            kept, self.unwritten = await override.save(wanted, self._state_dir, found.override)
            self._held = None if kept else found
        if not self.unwritten and not self.lost:
            mode = self.settings_mode(wanted)
            self.unwritten = await override.remember(wanted, mode, found, self._state_dir)


def at_least(wanted: kernel.Wanted, present: kernel.Present) -> kernel.Wanted:
    """What to bring to the kernel while the last settings are lost: the mode as wanted, no major
    less than there is, and nobody admitted who is not now."""
    if not present.attached:
        return wanted
    return replace(
        wanted,
        majors=wanted.majors | present.majors,
        openers=present.openers,
        words=frozenset(
            {word for word in present.words if word.kind is kernel.Kind.ALLOWED}
            | {word for word in wanted.words if word.kind is not kernel.Kind.ALLOWED}
        ),
    )
