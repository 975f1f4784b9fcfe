"""One unit of systemd's journal, followed by journalctl. Runs in the log child only."""

import asyncio
import contextlib
import glob
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from volumes.logs import follow

# On disk, in memory. Below them one directory for each machine id.
DIRECTORIES = ("/var/log/journal", "/run/log/journal")
ASK_SECONDS = 20.0  # for the unit's last line: a journal of gigabytes on a slow disk
END_SECONDS = 2.0
STEADY_SECONDS = 5.0  # a journalctl that lives so long is following
OVERLAP_SECONDS = 1.0  # a line twice rather than not at all


@dataclass
class Journal:
    """``feed`` gets blocks and the line they go on with, and gives back what they leave of one;
    ``state`` is told why nothing can be read ("" when it can).

    Invariant: a ``run`` after another one goes on where that one ended.
    """

    unit: str
    feed: Callable[[bytes, bytes], bytes]
    state: Callable[[str], None]
    directories: tuple[str, ...] = DIRECTORIES

    def __post_init__(self) -> None:
        self._since = time.time()  # lines from then on are read

    async def run(self) -> None:
        """Until journalctl ends; the state then says so. OSError when it cannot be started."""
        program = shutil.which("journalctl")
        if program is None:
            self.state("journalctl is not there: mount the logs as files instead")
            return
        # Without persistent storage the one on disk may be there and empty.
        directory = next((d for d in self.directories if glob.glob(f"{d}/*/*.journal")), None)
        if directory is None:
            self.state(f"no journal in {' or '.join(self.directories)}: mount the host's there")
            return
        # By directory: without it journalctl looks for this container's machine id, not the host's.
        command = (
            *(program, f"--directory={directory}", f"--unit={self.unit}"),
            *("--output=cat", "--quiet"),
        )
        # Whether the unit exists only its lines tell: a container does not reach systemd.
        empty = not await _answer(*command, "--lines=1")
        if empty:
            # Followed all the same: a unit just installed says nothing before it runs.
            self.state(f"{directory} has no line of {self.unit}: is the unit called so here?")
        # By time and not by the journal's end: what comes while journalctl starts is read too.
        since = ("--no-tail", f"--since=@{self._since:.3f}")
        code = await self._follow((*command, "--follow", *since), known=not empty)
        self.state(f"journalctl for {self.unit} ended with {code}")

    async def _follow(self, command: tuple[str, ...], *, known: bool) -> int:
        process = await _start(*command)
        assert process.stdout is not None
        steady = asyncio.get_running_loop().call_later(STEADY_SECONDS, self.state, "")
        if not known:
            steady.cancel()
        begun = b""
        try:
            while block := await process.stdout.read(follow.BLOCK):
                self._since = max(self._since, time.time() - OVERLAP_SECONDS)
                self.state("")
                begun = self.feed(block, begun)
            # Its output has ended, so it ends by itself. A signal sent now would reap it behind
            # the event loop's back, and its exit code would be lost.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), END_SECONDS)
        finally:
            steady.cancel()
            await _end(process)
        return await process.wait()


async def _start(*command: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )


async def _answer(*command: str) -> bytes:
    """What it prints; nothing when it fails or takes longer than ASK_SECONDS."""
    process = await _start(*command)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return (await process.communicate())[0]
    except TimeoutError:
        return b""
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Killed and, unless it hangs in the kernel, waited for."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), END_SECONDS)
