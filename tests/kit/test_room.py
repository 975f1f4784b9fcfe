"""What a room hands the process: requests taken apart, streams that follow a state."""

from types import SimpleNamespace

import pytest

import kit.errors
import kit.room


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that only ``watch`` moves, by waiting."""
    now = [1000.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(kit.room, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(kit.room, "asyncio", SimpleNamespace(sleep=sleep))
    return now


async def test_watch_repeats_itself_only_as_a_heartbeat(clock: list[float]) -> None:
    start = clock[0]
    stream = kit.room.watch(lambda: {"a": 1} if clock[0] < start + 12 else None)
    times = [clock[0] - start async for _ in stream]
    assert times == [0.0, 5.0, 10.0]


async def test_watch_ends_after_the_last_item() -> None:
    items = iter([{"n": 0}, {"n": 0}, {"n": 1}])
    seen = [item async for item in kit.room.watch(lambda: next(items), lambda i: i["n"] == 1)]
    assert seen == [{"n": 0}, {"n": 1}]


def test_request_fields_checks_names_and_types() -> None:
    request = kit.room.Request(body={"flag": True, "count": 2})
    assert request.fields(flag=bool, count=int, other=str) == {"flag": True, "count": 2}
    for types in ({"flag": bool}, {"flag": int, "count": int}, {"flag": bool, "count": str}):
        with pytest.raises(kit.errors.SettingsError):
            request.fields(**types)
