"""What the node has, by the clock that it has."""

from types import SimpleNamespace
from typing import Any

import pytest

from preheat.planning import stock
from preheat.runtimes import base

NOW, DAY = 1_900_000_000.0, 86400.0
REF = "r.e/fw/a:v1"


def hold(role: Any, created: float, state: str = "") -> base.Hold:
    return base.Hold(role, REF, "policy", state=state, created=created, id=f"{role}{state}")


@pytest.mark.parametrize(
    ("role", "state", "created", "age"),
    [
        ("pin", "", 0.0, 60.0),  # of this run
        ("note", "dropped", 0.0, 60.0),
        ("pin", "", -DAY, 11 * DAY + 60),  # of an earlier one
        ("pin", "", 30 * DAY, 60.0),  # by a clock that was ahead
        ("note", "expired", 30 * DAY, -20 * DAY + 60),  # says so: see desired.notes_ahead
    ],
)
async def test_a_hold_is_as_old_as_the_time_that_passed(
    role: Any, state: str, created: float, age: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a battery a clock is days behind until the network tells it."""
    clock = {"time": NOW - 10 * DAY, "monotonic": 5.0}
    made = SimpleNamespace(time=lambda: clock["time"], monotonic=lambda: clock["monotonic"])
    monkeypatch.setattr(stock, "time", made)
    no_runtime: Any = None  # nothing is in use, so nothing is stored
    uses = stock.ImageUses(no_runtime)
    inventory = base.ImageInventory(holds=(hold(role, NOW - 10 * DAY + created, state),))
    await uses.note(inventory)
    clock.update(time=NOW + 60, monotonic=65.0)
    (found,) = (await uses.note(inventory)).holds

    assert NOW + 60 - found.created == pytest.approx(age)


async def test_a_hold_that_is_seen_late_is_as_old_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been made at once after the last look, however long ago that was."""
    clock = {"time": NOW, "monotonic": 5.0}
    made = SimpleNamespace(time=lambda: clock["time"], monotonic=lambda: clock["monotonic"])
    monkeypatch.setattr(stock, "time", made)
    uses = stock.ImageUses(None)  # type: ignore[arg-type]
    await uses.note(base.ImageInventory())
    inventory = base.ImageInventory(holds=(hold("note", NOW + 1, "dropped"),))
    clock.update(time=NOW + 3700, monotonic=3705.0)
    (found,) = (await uses.note(inventory)).holds

    assert found.created == NOW + 1


async def test_no_use_lies_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "time", SimpleNamespace(time=lambda: NOW, monotonic=lambda: 0.0))
    inventory = base.ImageInventory(last_used={"sha256:a": NOW + DAY, "sha256:b": NOW - DAY})
    found = await stock.ImageUses(None).note(inventory)  # type: ignore[arg-type]
    assert found.last_used == {"sha256:a": NOW, "sha256:b": NOW - DAY}
