"""The worker processes of a coordinator: starts them, gives them jobs, collects their answers.

Every call on a source may hang, and Python copies small files no faster with threads, so each
worker is a process. Workers are forked from the coordinator, which has one thread: an interpreter
of its own would cost each of them 0.1 s of CPU before its first file. The coordinator waits for all
pipes at once and never blocks on one worker. A worker that dies is replaced, and its job is
reported as lost.
"""

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cache.fill import control, protocol
from cache.store import index
from kit import child_main

# When workers keep dying, a bug or the host is the reason: the pass ends and says so.
MOST_DEATHS = 5
# Killed workers that the kernel does not let go yet.
MOST_HANGING = 8
# For workers to close their Ceph clients at the end of the pass.
END_SECONDS = 2.0


class PoolError(Exception):
    """The workers cannot go on; the text says why."""


@dataclass(frozen=True)
class Assignment:
    """A job of a worker, with what its coordinator needs to know about it."""

    job: protocol.Job
    directory: int = 0
    allocated: int = 0  # SSD bytes that it takes at most
    inodes: int = 0
    chunk: index.Chunk | None = None


@dataclass
class Member:
    """A worker process and the job it has."""

    number: int
    pid: int
    jobs: int
    answers: int
    stream: protocol.MessageStream[protocol.Answer] = field(default_factory=protocol.answers)
    starting: bool = True
    assignment: Assignment | None = None
    signs: tuple[int, ...] = ()  # of life, as its slot of the control page had them last
    moved: float = 0.0  # monotonic; when they changed

    @property
    def idle(self) -> bool:
        return not self.starting and self.assignment is None


class Event(NamedTuple):
    """``member`` None: the watched descriptor has input. ``answer`` None: the member died."""

    member: Member | None
    answer: protocol.Answer | None


