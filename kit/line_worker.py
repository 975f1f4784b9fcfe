"""Long-lived child processes that speak JSON lines (``kit.messages``) with the agent.

What is asked often, keeps a connection or reports by itself is a worker, not a call
(``kit.child``). Start, deadline, abandon, restart and the end with
the agent are solved here once for all of them.

Two ways to use one. ``ask``: one request, one answer, in turn; the child is started when it is
needed, and given up when it is late: a late answer must never be taken for the next one. After a
failure the next start waits (``Backoff``), and until then each ``ask`` fails at once with the same
error. ``listen``: the child gets one message and then speaks by itself.

The child's function (``entry``) calls ``serve``, or ``hear`` and ``say``, of ``kit.messages``: a
child needs no event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import kit.errors
from kit import forks, messages, processes
from kit.messages import ChildError as ChildError
from kit.pause import Backoff

_LONG_BYTES = 2**16
# What ``ask`` and ``listen`` raise. ValueError: the answer is not what it should be.
FAILURES = (kit.errors.AgentError, OSError, ValueError, ChildError)
AnswerT = TypeVar("AnswerT")


class LineWorker(Generic[AnswerT]):
    """One child process at most, started when it is needed.

    ``entry``: "module:function", run in the child. ``answer``: the type of each answer. ``about``:
    names it in errors. ``largest``: bytes of an answer. ``idle``: seconds without a request after
    which the child ends; None keeps it. ``fatal``: errors of its answers that it does not survive.
    ``forked``: it need not start an interpreter (``kit.forks``), and ends when its stdin is closed.
    """

    def __init__(
        self,
        entry: str,
        answer: type[AnswerT],
        *,
        about: str,
        largest: int = 2**20,
        idle: float | None = None,
        backoff: Backoff | None = None,
        fatal: tuple[type[Exception], ...] = (),
        forked: bool = False,
    ) -> None:
        self.about = about
        self.starts = 0
        self.failures = 0
        self._entry = entry
        self._answer = answer
        self._largest = largest
        self._idle = idle
        self._backoff = backoff or Backoff()
        self._fatal = fatal
        self._start_child = processes.start_forked if forked else processes.start_python
        self._process: processes.Process | forks.Talker | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the running child."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def ask(self, request: Any, deadline: float) -> AnswerT:
        """The answer to one request, at most ``deadline`` seconds after its turn came.

        Raises what the child raised when it was an OSError or AgentError, ChildError for anything
        else, DeadlineError for a late one. After a late answer and after the child's end the child
        is started anew; after an error that it reported it goes on.
        """
        async with self._turn:
            if self._timer is not None:
                self._timer.cancel()
            if self._error is not None and time.monotonic() < self._not_before:
                raise self._error
            try:
                async with asyncio.timeout(deadline):
                    line = await self._exchange(request)
            except TimeoutError:
                error = processes.DeadlineError(
                    self.about, f"no answer within {deadline:g}s", "it is tried again later"
                )
                raise self._failed(error) from None
            except (OSError, ValueError, ChildError, processes.DeadlineError) as error:
                raise self._failed(error) from error
            except asyncio.CancelledError:
                self._abandon()
                raise
            if self._idle is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._idle, self._abandon)
            try:
                answer = await self._read(line)
            except self._fatal as error:
                raise self._failed(error) from error
            self._error = None
            self._backoff.reset()
            return answer

    async def start(self) -> None:
        """Start the child ahead of the first request. OSError, DeadlineError (too many hang)."""
        async with self._turn:
            await self._running()

    async def ended(self) -> None:
        """Wait for the end of the child that runs; none has ended already."""
        if self._process is not None:
            await self._process.wait()

    async def _running(self) -> processes.Process | forks.Talker:
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start_child(self._entry, limit=self._largest)
            self._process = process
            self.starts += 1
        return process

    async def _exchange(self, request: Any) -> bytes:
        process = await self._running()
        assert process.stdout is not None
        await _tell(process, request)
        return _whole(await process.stdout.readline(), self.about)

    async def _read(self, line: bytes) -> AnswerT:
        """A thread reads a long answer: megabytes take longer than the loop may stand still."""
        if len(line) < _LONG_BYTES:
            return messages.result(line, self._answer)
        return await asyncio.to_thread(messages.result, line, self._answer)

    def _failed(self, error: Exception) -> Exception:
        self.failures += 1
        self._abandon()
        self._error = error
        self._not_before = time.monotonic() + self._backoff.next()
        return error

    async def listen(self, request: Any, silence: float) -> AsyncGenerator[AnswerT, None]:
        """Start the child, give it one message, yield what it says until it ends.

        DeadlineError after ``silence`` seconds without a word, ChildError when it ended. The child
        is killed when the iteration ends for whatever reason; the caller decides about another.
        """
        async with self._turn:
            try:
                process = await self._running()
                assert process.stdout is not None
                await _tell(process, request)
                while True:
                    try:
                        async with asyncio.timeout(silence):
                            line = await process.stdout.readline()
                    except TimeoutError:
                        raise processes.DeadlineError(
                            self.about, f"it said nothing for {silence:g}s", "it is started again"
                        ) from None
                    yield messages.result(_whole(line, self.about), self._answer)
            finally:
                self._abandon()

    async def send(self, message: Any) -> None:
        """Another message to a child that is listened to; lost when it has ended."""
        process = self._process
        if process is not None and process.returncode is None:
            # The listener sees its end.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await _tell(process, message)

    def _abandon(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            processes.abandon(process, self.about)

    async def close(self) -> None:
        """End the child; one that hangs in the kernel is left behind and counted."""
        if self._timer is not None:
            self._timer.cancel()
        self._abandon()
        await processes.settled(self.about, processes.KILLED_SECONDS)


async def _tell(process: processes.Process | forks.Talker, message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(messages.encode(message).encode() + b"\n")
    await process.stdin.drain()


def _whole(line: bytes, about: str) -> bytes:
    if not line.endswith(b"\n"):
        raise ChildError(f"{about}: the child process ended")
    return line
