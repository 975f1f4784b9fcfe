import asyncio
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kit.child
import kit.errors
import kit.processes
from kit import child_main
from tests.kit import called
from tests.testbed import waiting


async def begun(pid_file: Path) -> asyncio.Task[None]:
    """A call that is under way in its child."""
    task = asyncio.create_task(
        kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=waiting.limit(60))
    )
    while not (pid_file.exists() and pid_file.read_text()):
        await asyncio.sleep(0.02)
    return task


async def late(begun: Path, function: Callable[..., object], *arguments: object) -> None:
    """A call whose deadline passes when its child has made the file ``begun``: until then a busy
    machine may still be starting the process that calls fork from."""
    for deadline in (1.5, 6, 24, 96):
        with pytest.raises(
            kit.child.DeadlineError, match=f"no answer within {deadline:g}s|still hangs"
        ):
            await kit.child.call(function, *arguments, deadline=deadline)
        if begun.exists() and begun.stat().st_size:
            return
    raise AssertionError(f"no child made {begun}")


async def test_call_keeps_arguments_and_results() -> None:
    name = os.fsdecode(b"not utf-8 \xff\n")
    assert await kit.child.call(called.echo, name, 1, None, [2.5], deadline=waiting.limit(20)) == [
        name,
        1,
        None,
        [2.5],
    ]


async def test_call_raises_error_of_child() -> None:
    with pytest.raises(FileNotFoundError) as missing:
        await kit.child.call(called.missing, deadline=waiting.limit(20))
    assert missing.value.filename == "/no/such/file"
    with pytest.raises(kit.errors.InUseError, match="a: b; c"):
        await kit.child.call(called.in_use, deadline=waiting.limit(20))
    with pytest.raises(kit.errors.RefusedError, match="a: b; c"):
        await kit.child.call(called.refused, deadline=waiting.limit(20))


class StrangerError(kit.errors.AgentError):
    """Of another module: a code of ours, and a signature of its own."""

    exit_code = kit.errors.SourceError.exit_code

    def __init__(self, kind: str) -> None:
        super().__init__(kind, kind, kind)


class AnotherError(kit.errors.AgentError):
    """With the code of the base class."""


async def test_call_raises_only_classes_of_kit_errors() -> None:
    with pytest.raises(kit.errors.SourceError, match="a: b; c"):
        await kit.child.call(called.source, deadline=waiting.limit(20))
    with pytest.raises(kit.errors.AgentError, match="a: b; c") as raised:
        await kit.child.call(called.plain, deadline=waiting.limit(20))
    assert type(raised.value) is kit.errors.AgentError


async def test_call_reports_last_words_of_broken_child() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: oops"):
        await kit.child.call(called.broken, deadline=waiting.limit(20))
    with pytest.raises(RuntimeError, match="-9"):
        await kit.child.call(called.die, deadline=waiting.limit(20))


async def test_last_words_hold_no_secret_that_was_cut() -> None:
    with pytest.raises(RuntimeError, match="ended with 1") as raised:
        await kit.child.call(called.tells, "token=" + "s3cret" * 200, deadline=waiting.limit(20))
    assert "s3cret" not in str(raised.value)


