"""What the figures rest on: sides in turn, ratios by round, a reader that misses nothing."""

from pathlib import Path

import pytest

from tests.bench import harness, reader, trees


def test_sides_are_taken_in_turn() -> None:
    order: list[str] = []

    def side(name: str, rate: float) -> harness.Side:
        def take() -> float:
            order.append(name)
            return rate

        return take

    answers = harness.in_turn({"a": side("a", 2.0), "b": side("b", 1.0)}, rounds=3)
    assert order == ["a", "b"] * 3
    assert answers == {"a": [2.0] * 3, "b": [1.0] * 3}


def test_the_ratio_is_that_of_the_middle_round() -> None:
    entry = harness.at_least([10.0, 1.0, 8.0], [10.0, 10.0, 4.0], 0.9, "files/s")
    assert (entry.ratio, entry.spread, entry.reached) == (1.0, (0.1, 2.0), True)
    assert not harness.at_least([8.0], [10.0], 0.9, "files/s").reached


def test_a_bound_is_not_reached_at_its_value() -> None:
    assert harness.at_most([0.5, 0.9, 3.0], 1.0, "%").reached
    assert not harness.at_most([1.0], 1.0, "%").reached


@pytest.mark.real  # it is compiled
def test_the_reader_reads_every_byte_and_notices_one_that_is_missing(tmp_path: Path) -> None:
    root = tmp_path / "data"
    size = trees.make(root, 500, 1, 5000)
    files, found = reader.files_below(root)
    assert (len(files), found) == (500, size)
    read = reader.Reader(tmp_path, "all", files, size)
    assert read.once(root, 4, seed=3, passes=2) > 0
    path = next(path for path in root.rglob("*.bin") if path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match=r"data gave .*, not 1 x"):
        read.once(root, 4, seed=3)
    path.unlink()
    with pytest.raises(RuntimeError, match="No such file"):
        read.once(root, 4, seed=3)
