"""What lies in the state directory: files that were found damaged, and whether it takes any more.

Readers keep a damaged file as NAME.damaged (``kit.formats``) and act on the reading that can do no
harm. What they assumed is in each room's table; here it becomes a finding, for as long as the kept
file is there. So also the next agent tells it, and a person who has looked at it deletes it.
"""

import asyncio
import contextlib
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

import kit.findings
import kit.formats
import kit.tasks
from kit.findings import Finding, Severity
from kit.formats import SUFFIX
from nodeagent.state import State

log = structlog.get_logger("agent")

LOOK_SECONDS = 5.0
ANSWER_SECONDS = 5.0  # of the disk
LEAST_BYTES = 2**20  # less is full: each file is written beside the one that it replaces
LEAST_INODES = 16
MOST_TOLD = 50  # damaged files
# Of the process's own files: what is assumed while one is damaged.
FILES = {
    "cluster.json": "objects of the cluster count again once the API server answers",
    "requests.json": "requests of annotations that it may have had count as failed",
}
_STATE = kit.tasks.Apart("state directory, agent")


@functools.lru_cache(maxsize=1024)
def _wrong(kept: Path, changed: int) -> str:
    """Of a file that was kept aside: it may be large, and is read once for each change of it."""
    return kit.formats.what_was_wrong(kept)


@dataclass(frozen=True)
class Look:
    """``assumed``: by pattern below ``folder``."""

    folder: Path
    assumed: Mapping[str, str]

    def damaged(self) -> dict[str, tuple[str, str]]:
        """Names of damaged files, what was wrong with them and what is assumed. Blocking."""
        found: dict[str, tuple[str, str]] = {}
        for pattern, assumed in self.assumed.items():
            with contextlib.suppress(OSError):
                for kept in sorted(self.folder.glob(f"{pattern}{SUFFIX}"))[:MOST_TOLD]:
                    name = str(kept.relative_to(self.folder)).removesuffix(SUFFIX)
                    found[name] = _wrong(kept, kept.lstat().st_mtime_ns), assumed
        return found

    def full(self) -> str:
        """What of its file system keeps from writing; '' while there is room. Blocking, OSError."""
        disk = os.statvfs(self.folder)
        free = disk.f_bfree * disk.f_frsize
        if disk.f_flag & os.ST_RDONLY:
            return "is read-only"
        if free < LEAST_BYTES:
            return f"is full: {free} of {disk.f_blocks * disk.f_frsize} bytes free"
        if disk.f_files and disk.f_ffree < LEAST_INODES:
            return f"has no inodes left: {disk.f_ffree} of {disk.f_files}"
        return ""


def _full(folder: Path, why: str) -> Finding:
    return Finding(
        id="state-dir-full",
        rule="state-dir-full",
        severity=Severity.CRITICAL,
        subject=f"state_dir {folder}",
        message=f"the file system of {folder} {why}: nothing that has to be remembered is done, as "
        "a removal, a choice or a permission to format",
        advice=f"free some space on the file system of {folder} (logs, ended containers, images; "
        "'nodeagent dataset evict NAME' if the store is there, too), or make it writable",
    )


def findings(look: Look) -> tuple[list[Finding], list[Finding]]:
    """What degrades the agent, and what is a warning only. Blocking, OSError."""
    why = look.full()
    told = sorted(look.damaged().items())[:MOST_TOLD]
    warnings = [kit.findings.damaged(str(look.folder), name, *said) for name, said in told]
    return [_full(look.folder, why)] if why else [], warnings


async def follow(state: State) -> None:
    """Runs until it is cancelled."""
    look = Look(state.settings.state_dir, tables(each.room.state_files for each in state.running))
    while True:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                wrong, warnings = await _STATE.call(findings, look)
        except (OSError, TimeoutError) as error:
            log.info("state directory cannot be looked at", why=str(error) or "no answer")
        else:
            state.judge("state_dir", wrong, warnings)
        await asyncio.sleep(LOOK_SECONDS)


def tables(of_rooms: Iterable[Mapping[str, str]]) -> dict[str, str]:
    found = dict(FILES)
    for each in of_rooms:
        found |= each
    return found
