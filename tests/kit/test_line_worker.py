"""Long-lived children, interpreters and forks: typed answers, deadlines, restarts, their end."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kit.errors
from kit import line_worker, pause, processes
from tests.kit import called
from tests.testbed import waiting

NUMBERS = "tests.kit.called:serve_numbers"
COUNT = "tests.kit.called:count"


@pytest.fixture(params=[False, True], ids=["interpreter", "forked"])
def forked(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture
async def numbers(forked: bool) -> AsyncIterator[line_worker.LineWorker[called.Number]]:
    made = line_worker.LineWorker(
        NUMBERS, called.Number, about="numbers", backoff=pause.Backoff(0.01, 0.01),
        forked=forked,
    )  # fmt: skip
    yield made
    await made.close()


async def test_ask_keeps_types_and_any_name(numbers: line_worker.LineWorker[called.Number]) -> None:
    name = os.fsdecode(b"not utf-8 \xff\n")
    for number in range(3):
        answer = await numbers.ask(called.Question(number, name), deadline=waiting.limit(20))
        assert answer == called.Number(2 * number, name)
    assert numbers.starts == 1


async def test_ask_raises_error_of_child_and_keeps_it(
    numbers: line_worker.LineWorker[called.Number],
) -> None:
    with pytest.raises(kit.errors.RefusedError, match="a: b; c"):
        await numbers.ask(called.Question(1, "refuse"), deadline=waiting.limit(20))
    with pytest.raises(FileNotFoundError, match="gone"):
        await numbers.ask(called.Question(1, "os"), deadline=waiting.limit(20))
    with pytest.raises(line_worker.ChildError, match="ZeroDivisionError: oops"):
        await numbers.ask(called.Question(1, "bug"), deadline=waiting.limit(20))
    assert (await numbers.ask(called.Question(4), deadline=waiting.limit(20))).value == 8
    assert numbers.starts == 1


async def test_ask_never_takes_a_late_answer_for_the_next(
    numbers: line_worker.LineWorker[called.Number],
) -> None:
    await numbers.start()  # within its own time
    with pytest.raises(processes.DeadlineError, match=r"numbers: no answer within 0\.5s"):
        await numbers.ask(called.Question(1, "late"), deadline=0.5)
    await asyncio.sleep(0.02)  # the pause after a failure
    assert (
        await numbers.ask(called.Question(5, "x"), deadline=waiting.limit(20))
    ) == called.Number(10, "x")
    assert numbers.starts == 2


async def test_ask_starts_another_child_after_its_end(
    numbers: line_worker.LineWorker[called.Number],
) -> None:
    with pytest.raises(line_worker.ChildError, match="the child process ended"):
        await numbers.ask(called.Question(1, "end"), deadline=waiting.limit(20))
    await asyncio.sleep(0.02)
    assert (await numbers.ask(called.Question(5), deadline=waiting.limit(20))).value == 10


async def test_ask_fails_at_once_during_the_pause() -> None:
    made = line_worker.LineWorker(
        NUMBERS, called.Number, about="numbers", backoff=pause.Backoff(600, 600)
    )
    with pytest.raises(line_worker.ChildError, match="ended"):
        await made.ask(called.Question(1, "end"), deadline=waiting.limit(20))
    with pytest.raises(line_worker.ChildError, match="ended"):
        await made.ask(called.Question(1), deadline=waiting.limit(20))
    assert made.starts == 1
    await made.close()


async def test_idle_child_ends(forked: bool) -> None:
    made = line_worker.LineWorker(NUMBERS, called.Number, about="numbers", idle=0.05, forked=forked)
    await made.ask(called.Question(1), deadline=waiting.limit(20))
    pid = made.pid
    assert pid is not None
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)
    assert (await made.ask(called.Question(3), deadline=waiting.limit(20))).value == 6
    await made.close()


async def test_close_leaves_no_child(numbers: line_worker.LineWorker[called.Number]) -> None:
    await numbers.start()
    pid = numbers.pid
    await numbers.close()
    assert processes.hanging("numbers") == 0
    # The process that a fork is a child of hears a moment later that it may be forgotten.
    await waiting.until_async(lambda: not Path(f"/proc/{pid}").exists(), 5, "no process")


async def test_listen_yields_until_silence() -> None:
    for silence in (1, 4, 16, 64):  # seconds; a busy machine starts the child slowly
        made = line_worker.LineWorker(COUNT, called.Number, about="count", forked=True)
        heard = []
        with pytest.raises(processes.DeadlineError, match=f"said nothing for {silence}s"):
            async for number in made.listen(called.Question(2, "n"), silence=silence):
                heard.append(number)  # noqa: PERF401 (what was heard before the error counts)
        await made.close()
        if len(heard) == 3:
            break
    assert heard == [called.Number(n, "n") for n in (2, 3, 4)]


async def test_listen_hears_the_last_words_and_says_that_the_child_ended(forked: bool) -> None:
    made = line_worker.LineWorker(COUNT, called.Number, about="count", forked=forked)
    heard = []
    with pytest.raises(line_worker.ChildError, match="ended"):
        async for message in made.listen(called.Question(4), silence=waiting.limit(20)):
            heard.append(message)
            await made.send(called.Question(0))
    assert [each.value for each in heard] == [4]
    await made.close()


async def test_forked_child_works_for_the_agent_and_keeps_no_descriptor() -> None:
    made = line_worker.LineWorker(
        "tests.kit.called:say_where_it_is", called.Place, about="place", forked=True
    )
    other = line_worker.LineWorker(NUMBERS, called.Number, about="numbers", forked=True)
    assert (await other.ask(called.Question(1), deadline=waiting.limit(20))).value == 2
    gc.collect()  # what earlier tests left would go meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async for place in made.listen(called.Question(0), silence=waiting.limit(20)):
            assert place.agent == os.getpid()
            assert place.parent != os.getpid()
            assert place.group != os.getpgrp()
            # Its stderr is the agent's; of the other child and of its server it has nothing.
            assert place.descriptors == [0, 1, 2]
            break
        await made.close()
    assert len(os.listdir("/proc/self/fd")) == before
    await other.close()


async def test_what_a_stopped_child_has_not_read_is_given_up_with_it() -> None:
    child = await processes.start_forked(NUMBERS)
    os.kill(child.pid, signal.SIGSTOP)
    child.stdin.write(b"x" * 5_000_000)
    assert child.stdin.transport.get_write_buffer_size() > 0
    child.hang_up()
    assert child.stdin.transport.get_write_buffer_size() == 0
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL


async def test_forked_child_ends_with_its_server_and_the_next_has_another() -> None:
    made = line_worker.LineWorker(
        "tests.kit.called:say_where_it_is", called.Place, about="place", forked=True
    )
    heard = made.listen(called.Question(0), silence=waiting.limit(20))
    first = await anext(heard)
    os.kill(first.parent, signal.SIGKILL)
    with pytest.raises(line_worker.ChildError, match="ended"):
        await anext(heard)
    heard = made.listen(called.Question(0), silence=waiting.limit(20))
    assert (await anext(heard)).parent != first.parent
    await heard.aclose()
    await made.close()


async def test_fork_that_comes_too_late_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = line_worker.LineWorker(NUMBERS, called.Number, about="numbers", forked=True)
    monkeypatch.setattr(processes, "START_SECONDS", 0.0)
    with pytest.raises(processes.DeadlineError, match="could not start a process within 0s"):
        await made.start()
    monkeypatch.undo()
    assert (await made.ask(called.Question(1), deadline=waiting.limit(20))).value == 2
    await made.close()
