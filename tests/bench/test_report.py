"""The report has whole groups, each with its commit; a run that fails or is cut changes no row."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import harness, report

PROBE = harness.at_most([0.1, 0.3, 0.2], 3.0, "s")
EARLIER = report.Run(
    "python -m tests.bench volumes --only guard", "1234abcd", "2026-01-01 00:00", "2"
)
LATER = dataclasses.replace(EARLIER, commit="5678abcd", date="2026-01-02 00:00")


def whole(_: harness.Workplace) -> harness.Results:
    yield "probe_blank", PROBE


def failing(_: harness.Workplace) -> harness.Results:
    yield "probe_blank", dataclasses.replace(PROBE, ours=2.0)
    raise RuntimeError("the disk is full")


def cut(_: harness.Workplace) -> harness.Results:
    yield "probe_blank", dataclasses.replace(PROBE, ours=2.0)
    raise SystemExit(143)


def wordless(_: harness.Workplace) -> harness.Results:
    yield "of_no_name", PROBE


Kept = Callable[[], report.Report]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return lambda: report.Report(tmp_path / "report.json", tmp_path / "kept.json")


def measure(kept: Kept, **groups: harness.Group) -> dict[str, harness.Entry | None]:
    place = harness.Workplace(Path("/nonexistent"))  # no group here makes anything
    return bench.measure(groups, "volumes", place, kept(), " --rounds 3")


def test_group_that_ran_has_rows_with_words_rounds_commit_and_command(
    kept: Kept, tmp_path: Path
) -> None:
    measure(kept, guard=whole)
    part = report.read(tmp_path / "report.json")["volumes guard"]
    row = part.rows["probe_blank"]
    assert (row.ours, row.rounds, row.reached, row.target) == (0.2, 3, True, 3.0)
    assert row.says == "probe of a blank 320 MiB device"
    assert part.run is not None and part.failed is None
    assert part.run.command == "python -m tests.bench volumes --only guard --rounds 3"
    assert part.run.commit and part.run.date and "CPUs" in part.run.machine


def test_variable_that_changes_the_size_stands_in_the_command(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOAK_SECONDS", "600")
    measure(kept, guard=whole)
    run = report.read(tmp_path / "report.json")["volumes guard"].run
    assert run is not None and run.command.startswith("SOAK_SECONDS=600 python -m ")


def test_failed_group_keeps_its_last_rows_says_so_and_does_not_stop_the_next(
    kept: Kept, tmp_path: Path
) -> None:
    measure(kept, guard=whole)
    found = measure(kept, guard=failing, other=whole)
    assert found["volumes guard"] is None
    parts = report.read(tmp_path / "report.json")
    guard = parts["volumes guard"]
    assert guard.rows["probe_blank"].ours == 0.2
    assert guard.why == "RuntimeError after 1 rows"
    assert guard.run is not None and guard.failed is not None
    assert parts["volumes other"].rows["probe_blank"].ours == 0.2
    measure(kept, guard=whole)
    again = report.read(tmp_path / "report.json")["volumes guard"]
    assert (again.failed, again.why) == (None, "")


def test_cut_run_keeps_what_was_there_and_ends(kept: Kept, tmp_path: Path) -> None:
    measure(kept, guard=whole)
    with pytest.raises(SystemExit):
        measure(kept, guard=cut, other=whole)
    parts = report.read(tmp_path / "report.json")
    assert parts["volumes guard"].rows["probe_blank"].ours == 0.2
    assert parts["volumes guard"].why == "cut after 1 rows"
    assert "volumes other" not in parts


def test_killed_run_is_seen_too(kept: Kept, tmp_path: Path) -> None:
    """Nothing of the run is left to say so: it is said before it begins."""
    seen: list[str] = []

    def killed(_: harness.Workplace) -> harness.Results:
        seen.extend(part.why for part in report.read(tmp_path / "report.json").values())
        yield "probe_blank", PROBE

    measure(kept, guard=killed)
    assert seen == [report.CUT]


def test_row_without_words_fails_its_group(kept: Kept) -> None:
    assert measure(kept, guard=wordless)["volumes guard"] is None


def part(ours: float, run: report.Run, **more: object) -> report.Part:
    row = report.row("probe_blank", dataclasses.replace(PROBE, ours=ours))
    return dataclasses.replace(report.Part({"probe_blank": row}, run), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("turned", [False, True])
def test_of_two_reports_the_later_run_of_each_group_counts(turned: bool) -> None:
    old, new = part(1.0, EARLIER), part(2.0, LATER)
    one, other = {"a": old, "b": new}, {"a": new, "c": old}
    merged = report.merged(other, one) if turned else report.merged(one, other)
    assert merged == {"a": new, "b": new, "c": old}


@pytest.mark.parametrize("turned", [False, True])
def test_failure_is_kept_unless_a_run_came_after(turned: bool) -> None:
    def of(one: report.Part, other: report.Part) -> report.Part:
        both = [{"a": one}, {"a": other}]
        return report.merged(*(reversed(both) if turned else both))["a"]

    ran = part(1.0, EARLIER)
    failed = report.Part({}, failed=LATER, why="cut")
    assert of(ran, failed) == dataclasses.replace(ran, failed=LATER, why="cut")
    before = report.Part({}, failed=EARLIER, why="cut")
    assert of(part(2.0, LATER), before) == part(2.0, LATER)


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    parts = {"a": part(1.0, EARLIER, failed=LATER, why="cut", lost="some")}
    file = tmp_path / "report.json"
    file.write_text(report.text(parts))
    assert report.text(report.read(file)) == report.text(parts)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (289703.4, "289,703"),
        (100.0, "100"),
        (0.47, "0.47"),
        (20.0, "20"),
        (0.001, "0"),
        (None, "-"),
    ],
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert report.number(value) == shown
