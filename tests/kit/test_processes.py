"""Programs run to their end: output, deadlines, the cap on those that hang."""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from kit import processes
from tests.testbed import waiting


async def test_run_returns_output_and_code() -> None:
    ended = await processes.run(
        ["sh", "-c", "cat; echo bad >&2; exit 3"],
        about="test",
        deadline=waiting.limit(20),
        input=b"good",
    )
    assert ended == processes.Ended(3, b"good", b"bad\n")


async def test_run_names_missing_program() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        await processes.run(["no-such-program"], about="x", deadline=waiting.limit(20))


_STREAMS = "for n in 0 1 2; do readlink /proc/$$/fd/$n || echo none; done"


async def test_programs_have_stdin_stdout_and_stderr() -> None:
    """Else what they open takes these numbers, and what their own programs print ends up in it."""
    ended = await processes.run(["sh", "-c", _STREAMS], about="test", deadline=waiting.limit(20))
    places = ended.out.decode().split()
    assert places[0] == "/dev/null"
    assert [place.partition(":")[0] for place in places[1:]] == ["pipe", "pipe"]


async def test_run_kills_all_that_a_late_program_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {file}; wait"
    for deadline in (1, 4, 16, 64):  # it may still be starting
        late = f"about it: sh gave no answer within {deadline}s"
        with pytest.raises(processes.DeadlineError, match=late):
            await processes.run(["sh", "-c", script], about="about it", deadline=deadline)
        if file.exists() and file.read_text():
            break
    assert await processes.settled("about it", 60)
    status = Path(f"/proc/{file.read_text().strip()}/stat")

    def ended() -> bool:
        try:
            return ") Z" in status.read_text()
        except OSError:
            return True

    await waiting.until_async(ended, 5, "its end")


async def test_run_bounds_output() -> None:
    with pytest.raises(OSError, match="more than 1000 bytes"):
        await processes.run(
            [sys.executable, "-c", "print('x' * 5000)"],
            about="x",
            deadline=waiting.limit(20),
            largest=1000,
        )


async def test_run_passes_only_the_given_environment() -> None:
    ended = await processes.run(
        ["env"],
        about="x",
        deadline=waiting.limit(20),
        environment={"PATH": os.environ["PATH"], "A": "b"},
    )
    lines = ended.out.decode().splitlines()
    assert "A=b" in lines
    assert "HOME" not in {line.partition("=")[0] for line in lines}


async def test_start_refuses_when_too_many_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_HANGING", 2)
    for number in range(2):
        free = tmp_path / str(number)
        process = await processes.start_call("tests.kit.called:hang_until", 20)
        end = asyncio.create_task(process.communicate(json.dumps([str(free)]).encode()))
        while not Path(f"{free}.hangs").exists():
            await asyncio.sleep(0.01)
        processes.abandon(process, f"device {number}", end)
    assert not await processes.settled("device 0", 0.1)
    assert processes.hanging("device 1") == 1
    with pytest.raises(processes.DeadlineError, match="2 of its child processes hang"):
        await processes.run(["true"], about="x", deadline=waiting.limit(20))
    for number in range(2):
        (tmp_path / str(number)).touch()
        assert await processes.settled(f"device {number}", 60)
    assert (await processes.run(["true"], about="x", deadline=waiting.limit(20))).code == 0


async def _abandoned(stack: contextlib.AsyncExitStack, free: Path, share: str) -> None:
    """A process of that share hangs until the end of ``stack``."""

    async def hang() -> None:
        processes.in_share(share)
        process = await processes.start_call("tests.kit.called:hang_until", 20)
        end = asyncio.create_task(process.communicate(json.dumps([str(free)]).encode()))
        while not Path(f"{free}.hangs").exists():
            await asyncio.sleep(0.01)
        processes.abandon(process, str(free), end)

    async def released() -> None:
        free.touch()
        assert await processes.settled(str(free), 60)

    await asyncio.create_task(hang())
    stack.push_async_callback(released)


async def test_each_share_is_kept_for_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MOST_HANGING", 5)
    monkeypatch.setattr(processes, "_KEPT", 5)  # one for each
    monkeypatch.setattr(processes, "_shares", {""})

    async def code(share: str) -> int:
        processes.in_share(share)
        return (await processes.run(["true"], about="x", deadline=waiting.limit(20))).code

    async with contextlib.AsyncExitStack() as stack:
        assert await asyncio.create_task(code("well")) == 0
        for number in range(3):
            await _abandoned(stack, tmp_path / str(number), "ill")
        with pytest.raises(processes.TooManyHangError, match="3 of its .*, 3 of them of ill"):
            await asyncio.create_task(code("ill"))
        assert await asyncio.create_task(code("well")) == 0
        assert (await processes.run(["true"], about="x", deadline=waiting.limit(20))).code == 0
        await _abandoned(stack, tmp_path / "3", "well")
        with pytest.raises(processes.TooManyHangError, match="4 of its .*, 1 of them of well"):
            await asyncio.create_task(code("well"))
        assert (await processes.run(["true"], about="x", deadline=waiting.limit(20))).code == 0, (
            "of no room"
        )
