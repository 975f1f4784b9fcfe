"""Which share of what jobs open is on the SSD: the sample, and how far it can be trusted."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache import api
from cache.dataset import hits
from cache.dataset.figures import Opens
from cache.views import users
from cache.views.view import Stage
from tests.testbed import waiting
from tests.testbed.pod import pod
from tests.testbed.waiting import until

real = pytest.mark.real

FILES = 10
STORED = 3
# Opens all files in turn, for ever.
OPENS = (
    "import sys\nwhile True:\n    for number in range(10): open(f'{sys.argv[1]}/f{number}').close()"
)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [10, 200, 3000])
def test_bounds_hold_nearly_always(share: float, count: int) -> None:
    chosen = random.Random(7)
    held = 0
    for _ in range(400):
        stored = sum(chosen.random() < share for _ in range(count))
        ratio = hits.estimate(Opens(stored, count - stored))
        assert 0.0 <= ratio.low <= ratio.ratio <= ratio.high <= 1.0
        held += ratio.low <= share <= ratio.high
    assert held >= 0.9 * 400


def test_more_opens_make_the_bounds_narrow() -> None:
    few, many = hits.estimate(Opens(5, 5)), hits.estimate(Opens(5000, 5000))
    assert many.high - many.low < 0.03 < 0.3 < few.high - few.low


def test_what_alone_serves_needs_no_sample() -> None:
    found = hits.Hits()
    assert found.ratio(Stage.STORE, 0.0) == hits.Ratio(1.0, 1.0, 1.0, 0)
    assert found.ratio(Stage.SOURCE, 0.0) == hits.Ratio(0.0, 0.0, 0.0, 0)
    for stage in (Stage.OVERLAY, Stage.NONE, Stage.UNKNOWN):
        assert found.ratio(stage, 0.0) is None
    found.add(Opens(), 0.0)  # directories only
    assert found.ratio(Stage.OVERLAY, time.monotonic()) is None


def test_old_samples_are_forgotten() -> None:
    found = hits.Hits()
    found.add(Opens(0, 100), 0.0)
    found.add(Opens(50, 50), hits.KEPT_SECONDS - 1)
    ratio = found.ratio(Stage.OVERLAY, hits.KEPT_SECONDS - 1)
    assert ratio is not None and ratio.ratio == 0.25
    ratio = found.ratio(Stage.OVERLAY, hits.KEPT_SECONDS + 1)
    assert ratio is not None and ratio.ratio == 0.5
    found.add(Opens(1, 0), 3 * hits.KEPT_SECONDS)
    ratio = found.ratio(Stage.OVERLAY, 3 * hits.KEPT_SECONDS)
    assert ratio is not None and ratio.opens == 1


def test_history_is_of_an_hour_and_what_is_not_known_is_a_gap() -> None:
    found = hits.Hits()
    found.note(Stage.OVERLAY, 0.0)
    assert found.history() == ()  # nothing was known yet
    found.note(Stage.SOURCE, 0.0)
    found.note(Stage.OVERLAY, 0.0)
    found.add(Opens(1, 2), 0.0)
    found.note(Stage.OVERLAY, 0.0)
    assert found.history() == (0.0, None, 0.333)
    for _ in range(3 * hits.MOST_POINTS):
        found.note(Stage.STORE, 0.0)
    assert found.history() == (1.0,) * hits.MOST_POINTS


SAMPLE = hits.Ratio(0.573, 0.531, 0.604, 1812)


def shown(
    sample: hits.Ratio | None,
    history: Sequence[float | None],
    served: str = "store",
    source: str = "dir",
) -> Any:
    """Of a dataset, as much as the page's cell of hits is made of."""
    return SimpleNamespace(
        hits=sample, hits_history=history, served_by=served, source={"kind": source}
    )


