"""Long-lived children: typed answers, deadlines, restarts, the end with the agent."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import kit.errors
from kit import line_worker, processes
from tests.kit import called

NUMBERS = "tests.kit.called:serve_numbers"
COUNT = "tests.kit.called:count"


@pytest.fixture
async def numbers() -> AsyncIterator[line_worker.Worker[called.Number]]:
    made = line_worker.Worker(
        NUMBERS, called.Number, about="numbers", backoff=line_worker.Backoff(0.01, 0.01)
    )
    yield made
    await made.close()


async def test_ask_keeps_types_and_any_name(numbers: line_worker.Worker[called.Number]) -> None:
    name = os.fsdecode(b"not utf-8 \xff\n")
    for number in range(3):
        answer = await numbers.ask(called.Question(number, name), deadline=20)
        assert answer == called.Number(2 * number, name)
    assert numbers.starts == 1


async def test_ask_raises_error_of_child_and_keeps_it(
    numbers: line_worker.Worker[called.Number],
) -> None:
    with pytest.raises(kit.errors.RefusedError, match="a: b; c"):
        await numbers.ask(called.Question(1, "refuse"), deadline=20)
    with pytest.raises(FileNotFoundError, match="gone"):
        await numbers.ask(called.Question(1, "os"), deadline=20)
    with pytest.raises(line_worker.ChildError, match="ZeroDivisionError: oops"):
        await numbers.ask(called.Question(1, "bug"), deadline=20)
    assert (await numbers.ask(called.Question(4), deadline=20)).value == 8
    assert numbers.starts == 1


async def test_ask_never_takes_a_late_answer_for_the_next(
    numbers: line_worker.Worker[called.Number],
) -> None:
    with pytest.raises(processes.DeadlineError, match=r"numbers: no answer within 0\.5s"):
        await numbers.ask(called.Question(1, "late"), deadline=0.5)
    await asyncio.sleep(0.02)  # the pause after a failure
    assert (await numbers.ask(called.Question(5, "x"), deadline=20)) == called.Number(10, "x")
    assert numbers.starts == 2


async def test_ask_starts_another_child_after_its_end(
    numbers: line_worker.Worker[called.Number],
) -> None:
    with pytest.raises(line_worker.ChildError, match="the child process ended"):
        await numbers.ask(called.Question(1, "end"), deadline=20)
    await asyncio.sleep(0.02)
    assert (await numbers.ask(called.Question(5), deadline=20)).value == 10


async def test_ask_fails_at_once_during_the_pause() -> None:
    made = line_worker.Worker(
        NUMBERS, called.Number, about="numbers", backoff=line_worker.Backoff(600, 600)
    )
    with pytest.raises(line_worker.ChildError, match="ended"):
        await made.ask(called.Question(1, "end"), deadline=20)
    with pytest.raises(line_worker.ChildError, match="ended"):
        await made.ask(called.Question(1), deadline=20)
    assert made.starts == 1
    await made.close()


async def test_idle_child_ends() -> None:
    made = line_worker.Worker(NUMBERS, called.Number, about="numbers", idle=0.05)
    await made.ask(called.Question(1), deadline=20)
    pid = made.pid
    assert pid is not None
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)
    assert (await made.ask(called.Question(3), deadline=20)).value == 6
    await made.close()


async def test_close_leaves_no_child(numbers: line_worker.Worker[called.Number]) -> None:
    await numbers.start()
    pid = numbers.pid
    await numbers.close()
    assert not Path(f"/proc/{pid}").exists()
    assert processes.hanging("numbers") == 0


async def test_listen_yields_until_silence() -> None:
    made = line_worker.Worker(COUNT, called.Number, about="count")
    heard = made.listen(called.Question(2, "n"), silence=1.0)
    assert [await anext(heard) for _ in range(3)] == [called.Number(n, "n") for n in (2, 3, 4)]
    with pytest.raises(processes.DeadlineError, match="said nothing"):
        await anext(heard)
    await made.close()


async def test_listen_says_that_the_child_ended() -> None:
    made = line_worker.Worker(COUNT, called.Number, about="count")
    heard = []
    with pytest.raises(line_worker.ChildError, match="ended"):
        async for message in made.listen(called.Question(4), silence=20):
            heard.append(message)
            await made.send(called.Question(0))
    assert [each.value for each in heard] == [4]
    await made.close()


def test_backoff_grows_to_its_limit_with_jitter() -> None:
    backoff = line_worker.Backoff(1, 10)
    pauses = [backoff.next() for _ in range(8)]
    for attempt, pause in enumerate(pauses):
        full = min(2.0**attempt, 10)
        assert 0.75 * full <= pause <= full
    backoff.reset()
    assert backoff.next() <= 1