async def test_call_kills_late_child_and_counts_it(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    await late(pid_file, called.own_pid_then_sleep, str(pid_file))
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 60
    while kit.processes.hanging() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert kit.processes.hanging() == 0
    assert not Path(f"/proc/{pid}").exists()


async def test_cancelled_call_ends_its_child(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    task = await begun(pid_file)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


async def test_child_dies_with_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import asyncio, kit.child; from tests.kit import called; "
        f"asyncio.run(kit.child.call(called.own_pid_then_sleep, {str(pid_file)!r}, deadline=60))"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    deadline = time.monotonic() + 120
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    pid = int(pid_file.read_text())
    parent.kill()
    await parent.wait()
    deadline = time.monotonic() + 60
    while _lives(pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    """An orphan may stay a zombie where nobody is there to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_child_started_by_a_dead_parent_does_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent = "1" if os.getpid() != 1 else "2"
    done = subprocess.run(
        [sys.executable, child_main.__file__, parent, "[]", "exec", "touch", str(pid_file)],
        capture_output=True, timeout=waiting.limit(30), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert not pid_file.exists()


async def test_call_fails_at_once_while_an_equal_one_hangs(tmp_path: Path) -> None:
    free = tmp_path / "free"
    await late(tmp_path / "free.hangs", called.hang_until, str(free), 1)
    for argument in (2, 3, 4):
        with pytest.raises(kit.child.DeadlineError, match="earlier call still hangs"):
            await kit.child.call(called.hang_until, str(free), argument, deadline=0.2)
    assert await kit.child.hangs(called.hang_until, str(free))
    assert not await kit.child.hangs(called.hang_until, f"{free}2")
    assert kit.processes.hanging() == 1
    # What is about something else goes on.
    assert await kit.child.call(called.echo, str(free), deadline=waiting.limit(20)) == [str(free)]
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.hang_until, f"{free}2", deadline=1)
    Path(f"{free}2").touch()
    free.touch()
    while kit.processes.hanging():
        await asyncio.sleep(0.02)
    # It is gone: the next one is begun again.
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.hang_until, str(free), deadline=0.5)


async def test_call_works_right_after_cancelled_one(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    task = await begun(pid_file)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert kit.processes.hanging() == 1
    again = asyncio.create_task(
        kit.child.call(called.own_pid_then_sleep, f"{pid_file}", deadline=waiting.limit(60))
    )
    former = pid_file.read_text()
    while pid_file.read_text() in ("", former):
        assert not again.done()
        await asyncio.sleep(0.02)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_hanging_calls_do_not_stop_others() -> None:
    hanging = [
        asyncio.create_task(kit.child.call(called.sleep, 30, deadline=waiting.limit(5)))
        for _ in range(8)
    ]
    assert await kit.child.call(called.echo, "still", deadline=waiting.limit(20)) == ["still"]
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


async def test_calls_fork_from_one_process_and_know_their_agent() -> None:
    agent, server = await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20))
    assert agent == os.getpid()
    assert server != agent
    assert await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20)) == [
        agent,
        server,
    ]


async def test_killed_fork_server_ends_its_calls_and_the_next_call_has_another(
    tmp_path: Path,
) -> None:
    _, server = await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20))
    task = await begun(tmp_path / "pid")
    os.kill(server, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="-9"):
        await task
    agent, other = await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20))
    assert (agent, other) != (os.getpid(), server)
    assert agent == os.getpid()


async def test_calls_that_wait_for_a_server_that_dies_are_answered_by_one_other() -> None:
    _, server = await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20))
    os.kill(server, signal.SIGSTOP)
    calls = [
        asyncio.create_task(kit.child.call(called.agent_and_parent, n, deadline=waiting.limit(60)))
        for n in range(5)
    ]
    await asyncio.sleep(0)  # now they wait
    os.kill(server, signal.SIGKILL)
    found = await asyncio.gather(*calls)
    assert len({other for _, other in found} - {server}) == 1


def test_loop_that_ends_before_an_abandoned_call_leaves_nothing() -> None:
    async def cut_off() -> None:
        asyncio.get_running_loop().call_later(0.5, asyncio.current_task().cancel)  # type: ignore[union-attr]
        await kit.child.call(called.sleep, 60, deadline=waiting.limit(60))

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cut_off())
    gc.collect()
    assert kit.processes.hanging() == 0
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the channel to the fork server


async def test_late_fork_server_is_not_killed_under_its_calls(tmp_path: Path) -> None:
    _, server = await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20))
    task = await begun(tmp_path / "pid")
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.echo, deadline=0.5)
    os.kill(server, signal.SIGCONT)
    assert await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20)) == [
        os.getpid(),
        server,
    ]
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_limit_of_processes_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def popen(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("OF_THIS_TEST", "another server")
    with pytest.raises(kit.child.DeadlineError, match="cannot start a process .*temporarily"):
        await kit.child.call(called.echo, deadline=waiting.limit(60))


async def test_call_has_the_environment_of_now_and_earlier_calls_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    task = await begun(pid_file)
    for value in ("one", "two"):
        monkeypatch.setenv("OF_THIS_TEST", value)
        assert (
            await kit.child.call(called.variable, "OF_THIS_TEST", deadline=waiting.limit(20))
            == value
        )
    assert _lives(int(pid_file.read_text()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_call_that_cannot_be_started_says_why_and_harms_no_other(tmp_path: Path) -> None:
    _, server = await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20))
    task = await begun(tmp_path / "pid")
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    while len(used := os.listdir(f"/proc/{server}/fd")) != 6:
        await asyncio.sleep(0.02)  # its own four, and two of the call that runs
    unused = [number for number in range(100) if str(number) not in used]
    for free in range(1, 5):  # of the five descriptors that a call takes there
        resource.prlimit(server, resource.RLIMIT_NOFILE, (unused[free], limits[1]))
        with pytest.raises(kit.child.DeadlineError, match="fork: Too many open files"):
            await kit.child.call(called.echo, deadline=waiting.limit(20))
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    assert await kit.child.call(called.agent_and_parent, deadline=waiting.limit(20)) == [
        os.getpid(),
        server,
    ]
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
