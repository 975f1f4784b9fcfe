"""A guarded cell and an agent for it, shared by the tests of a module."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.testbed import cell
from tests.testbed.agent import Agent
from tests.volumes.guard.world import World
from volumes import settings
from volumes.guard import kernel


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cell.Cell]:
    with cell.cell(tmp_path_factory.mktemp("cell")) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(where: cell.Cell) -> Iterator[cell.Cell]:
    """Enforced by the kernel alone; no agent, so no leases."""
    guard = where.guard()
    enforce = settings.GuardSettings(drivers=("loop",))
    guard.apply(kernel.wanted(enforce, kernel.Mode.ENFORCE, {7: "loop"}))
    guard.close()
    yield where


@pytest.fixture(scope="module")
def agent(where: cell.Cell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with cell.agent(tmp_path_factory.mktemp("agent"), where) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    await made.manager.close()
