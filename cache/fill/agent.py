"""A pass and the agent: the life of its process, and what the two say to one another meanwhile."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import kit.errors
import kit.messages
from cache.fill import control, protocol
from cache.store.manifest import Counts

PROGRESS_SECONDS = 0.5

TaskT = TypeVar("TaskT")


class Ended(Exception):
    """The pass is over; ``result`` as in ``protocol.End``."""

    def __init__(self, result: str, why: str = "") -> None:
        super().__init__(why)
        self.result = result
        self.why = why


class AgentChannel:
    """Commands on standard input, reports on standard output.

    Reading never blocks. Writing blocks while the agent does not read, which slows the pass down
    and loses nothing.
    """

    def __init__(self, limits: protocol.Limits) -> None:
        self.limits = limits
        self.page = control.Control.create()  # what is copied is counted there
        self.phase: protocol.Phase = ""
        self.commits = 0
        self._input = b""
        self._reported = 0.0
        os.set_blocking(0, False)

    def obey(self) -> bool:
        """What it said meanwhile: its limits, or a cancel (``page.cancelled``). Whether something
        was said. Ended when it has ended itself."""
        commands = self.commands()
        if commands is None:
            raise Ended("cancelled", "the agent has ended")
        for command in commands:
            self.limits = command.limits or self.limits
            if command.cancel:
                self.page.cancel()
        return bool(commands)

    def heed(self) -> bool:
        """Between two steps of a pass without workers: a sign of life, and what the agent said.
        Whether a report is due. Ended."""
        self.page.beat(0)
        self.obey()
        if self.page.cancelled:
            raise Ended("cancelled")
        return self.waits

    def commands(self) -> list[protocol.Command] | None:
        """Those that have arrived; None when the agent has closed the pipe."""
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._input = (self._input + data).split(b"\n")
        return [kit.messages.decode(line, protocol.Command) for line in lines]

    @property
    def waits(self) -> bool:
        """A report of the progress is due."""
        return time.monotonic() - self._reported >= PROGRESS_SECONDS

    def report(
        self, counts: Counts, used: int, *, sealed: int = 0, shared: int = 0, syncing: bool = False
    ) -> None:  # fmt: skip
        """The progress; the arguments as in ``protocol.Progress``."""
        self._reported = time.monotonic()
        copied_files, copied_bytes = self.page.counted()
        progress = protocol.Progress(
            phase=self.phase, counts=counts, sealed=sealed, copied_files=copied_files,
            copied_bytes=copied_bytes, beats=self.page.beats(), commits=self.commits, used=used,
            syncing=syncing, shared=shared,
        )  # fmt: skip
        say(protocol.Report(progress=progress))


def say(report: protocol.Report) -> None:
    sys.stdout.write(f'{{"result":{kit.messages.encode(report)}}}\n')
    sys.stdout.flush()


def note(text: str) -> None:
    """Have the agent log this."""
    say(protocol.Report(note=text))


def first_task(kind: type[TaskT]) -> TaskT | None:
    """What the agent wants of this process; None when it ended at once.

    From here on signals for the agent's group do not end a pass: the agent cancels or kills it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.umask(0)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as agent:
        line = agent.readline()  # unbuffered: commands follow
    return kit.messages.decode(line, kind) if line.endswith(b"\n") else None


def serve(kind: type[TaskT], run: Callable[[TaskT], protocol.End]) -> None:
    """The life of a pass's process: read the task, run the pass, say how it ended.

    That is the last word: the agent kills this process when it has read it.
    """
    task = first_task(kind)
    if task is None:
        return
    try:
        try:
            end = run(task)
        except Ended as ended:
            end = protocol.End(ended.result, ended.why)
        except kit.errors.AgentError as error:
            end = protocol.End("failed", str(error))
        except OSError as error:
            # By number: Python makes a BrokenPipeError of ESHUTDOWN too, which a source may raise.
            if error.errno == errno.EPIPE:
                return  # the agent has ended
            end = protocol.End("failed", error.strerror or str(error))
        say(protocol.Report(end=end))
    except BrokenPipeError:
        pass  # the agent has ended
