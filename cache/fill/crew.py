"""The workers of a pass: start them, hand out jobs, collect answers, replace the dead."""

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cache.fill import control, messages

_READ_BYTES = 1024 * 1024
# A worker that keeps dying is a fault of ours or of the host; the pass ends and says so.
MOST_DEATHS = 5


class CrewError(Exception):
    """The workers cannot go on; the text says why."""


@dataclass
class Member:
    """One worker process and the job it has."""

    number: int
    process: subprocess.Popen[bytes]
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
        self.members: dict[int, Member] = {}

    def resize(self, workers: int) -> None:
        """Have this many beside the committer; surplus ones leave when they are idle."""
        for number in range(workers + 1):
            if number not in self.members:
                self._start(number)
        for number in [n for n, m in self.members.items() if n > workers and m.job is None]:
            self._end(self.members.pop(number))

    def _start(self, number: int) -> None:
        jobs_read, jobs_write = os.pipe()
        answers_read, answers_write = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cache.fill.worker",
                    str(number),
                    str(self._page.descriptor),
                ],
                stdin=jobs_read,
                stdout=answers_write,
                pass_fds=[self._page.descriptor],
            )
        finally:
            os.close(jobs_read)
            os.close(answers_write)
        member = Member(number, process, jobs_write, answers_read)
        os.set_blocking(answers_read, False)
        self._selector.register(answers_read, selectors.EVENT_READ, member)
        self.members[number] = member
        messages.send(jobs_write, self.setup)
        member.job = {"do": "start"}

    def _end(self, member: Member) -> None:
        self._selector.unregister(member.answers)
        os.close(member.answers)
        os.close(member.jobs)

    def idle(self) -> list[Member]:
        """Those that can take a scan or a copy now, within the wanted number."""
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
                code = member.process.wait()
                self._deaths += 1
                yield member, None
                if self._deaths > MOST_DEATHS:
                    raise CrewError(f"workers keep ending (the last one with {code})")
                self._start(member.number)

    def stop(self) -> None:
        """End all at once; what is staged and not committed is lost, by design only that."""
        for member in self.members.values():
            member.process.kill()
            self._end(member)
        self.members.clear()
