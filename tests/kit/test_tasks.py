"""Ending tasks, waiting for events."""

import asyncio

import pytest

from kit import tasks


@pytest.mark.parametrize(("is_set", "seconds"), [(True, 0.0), (True, None), (False, 0.0)])
async def test_an_event_is_waited_for_so_long_and_no_longer(
    is_set: bool, seconds: float | None
) -> None:
    event = asyncio.Event()
    if is_set:
        event.set()
    assert await tasks.until(event, seconds) is is_set


async def test_tasks_have_ended_whatever_they_were_about_to_do() -> None:
    async def fails() -> None:
        raise ValueError

    async def waits() -> None:
        await asyncio.Event().wait()

    every = [asyncio.create_task(each()) for each in (fails, waits)]
    await asyncio.sleep(0)
    await tasks.end(None, *every)
    assert all(each.done() for each in every) and every[1].cancelled()
    await tasks.end()
