import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kit.child
import kit.errors
from tests.kit import called


@pytest.fixture(autouse=True)
async def settled() -> AsyncIterator[None]:
    """No transport outlives its loop: what was killed gets the moments that its pipes need."""
    yield
    while kit.child.abandoned():
        await asyncio.sleep(0.02)
    for _ in range(10):
        await asyncio.sleep(0.01)


async def begun(pid_file: Path) -> asyncio.Task[None]:
    """A call that is under way in its child."""
    task = asyncio.create_task(
        kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=60)
    )
    while not (pid_file.exists() and pid_file.read_text()):
        await asyncio.sleep(0.02)
    return task


async def test_arguments_and_results_come_through_unchanged_any_byte_names_too() -> None:
    name = os.fsdecode(b"not utf-8 \xff\n")
    assert await kit.child.call(called.echo, name, 1, None, [2.5], deadline=20) == [
        name,
        1,
        None,
        [2.5],
    ]


async def test_errors_come_back_as_what_they_were() -> None:
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


async def test_an_error_is_never_taken_for_one_of_another_module_with_the_same_code() -> None:
    with pytest.raises(kit.errors.SourceError, match="a: b; c"):
        await kit.child.call(called.source, deadline=20)
    with pytest.raises(kit.errors.AgentError, match="a: b; c") as raised:
        await kit.child.call(called.plain, deadline=20)
    assert type(raised.value) is kit.errors.AgentError


async def test_any_other_end_is_an_error_with_the_last_words() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError: oops"):
        await kit.child.call(called.broken, deadline=20)
    with pytest.raises(RuntimeError, match="-9"):
        await kit.child.call(called.die, deadline=20)


async def test_after_the_deadline_the_child_is_killed_and_counted_until_it_is_gone(
    tmp_path: Path,
) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(kit.child.DeadlineError, match=r"no answer within 1\.5s"):
        await kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=1.5)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while kit.child.abandoned() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert kit.child.abandoned() == 0
    assert not Path(f"/proc/{pid}").exists()


async def test_a_cancelled_call_ends_its_child(tmp_path: Path) -> None:
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


async def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
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


def test_a_child_that_begins_after_its_parents_end_does_nothing(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    name = f"{called.__name__}:{called.own_pid_then_sleep.__name__}"
    done = subprocess.run(
        [sys.executable, "-m", "kit.errand", name, "1" if os.getpid() != 1 else "2"],
        input=f'["{pid_file}"]', capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert not pid_file.exists()


async def test_while_a_call_hangs_no_more_of_its_kind_are_begun(tmp_path: Path) -> None:
    free = tmp_path / "free"
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.hang_until, str(free), 1, deadline=2)
    for argument in (2, 3, 4):
        with pytest.raises(kit.child.DeadlineError, match="earlier call still hangs"):
            await kit.child.call(called.hang_until, str(free), argument, deadline=0.2)
    assert kit.child.abandoned() == 1
    # What is about something else goes on.
    assert await kit.child.call(called.echo, str(free), deadline=20) == [str(free)]
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.hang_until, f"{free}2", deadline=1)
    Path(f"{free}2").touch()
    free.touch()
    while kit.child.abandoned():
        await asyncio.sleep(0.02)
    # It is gone: the next one is begun again.
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.hang_until, str(free), deadline=0.5)


async def test_a_call_right_after_a_cancelled_one_of_its_kind_is_done(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    task = await begun(pid_file)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert kit.child.abandoned() == 1
    with pytest.raises(kit.child.DeadlineError, match="no answer within"):
        await kit.child.call(called.own_pid_then_sleep, str(pid_file), deadline=1.5)


async def test_many_hanging_calls_do_not_stop_others() -> None:
    hanging = [asyncio.create_task(kit.child.call(called.sleep, 30, deadline=5)) for _ in range(8)]
    assert await kit.child.call(called.echo, "still", deadline=20) == ["still"]
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
