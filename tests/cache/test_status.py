"""What is shown of a dataset to operators."""

import types
from pathlib import Path
from typing import Any

import pytest

import kit.child
from cache import status
from cache.store import index


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children's work is done in this process."""

    async def call(function: Any, *arguments: Any, deadline: float) -> Any:
        return function(*arguments)

    monkeypatch.setattr(kit.child, "call", call)


def generation(folder: Path, state: str, failed: str) -> Any:
    folder.mkdir()
    opened = index.Index.open(folder / index.NAME)
    with opened.transaction():
        opened.fail(index.ROOT, failed, "it changed", lasting=False)
    opened.close()
    record = types.SimpleNamespace(state=state)
    return types.SimpleNamespace(folder=str(folder), record=record)


@pytest.mark.parametrize(
    ("next_state", "named"),
    [(None, "old"), ("filling", "old"), ("complete", "old"), ("partial", "new")],
)
async def test_failures_are_those_that_keep_an_update_from_serving(
    next_state: str | None, named: str, tmp_path: Path, here: None
) -> None:
    current = generation(tmp_path / "a", "partial", "old")
    next_one = None if next_state is None else generation(tmp_path / "b", next_state, "new")
    dataset: Any = types.SimpleNamespace(current=current, next=next_one, folder=current.folder)
    found = await status.failures(dataset, 10, "")
    assert [each["path"] for each in found["failures"]] == [named]
