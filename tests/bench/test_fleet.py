"""The simulated fleet: what the docs say of it, and what no change of the scheduler may exceed."""

import math

import pytest

from preheat.registry import schedule
from tests.bench import fleet

NODES, PER_REGISTRY = 1000, 10


def test_docs_have_the_figures_of_the_simulation() -> None:
    """All lines are there; the figure that takes the shortest is made anew."""
    _, written, _ = fleet.in_docs()
    rows = [row.strip("| ").split(" | ") for row in written.splitlines()[2:]]

    assert written.startswith(fleet.HEAD)
    assert [row[0] for row in rows] == [case.name for case in fleet.CASES if case.told]
    assert rows[0][1] == fleet.cell(fleet.CASES[0], {}), "run python -m tests.bench.fleet --write"


@pytest.mark.parametrize("case", fleet.CASES, ids=lambda case: case.name)
def test_fleet_stays_below_what_its_settings_say(case: fleet.Case) -> None:
    more = {"nodes": NODES, "per_registry": PER_REGISTRY}
    result = fleet.simulate(case, NODES, fleet=more)
    pulls = PER_REGISTRY * schedule.PULL_PART

    assert len(result.done) == NODES
    assert result.most_at_once() <= pulls + 6 * math.sqrt(pulls)
    # Each node's pull is one burst of requests; some nodes begin in the same second.
    assert result.rates(case.begins)[-1] <= 6 * fleet.PULL
    assert max(result.done) - case.begins <= 3 * NODES * fleet.SIZE / fleet.RATE / pulls


@pytest.mark.parametrize("case", [fleet.CASES[0], fleet.CASES[3]], ids=lambda case: case.name)
def test_default_spread_is_no_herd_and_none_is_one(case: fleet.Case) -> None:
    """The control: without turns the simulation sees the herd."""
    spread, none = (fleet.simulate(case, NODES, spread=seconds) for seconds in (300, 0))

    assert none.rates(case.begins)[-1] > 2 * spread.rates(case.begins)[-1]
    assert none.most_at_once() > 2 * spread.most_at_once()
