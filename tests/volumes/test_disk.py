"""A state directory whose disk hangs: the room's work on it keeps one thread, and no other's."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kit.errors
import kit.files
import kit.tasks
from tests.testbed import waiting
from tests.volumes.guard.world import witness
from volumes import settings
from volumes.audit import actions
from volumes.guard import controller
from volumes.ledger import store

TRIES = 4


@pytest.fixture
async def hanging(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """The threads that hang on the disk."""
    over, found = threading.Event(), list[int]()

    def hang(*_: Any) -> None:
        found.append(threading.get_ident())
        over.wait()

    monkeypatch.setattr(kit.tasks, "STATE", kit.tasks.Apart("the test's"))
    monkeypatch.setattr(kit.files, "append", hang)
    monkeypatch.setattr(store.LedgerStore, "load", hang)
    monkeypatch.setattr(actions.ActionJournal, "read", hang)
    monkeypatch.setattr(controller, "LOAD_SECONDS", 0.05)
    monkeypatch.setattr(actions, "_WRITE_SECONDS", 0.05)
    monkeypatch.setattr(actions, "_READ_SECONDS", 0.05)
    yield found
    over.set()  # before the loop ends, which waits for its threads


async def _others_work() -> None:
    async with asyncio.timeout(waiting.limit(60)):
        assert await asyncio.to_thread(lambda: "here") == "here"


async def test_starts_fail_in_time_and_leave_one_thread(hanging: list[int], tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    for _ in range(TRIES):  # the room makes its objects anew each time
        made = controller.Controller(settings.GuardSettings(), (), witness(), state_dir=tmp_path)
        with pytest.raises(kit.errors.HostError, match="gave no answer|an earlier call hangs"):
            async with asyncio.timeout(waiting.limit(60)):
                await made.start()
    assert len(hanging) == 1
    await _others_work()


async def test_journal_ends_in_time_and_leaves_one_thread(
    hanging: list[int], tmp_path: Path
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    written = actions.ActionJournal(tmp_path)
    async with asyncio.timeout(waiting.limit(60)):
        for _ in range(TRIES):
            assert not await written.write({"action": "a"})
            assert await written.recall() is None
    assert len(hanging) == 1
    await _others_work()
