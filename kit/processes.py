"""The one place that starts processes, and the account of those that hang in the kernel.

Calls and some workers are started by way of ``kit.forks``.

A process in an uninterruptible sleep (a dead disk, a dead Ceph cluster) does not die of SIGKILL
until the kernel lets it. Waiting for it would hang the agent, so it is abandoned: killed, counted,
never waited for again. Each costs memory, so their number is limited for the whole agent and not
for each caller: 200 dead devices must not fill the agent's memory limit. A part of that number is
kept for each room (``in_share``), so that what hangs in one room does not stop the others.

Invariants: every process that ``start`` returns dies with the agent; no process starts while
``MOST_HANGING`` abandoned ones exist.
"""

import asyncio
import collections
import contextlib
import contextvars
import os
import signal
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import kit.errors
from kit import child_main, forks

# Some MB each; more would only hang beside them.
MOST_HANGING = 32
_KEPT = 8  # of these parts of them one is kept for each room
# A fork, and before the first one of a kind its modules from a slow disk.
START_SECONDS = 60.0
# A killed process that does not hang has ended within this.
KILLED_SECONDS = 1.0
_PIPE = asyncio.subprocess.PIPE
_DEVNULL = asyncio.subprocess.DEVNULL

Process = asyncio.subprocess.Process
ResultT = TypeVar("ResultT")

# Waits for abandoned processes, each with what its process is about and whose share it is of.
_hanging: dict["asyncio.Task[None]", tuple[str, str]] = {}
_share: contextvars.ContextVar[str] = contextvars.ContextVar("share", default="")
_shares = {""}  # empty: of no room


class DeadlineError(kit.errors.AgentError):
    """A process did not answer in time, could not be started, or too many hang already."""


class TooManyHangError(DeadlineError):
    """Too many processes hang already, so this one was not started: nothing was asked."""


def in_share(name: str) -> None:
    """From now on this task, and what it starts, has a share of its own of what may hang."""
    _shares.add(name)
    _share.set(name)


@dataclass(frozen=True)
class Ended:
    """A finished program. ``code`` is negative when a signal ended it."""

    code: int
    out: bytes
    err: bytes


def hanging(about: str | None = None, *, share: str | None = None) -> int:
    """How many abandoned processes the kernel still keeps; of one subject, or of one room's share,
    when it is given."""
    return sum(share in (None, _hanging[task][1]) for task in _waits(about))


def _waits(about: str | None) -> "list[asyncio.Task[None]]":
    for task in [each for each in _hanging if each.get_loop().is_closed()]:
        del _hanging[task]  # nobody waits any more
    return [task for task, (each, _) in _hanging.items() if about in (None, each)]


async def settled(about: str, seconds: float) -> bool:
    """Whether no abandoned process about ``about`` is left, after at most ``seconds``.

    One that was killed a moment ago ends within ``KILLED_SECONDS``.
    """
    if same := _waits(about):
        await asyncio.wait(same, timeout=min(seconds, KILLED_SECONDS))
    return hanging(about) == 0


def _refuse_when_too_many_hang() -> None:
    found, ours, kept = hanging(), _share.get(), MOST_HANGING // _KEPT
    of = collections.Counter(share for _, share in _hanging.values())
    for_others = sum(max(0, kept - of[share]) for share in _shares - {ours})
    if of[ours] >= kept and found >= MOST_HANGING - for_others:
        raise TooManyHangError(
            "the agent",
            f"{found} of its child processes hang in the kernel"
            + (f", {of[ours]} of them of {ours}" if ours else ""),
            "a disk, a mount or a cluster does not answer; see the findings and the kernel log",
        )


async def start(
    argv: Sequence[str],
    *,
    job: str = "exec",
    stdin: int | None = _PIPE,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    limit: int = 2**16,
) -> Process:
    """Start a program in a session of its own, with / as working directory.

    ``job``: of ``kit.child_main``, the first code of every process that dies with the agent.
    ``limit``: the longest line in bytes that its stdout may be read by. OSError when it cannot be
    started (a missing program shows as exit code 127), DeadlineError when too many hang already.
    """
    _refuse_when_too_many_hang()
    return await asyncio.create_subprocess_exec(
        *child_main.command(job, *argv),
        stdin=stdin,
        stdout=_PIPE,
        stderr=stderr,
        env=environment,
        cwd="/",
        start_new_session=True,
        limit=limit,
    )


