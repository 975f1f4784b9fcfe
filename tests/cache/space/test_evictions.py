"""What an eviction waits for before it deletes."""

import types
from typing import Any

import pytest

import kit.errors
from cache.space import evictions
from cache.store import subset
from cache.views.view import Stage


class Fill:
    used = 0
    inodes = 0

    def record(self) -> dict[str, Any]:
        return {}


class Evicted:
    """A dataset of which half is to go, with a file open in an earlier mount of its view."""

    name, folder, view, layer = "a", "/store/a/1", "/views/a/data", "/store/a/1/tree"
    evicted = freed = 0

    def __init__(self, did: list[str]) -> None:
        self.did = did
        self.stage = Stage.STORE
        self.source = types.SimpleNamespace(block=False)
        self.reached = types.SimpleNamespace(root="/source")
        self.figures = types.SimpleNamespace(counts=dict)
        self.current = types.SimpleNamespace(id="1", show_kept_figures=lambda: None)
        self.generation = types.SimpleNamespace(
            kept_share=subset.ALL, used=0, left_files=0, state="complete", evicting=False
        )

    def used(self) -> int:
        return 0

    def unfit(self) -> str:
        return ""

    async def may_overlay(self) -> bool:
        return True

    async def change(self, **changes: Any) -> None:
        vars(self.generation).update(changes)

    async def publish(self, stage: Stage) -> None:
        self.stage = stage

    async def refresh(self) -> None:
        """Nothing is mounted."""


async def test_an_operators_eviction_waits_for_whom_an_earlier_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The earlier one has taken the marks and shown an overlay: nothing tells of its reader."""
    marks, did = [3], list[str]()

    async def run(_: Any, __: Any, part: str, *___: Any) -> Any:
        did.append(part)
        taken = marks.pop() if part == "marks" and marks else 0
        found = types.SimpleNamespace(share=subset.ALL // 2, beyond=5, fill=Fill(), evicted=taken)
        return types.SimpleNamespace(evict=found)

    async def shows(_: Any) -> bool:
        return False

    async def wait(_: Any) -> None:
        raise kit.errors.HostError("eviction", "a reader is in an earlier view", "")

    monkeypatch.setattr(evictions.Evictions, "_pass", run)
    monkeypatch.setattr(evictions, "fall_back", shows)
    monkeypatch.setattr(evictions, "_wait_for_others", wait)
    dataset: Any = Evicted(did)
    limits: Any = types.SimpleNamespace()
    none: Any = None
    made = evictions.Evictions(none, none)
    for _ in ("for the budget", "of an operator"):
        with pytest.raises(kit.errors.HostError, match="a reader"):
            await made.settle(dataset, grow=False, limits=limits)
    assert dataset.generation.evicting
    assert "files" not in did
