"""How many examples property tests draw, and from which seed.

``make test`` draws the same few in each run: what it finds is the fault of a change, not of the
day. ``make test-long`` draws MORE times as many from a new seed; ``TEST_SEED=N`` says it, and does
the same again.
"""

import os

import hypothesis

# Hypothesis imports it in the middle of a test, where parsing it anew for pytest's asserts made the
# interpreter fail once ("AST constructor recursion depth mismatch").
import hypothesis.internal.conjecture.optimiser

NAME = "TEST_SEED"
USUAL = 40  # of a property that says nothing else
MORE = 10
HEALTH = (hypothesis.HealthCheck.too_slow,)  # an example may be slow without being wrong


def seed() -> int | None:
    """Of this run; None where the same examples are drawn as always. ValueError for no number."""
    told = os.environ.get(NAME, "")
    return int(told) if told else None


def number(usual: int) -> int:
    """So many examples instead of ``usual``."""
    return usual if seed() is None else usual * MORE


def seeds(usual: int) -> range:
    """For properties that draw without hypothesis."""
    return range(first := seed() or 0, first + number(usual))


def load_profile() -> None:
    fresh = seed() is not None
    hypothesis.settings.register_profile(
        "suite",
        deadline=None,
        max_examples=number(USUAL),
        suppress_health_check=HEALTH,
        derandomize=not fresh,
        database=None,  # an example of another run is no part of this one
        print_blob=fresh,
    )
    hypothesis.settings.load_profile("suite")
