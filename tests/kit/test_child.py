import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kit.child
import kit.errors
import kit.processes
from kit import child_main
from tests.kit import called


async def begun(pid_file: Path) -> asyncio.Task[None]:
    """A call that is under way in its child."""
    task = asyncio.create_task(
        kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=60)
    )
    while not (pid_file.exists() and pid_file.read_text()):
        await asyncio.sleep(0.02)
    return task


async def test_call_keeps_arguments_and_results() -> None:
    name = os.fsdecode(b"not utf-8 \xff\n")
    assert await kit.child.call(called.echo, name, 1, None, [2.5], deadline=20) == [
        name,
        1,
        None,
        [2.5],
    ]


async def test_call_raises_error_of_child() -> None:
    with pytest.raises(FileNotFoundError) as missing:
        await kit.child.call(called.missing, deadline=20)
    assert missing.value.filename == "/no/such/file"
    with pytest.raises(kit.errors.InUseError, match="a: b; c"):
        await kit.child.call(called.in_use, deadline=20)
    with pytest.raises(kit.errors.RefusedError, match="a: b; c"):
        await kit.child.call(called.refused, deadline=20)


class StrangerError(kit.errors.AgentError):
    """Of another module: a code of ours, and a signature of its own."""

    exit_code = kit.errors.SourceError.exit_code

    def __init__(self, kind: str) -> None:
        super().__init__(kind, kind, kind)


class AnotherError(kit.errors.AgentError):
    """With the code of the base class."""


async def test_call_raises_only_classes_of_kit_errors() -> None:
    with pytest.raises(kit.errors.SourceError, match="a: b; c"):
        await kit.child.call(called.source, deadline=20)
    with pytest.raises(kit.errors.AgentError, match="a: b; c") as raised:
        await kit.child.call(called.plain, deadline=20)
    assert type(raised.value) is kit.errors.AgentError


async def test_call_reports_last_words_of_broken_child() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: oops"):
        await kit.child.call(called.broken, deadline=20)
    with pytest.raises(RuntimeError, match="-9"):
        await kit.child.call(called.die, deadline=20)


async def test_call_kills_late_child_and_counts_it(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(kit.child.DeadlineError, match=r"no answer within 1\.5s"):
        await kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=1.5)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
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
    deadline = time.monotonic() + 10
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
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    pid = int(pid_file.read_text())
    parent.kill()
    await parent.wait()
    deadline = time.monotonic() + 10
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
    name = f"{called.__name__}:{called.own_pid_then_sleep.__name__}"
    parent = "1" if os.getpid() != 1 else "2"
    done = subprocess.run(
        [sys.executable, child_main.__file__, parent, json.dumps(sys.path), "call", name],
        input=f'["{pid_file}"]', capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert not pid_file.exists()


async def test_call_fails_at_once_while_an_equal_one_hangs(tmp_path: Path) -> None:
    free = tmp_path / "free"
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.hang_until, str(free), 1, deadline=2)
    for argument in (2, 3, 4):
        with pytest.raises(kit.child.DeadlineError, match="earlier call still hangs"):
            await kit.child.call(called.hang_until, str(free), argument, deadline=0.2)
    assert kit.processes.hanging() == 1
    # What is about something else goes on.
    assert await kit.child.call(called.echo, str(free), deadline=20) == [str(free)]
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
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=1.5)


async def test_hanging_calls_do_not_stop_others() -> None:
    hanging = [asyncio.create_task(kit.child.call(called.sleep, 30, deadline=5)) for _ in range(8)]
    assert await kit.child.call(called.echo, "still", deadline=20) == ["still"]
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
