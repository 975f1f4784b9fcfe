"""Files followed by name across rotation. Runs in the log child only.

Data is looked for by size twice a second, names by inotify on the directories: a flood of writes
makes no flood of events.
"""

import asyncio
import contextlib
import glob
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncinotify import Inotify, Mask

LOOK_SECONDS = 0.5
NAMES_SECONDS = 10.0  # the net under inotify
BLOCK = 1 << 16
# Of one file before the others get their turn.
BLOCKS_AT_ONCE = 64
MOST_FILES = 256
_NAMES = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE


@dataclass
class _File:
    path: str
    descriptor: int
    identity: tuple[int, int]
    offset: int
    begun: bytes = b""  # of a line that is not finished yet

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size


@dataclass
class Follower:
    """All files that a pattern names. ``feed`` gets bytes and the line they go on with, and gives
    back the line they leave unfinished; ``lost`` is told of losses, ``state`` why nothing can be
    read ("" when it can).

    Invariants: of a renamed file what was written before its successor appeared is read first;
    after an OSError ``run`` may be called again and goes on where it was.
    """

    pattern: str
    feed: Callable[[bytes, bytes], bytes]
    lost: Callable[[int], None]
    state: Callable[[str], None]
    files: dict[str, _File] = field(default_factory=dict)
    # Renamed away, read until nothing comes for a while: their writer may still have them open.
    old: list[tuple[_File, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = True
        self._left: dict[tuple[int, int], _File] = {}  # where an earlier run ended
        self._unread = ""  # why no file can be opened

    async def run(self) -> None:
        """Until cancelled. OSError when a file or the names cannot be read any more."""
        self.names()
        for _ in self._left.keys() - {file.identity for file in self.files.values()}:
            self.lost(1)  # rotated away meanwhile: nobody knows how much of it was not read
        self._left = {}
        names = asyncio.create_task(self._follow_names())
        try:
            while True:
                more = await self._round()
                self.state(self._unread)
                if names.done():
                    names.result()  # raises what ended it
                if not more:
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            names.cancel()
            self._leave()

    def _leave(self) -> None:
        """Close everything and remember where it was read to."""
        for file, _ in self.old:
            with contextlib.suppress(OSError):
                if file.offset < file.size():
                    self.lost(1)  # its name is gone: nobody finds the rest again
            os.close(file.descriptor)
        for file in self.files.values():
            os.close(file.descriptor)
        self._left = {file.identity: file for file in self.files.values()}
        self.files, self.old = {}, []

    async def _follow_names(self) -> None:
        while True:
            self.names()
            with Inotify() as inotify:
                for directory in self._directories():
                    with contextlib.suppress(OSError):
                        inotify.add_watch(directory, _NAMES)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(NAMES_SECONDS):
                        await inotify.get()
            await asyncio.sleep(0.1)

    def _directories(self) -> set[str]:
        upper = os.path.dirname(self.pattern)
        found = {os.path.dirname(path) for path in self.files}
        found |= {os.path.dirname(os.path.realpath(path)) for path in self.files}
        found |= {os.path.dirname(upper)} if "*" in upper else {upper}
        return {path for path in found if os.path.isdir(path)}

    def names(self) -> None:
        """Open what is new under the pattern's names; what was there at the start from its end."""
        paths = sorted(glob.glob(self.pattern))[:MOST_FILES]
        refused = ""
        for path in paths:
            try:
                status = os.stat(path)
            except OSError as error:
                refused = refused or f"{path}: {error.strerror}"
                continue
            known = self.files.get(path)
            if known is not None and known.identity == (status.st_dev, status.st_ino):
                continue
            if known is not None:
                self.old.append((known, 4))
            try:
                self._open(path, at_end=self._first)
            except OSError as error:
                refused = refused or f"{path}: {error.strerror}"
        for path in self.files.keys() - set(paths):
            self.old.append((self.files.pop(path), 4))
        self._first = False
        self._unread = "" if self.files else refused or self._missing()

    def _missing(self) -> str:
        """What is not there. A directory without files of a pattern is fine: they may come."""
        if "*" not in self.pattern:
            return f"{self.pattern} is not there"
        directory = os.path.dirname(self.pattern)
        directory = os.path.dirname(directory) if "*" in directory else directory
        return "" if os.path.isdir(directory) else f"{directory} is not there"

    def _open(self, path: str, *, at_end: bool) -> None:
        self.files.pop(path, None)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        identity = status.st_dev, status.st_ino
        left = self._left.get(identity)
        if left is not None:
            self.files[path] = _File(path, descriptor, identity, left.offset, left.begun)
            return
        offset = status.st_size if at_end else 0
        self.files[path] = _File(path, descriptor, identity, offset)

    async def _round(self) -> bool:
        """Read what has come; whether there is more."""
        more = False
        for file in [file for file, _ in self.old]:
            more |= self._read(file)
        self.old = self._settled()
        for file in list(self.files.values()):
            more |= self._read(file)
            await asyncio.sleep(0)
        return more

    def _settled(self) -> list[tuple[_File, int]]:
        kept = []
        for file, rounds in self.old:
            if file.offset < file.size():
                kept.append((file, 4))
            elif rounds > 0:
                kept.append((file, rounds - 1))
            else:
                os.close(file.descriptor)
        return kept

    def _read(self, file: _File) -> bool:
        if file.size() < file.offset:
            self.lost(1)  # cut to nothing in place: what was not read yet is gone
            file.offset, file.begun = 0, b""
        for _ in range(BLOCKS_AT_ONCE):
            block = os.pread(file.descriptor, BLOCK, file.offset)
            if not block:
                return False
            file.offset += len(block)
            file.begun = self.feed(block, file.begun)
        return True
