"""How many examples are drawn, that a seed says which, and names of long parameters."""

import pytest

from tests.testbed import examples, long_ids


def test_without_a_seed_the_same_few_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(examples.NAME, "")
    assert examples.seed() is None
    assert examples.number(7) == 7
    assert list(examples.seeds(3)) == [0, 1, 2]


def test_a_seed_draws_others_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(examples.NAME, "12")
    assert examples.number(7) == 7 * examples.MORE
    assert examples.seeds(3) == range(12, 12 + 3 * examples.MORE)
    monkeypatch.setenv(examples.NAME, "new")
    with pytest.raises(ValueError, match="new"):
        examples.seed()


def test_long_parameters_have_short_names() -> None:
    name = long_ids.name
    assert name(5) is name("short") is None
    long = "\udcff\n" * 3000
    named = name(long)
    assert named is not None and named.isascii() and "\n" not in named and len(named) < 300
    assert name(long.encode(errors="surrogateescape")) not in (None, named)
    assert name(long + "x") not in (None, named)
