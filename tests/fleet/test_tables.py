"""The fleet in lines that fit a terminal."""

import pytest

from fleet import folding, tables
from kit import terminal
from tests.fleet.test_folding import NOW, dataset, finding, folded, storage, wish

LONG = "ip-10-20-30-40.eu-central-1.compute.internal"


def large() -> folding.Fleet:
    many = [dataset(f"dataset-{i}", 40, message="no room: " + "x" * 200) for i in range(20)]
    images = [{"ref": f"registry.example/team/train:{i}", "state": "pulling"} for i in range(20)]
    fleet = folded(
        storage(LONG, datasets=many, images=images, findingCounts={"critical": 1},
                findings=[finding("critical", "leaked-mount", "held by\n\x1b[31m" + "y" * 200)]),
        *(storage(f"n{i}", datasets=[dataset("coco")]) for i in range(30)),
    )  # fmt: skip
    fleet.add_sets([wish("train", 31, "Filling")])
    return fleet


def _lines(name: str, width: int | None, *, wide: bool = False) -> list[terminal.Line]:
    fleet = large()
    if name == "status":
        return list(tables.status(fleet, "https://here, context " + "c" * 100, width))
    made = {"nodes": tables.nodes, "datasets": tables.datasets, "images": tables.images}[name]
    return list(made(fleet, width, wide=wide))


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("name", ["status", "nodes", "datasets", "images"])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    widths = [terminal.width(line) for line in _lines(name, width)]
    assert max(widths) <= width


@pytest.mark.parametrize("name", ["nodes", "datasets", "images"])
def test_in_a_pipe_and_when_wide_nothing_is_cut(name: str) -> None:
    for wide in (False, True):
        assert not any("…" in str(line) for line in _lines(name, None, wide=wide))


def test_the_name_of_a_node_is_whole_on_the_narrowest_terminal() -> None:
    assert any(LONG in str(line) for line in _lines("nodes", 60))


def test_the_worst_comes_first() -> None:
    assert str(_lines("nodes", None)[1]).startswith(LONG)


def test_control_characters_of_others_move_no_cursor() -> None:
    for name in ("status", "nodes"):
        assert not any("\x1b" in terminal.plain(str(line)) for line in _lines(name, 200))


def test_long_lists_say_what_is_left_out_and_how_to_see_it() -> None:
    text = "\n".join(map(str, _lines("status", None)))
    assert "… 11 more datasets: kubectl nodeagent datasets" in text
    assert "… 10 more images: kubectl nodeagent images" in text


@pytest.mark.parametrize(
    ("age", "said"),
    [(None, "never"), (0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (27 * 86400, "27d")],
)
def test_ages(age: float | None, said: str) -> None:
    assert tables.ago(None if age is None else NOW - age, NOW) == said


def test_a_cluster_without_agents_says_where_to_look() -> None:
    text = "\n".join(map(str, tables.status(folding.Fleet(NOW), "here", None)))
    assert "no agent has written yet" in text
    assert "DATASETS  none" in text