class WorkerPool:
    """Member 0 commits; the others scan, copy and verify."""

    def __init__(
        self, page: control.Control, setup: protocol.Setup, serve: Callable[[int, int], None]
    ) -> None:
        """``serve``: the life of a worker, given its number and the page's descriptor."""
        self._page = page
        self._setup = setup
        self._serve = serve
        self._selector = selectors.DefaultSelector()
        self._deaths = 0
        self._wanted = 0
        self._leaving: list[int] = []  # pids of surplus workers whose pipe is closed
        self.members: dict[int, Member] = {}

    def resize(self, workers: int) -> None:
        """Have this many beside the committer; surplus ones leave when they are idle."""
        self._wanted = workers
        for number in range(workers + 1):
            if number not in self.members:
                self._start(number)
        self._retire()

    def _retire(self) -> None:
        surplus = [n for n, m in self.members.items() if n > self._wanted and m.idle]
        for number in surplus:
            self._leaving.append(self.members[number].pid)
            self._close(self.members.pop(number))
        self._leaving = [pid for pid in self._leaving if not os.waitpid(pid, os.WNOHANG)[0]]

    def _start(self, number: int) -> None:
        jobs_read, jobs_write = os.pipe()
        answers_read, answers_write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            child_main.end_after(lambda: self._be_worker(number, jobs_read, answers_write))
        os.close(jobs_read)
        os.close(answers_write)
        member = Member(number, pid, jobs_write, answers_read)
        os.set_blocking(answers_read, False)
        self._selector.register(answers_read, selectors.EVENT_READ, member)
        self.members[number] = member
        self._send(member, self._setup)

    def _be_worker(self, number: int, jobs: int, answers: int) -> None:
        """The rest of a forked process's life.

        The coordinator's descriptors are closed at once: with a copy of another worker's pipe that
        worker's end would go unnoticed, a copy of the lock would keep the generation locked.
        """
        page = self._page.descriptor
        os.dup2(jobs, protocol.JOBS)
        os.dup2(answers, protocol.ANSWERS)
        os.closerange(3, page)
        os.closerange(page + 1, os.sysconf("SC_OPEN_MAX"))
        self._serve(number, page)

    def _close(self, member: Member) -> None:
        os.close(member.jobs)
        self._close_answers(member)

    def _close_answers(self, member: Member) -> None:
        self._selector.unregister(member.answers)
        os.close(member.answers)

    def idle(self) -> list[Member]:
        """Workers that can take a job other than a commit."""
        self._retire()
        return [m for n, m in sorted(self.members.items()) if n > 0 and m.idle]

    @property
    def committer(self) -> Member | None:
        """The worker that commits, None while it is busy."""
        member = self.members.get(0)
        return member if member is not None and member.idle else None

    @property
    def resting(self) -> bool:
        """No worker has a job or is still starting."""
        return all(member.idle for member in self.members.values())

    def assigned(self, *kinds: type[msgspec.Struct]) -> list[Assignment]:
        """Jobs under way, of these kinds."""
        assignments = [m.assignment for m in self.members.values() if m.assignment is not None]
        return [each for each in assignments if isinstance(each.job, kinds)]

    def give(self, member: Member, assignment: Assignment) -> None:
        member.assignment, member.moved = assignment, time.monotonic()
        self._send(member, assignment.job)

    def hanging(self, kinds: tuple[type[msgspec.Struct], ...], seconds: float) -> list[Member]:
        """Workers with a job of these kinds that gave no sign of life for ``seconds``."""
        now = time.monotonic()
        found = []
        for member in self.members.values():
            signs = self._page.signs(member.number)
            if signs != member.signs:
                member.signs, member.moved = signs, now
            may = member.assignment is not None and isinstance(member.assignment.job, kinds)
            if may and now - member.moved >= seconds:
                found.append(member)
        return found

    def alive(self) -> None:
        """Nobody can be expected to work now: nobody hangs."""
        for member in self.members.values():
            member.moved = time.monotonic()

    def replace(self, member: Member) -> None:
        """Kill a worker that hangs and start another one. PoolError when too many hang.

        The kernel may keep the killed one for as long as its source does not answer.
        """
        self._leaving = [pid for pid in self._leaving if not os.waitpid(pid, os.WNOHANG)[0]]
        if len(self._leaving) >= MOST_HANGING:
            raise PoolError(f"{len(self._leaving)} worker processes hang in the kernel")
        os.kill(member.pid, signal.SIGKILL)
        self._leaving.append(member.pid)
        self._close(self.members.pop(member.number))
        if member.number <= self._wanted:
            self._start(member.number)

    @staticmethod
    def _send(member: Member, message: msgspec.Struct) -> None:
        try:
            protocol.send(member.jobs, message)
        except BrokenPipeError:
            pass  # it died; ``wait`` reports that with the job it had

    def watch(self, descriptor: int) -> None:
        """Report input on this descriptor too (commands of the agent)."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def wait(self, seconds: float) -> Iterator[Event]:
        """What happens within ``seconds``. Raises PoolError when workers keep dying."""
        for key, _ in self._selector.select(seconds):
            member: Member | None = key.data
            if member is None:
                yield Event(None, None)
                continue
            try:
                data = os.read(member.answers, protocol.READ_BYTES)
            except BlockingIOError:
                continue
            if data:
                for answer in member.stream.feed(data):
                    yield Event(member, answer)
            else:
                self._close(member)
                del self.members[member.number]
                code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
                self._deaths += 1
                yield Event(member, None)
                if self._deaths > MOST_DEATHS:
                    raise PoolError(f"worker processes keep ending (the last one with {code})")
                if member.number <= self._wanted:
                    self._start(member.number)

    def stop(self) -> None:
        """End all workers. What is staged and not committed is lost, nothing else.

        Idle workers close their Ceph clients and end by themselves; the others are killed.
        """
        for member in self.members.values():
            os.close(member.jobs)
        deadline = time.monotonic() + END_SECONDS
        left = {member.pid for member in self.members.values()}
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.005)
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # it was not waited for: no other process has its pid
        for member in self.members.values():
            self._close_answers(member)
        self.members.clear()