@pytest.mark.parametrize(
    ("served", "source", "sample", "said"),
    [
        ("overlay", "dir", SAMPLE, ["57%", "53% to 60%", "1,812 opens seen"]),
        ("store", "dir", hits.Ratio(1.0, 1.0, 1.0, 0), ["100%"]),
        ("source", "dir", hits.Ratio(0.0, 0.0, 0.0, 0), ["0%"]),
        ("overlay", "dir", None,
         ["not known", "no job was seen to open a file in the last 15 min"]),
        ("overlay", "rbd", None, ["not known", api.BLOCKS]),
        ("none", "dir", None, [""]),
    ],
)  # fmt: skip
def test_page_says_what_is_known_and_how_well(
    served: str, source: str, sample: hits.Ratio | None, said: list[str]
) -> None:
    cell = api.hits_cell(shown(sample, (), served, source))
    assert [cell.text, *(each.text for each in cell.below)] == said


def test_line_on_the_page_is_left_out_while_it_says_no_more_than_the_number() -> None:
    assert api.hits_cell(shown(SAMPLE, [1.0, 1.0])).spark == ()
    cell = api.hits_cell(shown(SAMPLE, [0.0, None, 0.57]))
    assert (cell.spark, cell.spark_top) == ([0.0, None, 0.57], 1.0)


# --- real opens


@pytest.fixture
def views(area: Path) -> Iterator[Path]:
    """<views>/coco/data and by-id/g1 and g2 with ten files each, on a mount that others receive."""
    folder = area / "views"
    targets = [folder / "coco" / name for name in ("data", "by-id/g1", "by-id/g2")]
    for target in targets:
        target.mkdir(parents=True)
    subprocess.run(
        ["mount", "--bind", str(folder), str(folder)], check=True, timeout=waiting.limit(60)
    )
    subprocess.run(["mount", "--make-shared", str(folder)], check=True, timeout=waiting.limit(60))
    for target in targets:
        subprocess.run(
            ["mount", "-t", "tmpfs", "none", str(target)], check=True, timeout=waiting.limit(60)
        )
        (target / "part").mkdir()
        for number in range(FILES):
            (target / f"f{number}").write_text("x")
            (target / "part" / f"f{number}").write_text("x")
    try:
        yield folder
    finally:
        for target in [*targets, folder]:
            subprocess.run(["umount", "-l", str(target)], check=True, timeout=waiting.limit(60))


@pytest.fixture
def layer(area: Path) -> str:
    """Of g1, with three of the files; g2's has them all."""
    for name, count in (("g1", STORED), ("g2", FILES)):
        part = area / "store" / "coco" / name / "tree" / "part"
        part.mkdir(parents=True)
        for number in range(count):
            (part / f"f{number}").touch()
            (part.parent / f"f{number}").touch()
    return str(area / "store" / "coco" / "g1" / "tree")


def sampled(command: list[str], view: str, layer: str) -> hits.Ratio:
    """Of 200 opens and more that the program ``command`` makes."""
    found = hits.Hits()

    def enough() -> hits.Ratio | None:
        found.add(Opens(*users.opened(0, {view: layer}).get(view, (0, 0))), 0.0)
        ratio = found.ratio(Stage.OVERLAY, 0.0)
        return ratio if ratio is not None and ratio.opens >= 200 else None

    with subprocess.Popen(command) as process:
        try:
            ratio: hits.Ratio = until(enough, what="200 opens")
            return ratio
        finally:
            process.kill()


@real
@pytest.mark.parametrize(("place", "wanted"), [
    ("data", 0.3), ("data/part", 0.3), ("by-id/g1", 0.3), ("by-id/g2", 1.0),
])  # fmt: skip
def test_sample_counts_what_is_stored(views: Path, layer: str, place: str, wanted: float) -> None:
    command = [sys.executable, "-c", OPENS, f"{views}/coco/{place}"]
    ratio = sampled(command, f"{views}/coco/data", layer)
    assert ratio.low <= wanted <= ratio.high


@real
def test_opens_in_a_pod_count_also_below_a_part_of_the_view(
    area: Path, views: Path, layer: str
) -> None:
    with pod(area / "pod", views / "coco") as made:
        bound = area / "bound"
        bound.mkdir()
        script = 'mount --bind "$1/part" "$2" && exec "$3" -c "$4" "$2"'
        command = made.command("sh", "-c", script, "sh", str(made.data), str(bound),
                               sys.executable, OPENS)  # fmt: skip
        ratio = sampled(command, f"{views}/coco/data", layer)
        assert ratio.low <= 0.3 <= ratio.high
