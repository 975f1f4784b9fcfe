"""The counts of the house: what scripts/house.py counts, and when it fails."""

import ast
from pathlib import Path

import pytest

from scripts import house


def test_a_class_has_what_its_methods_assign_to_self() -> None:
    made = next(house.classes(ast.parse(
        "class A:\n"
        "    shared = 1\n"
        "    def __init__(self, b):\n"
        "        self.a, self.b = 1, b\n"
        "    async def change(self, other):\n"
        "        self.a += 1; other.c = 2; print(self.d)\n"
    )))  # fmt: skip

    assert (house.attributes(made), house.methods(made)) == ({"a", "b"}, 2)


def test_self_is_no_parameter() -> None:
    function = ast.parse("def a(self, b, /, c, *d, e, **f): ...").body[0]
    assert isinstance(function, ast.FunctionDef)

    assert house.parameters(function) == 3


def test_only_settings_without_others_below_them_count() -> None:
    page = "* `a`: x\n* `a.b` (1): x\n* `a.c[]`: x\n* `a.c[].d` (2): x\ntext `e`\n"

    assert house.leaves(page) == 2


def test_what_is_above_its_bound_is_told_and_what_is_below_is_not() -> None:
    at_bound = dict(house.BOUNDS)
    name = next(iter(at_bound))
    at_most = dict(house.LARGER)

    assert house.slips(at_bound, at_most) == []
    assert house.slips(at_bound | {name: at_bound[name] - 1}, at_most) == []
    assert name in house.slips(at_bound | {name: at_bound[name] + 1}, at_most)[0]


@pytest.mark.parametrize(("size", "told"), [((15, 20), 0), ((16, 20), 1), ((15, 21), 1)])
def test_a_new_class_may_be_so_large(size: tuple[int, int], told: int) -> None:
    assert len(house.slips({}, {**house.LARGER, "a.py:New": size})) == told


def test_an_exception_may_not_grow_nor_stay_when_it_is_none() -> None:
    name, (owned, parts) = next(iter(house.LARGER.items()))
    grown = {**house.LARGER, name: (owned + 1, max(parts, house.METHODS))}
    gone = {key: size for key, size in house.LARGER.items() if key != name}

    assert name in house.slips({}, grown)[0]
    assert name in house.slips({}, gone)[0]


def test_the_house_is_within_its_bounds() -> None:
    found = house.modules()

    assert {Path(each.name).parts[0] for each in found} == set(house.ROOMS)
    assert house.counts(found).keys() == house.BOUNDS.keys()