async def start_python(target: str, *, limit: int = 2**16) -> Process:
    """Start ``target`` ("module:function") as job ``run`` of ``kit.child_main``."""
    return await start((target,), job="run", limit=limit)


async def start_call(target: str, seconds: float) -> forks.Child:
    """Start ``target`` ("module:function"), which gets its arguments by ``communicate``.

    TimeoutError after ``seconds``, DeadlineError when it cannot be started or too many hang.
    """
    _refuse_when_too_many_hang()
    with _named():
        return await forks.start(target, seconds)


async def start_forked(target: str, *, limit: int = 2**16) -> forks.Talker:
    """As ``start_python``, without an interpreter's start. DeadlineError.

    The function ends when its stdin is closed.
    """
    _refuse_when_too_many_hang()
    try:
        with _named():
            return await forks.talk(target, START_SECONDS, limit)
    except TimeoutError:
        why = f"it could not start a process within {START_SECONDS:g}s"
        raise DeadlineError("the agent", why, "it is tried again later") from None


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What keeps the agent from starting a process, by name."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise DeadlineError(
            "the agent",
            f"it cannot start a process ({error})",
            "it is tried again later; see how many processes and how much memory it may have",
        ) from error


def kill(process: Process | forks.Child) -> None:
    """SIGKILL to the process and to what it started; no error when it has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def abandon(
    process: Process | forks.Child, about: str, end: "asyncio.Task[object] | None" = None
) -> None:
    """Kill a process and count it until it has ended. ``end``: a task that waits for its pipes."""
    kill(process)
    if isinstance(process, forks.Talker):
        process.hang_up()

    async def ended() -> None:
        if end is not None:
            await asyncio.gather(end, return_exceptions=True)
        await process.wait()

    task = asyncio.create_task(ended(), name=f"abandoned {about}")
    _hanging[task] = about, _share.get()
    task.add_done_callback(lambda done: _hanging.pop(done, None))


async def end(process: Process, about: str) -> None:
    """Kill a process and wait a moment for it; one that hangs is abandoned."""
    abandon(process, about)
    await settled(about, KILLED_SECONDS)


async def to_the_end(
    process: Process | forks.Child, talk: Coroutine[Any, Any, ResultT], about: str, seconds: float
) -> ResultT:
    """The result of ``talk``, which uses the pipes of the process until it ends.

    TimeoutError after ``seconds``; then, and after any other error, the process is abandoned.
    """
    task = asyncio.create_task(talk)
    try:
        # Not wait_for: until Python 3.12 it loses a cancel that comes as the task ends.
        async with asyncio.timeout(seconds):
            return await asyncio.shield(task)
    except BaseException:
        abandon(process, about, task)
        raise


async def run(
    argv: Sequence[str],
    *,
    about: str,
    deadline: float,
    input: bytes = b"",
    environment: Mapping[str, str] | None = None,
    largest: int = 2**20,
) -> Ended:
    """Run a program to its end, at most ``deadline`` seconds, reading at most ``largest`` bytes.

    DeadlineError names ``about``; after it, as after a cancel, the program is killed with all that
    it started. OSError (ENOENT and others) when it cannot be started, EFBIG when it says more.
    """
    process = await start(
        argv, stdin=_PIPE if input else _DEVNULL, stderr=_PIPE, environment=environment
    )  # fmt: skip
    try:
        out, err = await to_the_end(process, _talk(process, input, largest), about, deadline)
    except TimeoutError:
        raise DeadlineError(
            about, f"{argv[0]} gave no answer within {deadline:g}s", "it is tried again later"
        ) from None
    code = process.returncode
    assert code is not None
    if code == 127:
        raise FileNotFoundError(2, err.decode(errors="replace").strip() or "not found", argv[0])
    return Ended(code, out, err)


async def _talk(process: Process, data: bytes, largest: int) -> tuple[bytes, bytes]:
    async def feed() -> None:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(data)
                await process.stdin.drain()
            process.stdin.close()

    async def take(stream: asyncio.StreamReader | None) -> bytes:
        said = bytearray()
        while stream is not None and (part := await stream.read(2**16)):
            said += part
            if len(said) > largest:
                kill(process)
                while await stream.read(2**16):
                    pass  # to its end: a full pipe would stay open, and be waited for
                raise OSError(27, f"the program said more than {largest} bytes")
        return bytes(said)

    out, err, _ = await asyncio.gather(take(process.stdout), take(process.stderr), feed())
    await process.wait()
    return out, err
