"""The workers of a pass: start them, hand out jobs, collect answers, replace the dead.

Workers are forked from the pass, which has one thread only: an interpreter of their own would cost
each of them 0.1 s of CPU before its first file.
"""

import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cache.fill import control, messages, worker

_READ_BYTES = 1024 * 1024
# A worker that keeps dying is a fault of ours or of the host; the pass ends and says so.
MOST_DEATHS = 5
# For workers to let go of the cluster at the end of the pass.
END_SECONDS = 2.0


class CrewError(Exception):
    """The workers cannot go on; the text says why."""


@dataclass
class Member:
    """One worker process and the job it has."""

    number: int
    pid: int
    jobs: int
    answers: int
    stream: messages.Stream = field(default_factory=messages.Stream)
    job: dict[str, Any] | None = None
    started: bool = False


class Crew:
    """A fixed set of workers. Member 0 commits; the others scan and copy."""

    def __init__(self, page: control.Control, setup: dict[str, Any]) -> None:
        self._page = page
        self.setup = setup
        self._selector = selectors.DefaultSelector()
        self._deaths = 0
        self._wanted = 0
        self._gone: list[int] = []  # surplus workers that were told to end
        self.members: dict[int, Member] = {}

    def resize(self, workers: int) -> None:
        """Have this many beside the committer; surplus ones leave when they are idle."""
        self._wanted = workers
        for number in range(workers + 1):
            if number not in self.members:
                self._start(number)
        self._retire()

    def _retire(self) -> None:
        """Let surplus workers go as they become idle."""
        surplus = [n for n, m in self.members.items() if n > self._wanted and m.job is None]
        for number in surplus:
            self._gone.append(self.members[number].pid)
            self._end(self.members.pop(number))
        while self._gone and os.waitpid(self._gone[0], os.WNOHANG)[0]:
            self._gone.pop(0)

    def _start(self, number: int) -> None:
        jobs_read, jobs_write = os.pipe()
        answers_read, answers_write = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _be_worker(number, jobs_read, answers_write, self._page.descriptor)
        os.close(jobs_read)
        os.close(answers_write)
        member = Member(number, pid, jobs_write, answers_read)
        os.set_blocking(answers_read, False)
        self._selector.register(answers_read, selectors.EVENT_READ, member)
        self.members[number] = member
        messages.send(jobs_write, self.setup)
        member.job = {"do": "start"}

    def _end(self, member: Member) -> None:
        os.close(member.jobs)
        self._hear_no_more(member)

    def _hear_no_more(self, member: Member) -> None:
        self._selector.unregister(member.answers)
        os.close(member.answers)

    def idle(self) -> list[Member]:
        """Those that can take a scan or a copy now, within the wanted number."""
        self._retire()
        return [m for n, m in sorted(self.members.items()) if n > 0 and m.job is None]

    @property
    def committer(self) -> Member | None:
        member = self.members.get(0)
        return member if member is not None and member.job is None else None

    def busy(self, *kinds: str) -> list[dict[str, Any]]:
        """Jobs under way, of these kinds if any are named."""
        jobs = [m.job for m in self.members.values() if m.job is not None]
        return [job for job in jobs if not kinds or job["do"] in kinds]

    def give(self, member: Member, job: dict[str, Any]) -> None:
        member.job = job
        try:
            messages.send(member.jobs, {k: v for k, v in job.items() if not k.startswith("_")})
        except BrokenPipeError:
            pass  # its end shows on the answers side, with the job it had

    def watch(self, descriptor: int) -> None:
        """Report input on this descriptor too (the agent's commands)."""
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def wait(self, seconds: float) -> Iterator[tuple[Member | None, Any]]:
        """Answers as they come: (member, message), (member, None) for one that died with a job.

        (None, None) stands for input on the watched descriptor. Raises CrewError when workers
        keep dying.
        """
        for key, _ in self._selector.select(seconds):
            member: Member | None = key.data
            if member is None:
                yield None, None
                continue
            try:
                data = os.read(member.answers, _READ_BYTES)
            except BlockingIOError:
                continue
            if data:
                for message in member.stream.feed(data):
                    yield member, message
            else:
                self._end(member)
                del self.members[member.number]
                code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
                self._deaths += 1
                yield member, None
                if self._deaths > MOST_DEATHS:
                    raise CrewError(f"workers keep ending (the last one with {code})")
                if member.number <= self._wanted:
                    self._start(member.number)

    def stop(self) -> None:
        """End all; what is staged and not committed is lost, by design only that.

        Idle workers let go of the cluster by themselves; whoever does not end in time is killed.
        """
        for member in self.members.values():
            os.close(member.jobs)
        deadline = time.monotonic() + END_SECONDS
        left = {member.pid for member in self.members.values()}
        while left and time.monotonic() < deadline:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.005)
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # not waited for yet: the pid is still its own
        for member in self.members.values():
            self._hear_no_more(member)
        self.members.clear()


def _be_worker(number: int, jobs: int, answers: int, page: int) -> NoReturn:
    """The rest of a forked process's life. Nothing of the pass is used or finalised in it.

    Descriptors of the pass are closed at once: a copy of another worker's pipe would hide that
    worker's end, one of the lock would keep the generation locked.
    """
    code = 1
    try:
        os.dup2(jobs, messages.JOBS)
        os.dup2(answers, messages.ANSWERS)
        os.closerange(3, page)
        os.closerange(page + 1, os.sysconf("SC_OPEN_MAX"))
        worker.serve(number, page)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
