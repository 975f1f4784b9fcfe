"""What NodeStorage shows of a dataset."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cache import room


@pytest.mark.parametrize(
    ("scrubbed", "shown"), [(0.0, ""), (1_800_000_000.4, "2027-01-15T08:00:00Z")]
)
def test_the_end_of_the_last_whole_scrub(scrubbed: float, shown: str) -> None:
    dataset = SimpleNamespace(
        name="coco",
        folder="/ssd/coco/abc",
        stage="store",
        gave_way=False,
        figures=SimpleNamespace(bytes=100, done_bytes=100),
        generation=SimpleNamespace(state="complete", scrubbed=scrubbed),
        state=lambda: "complete",
    )
    (found,) = room.report(cast(Any, SimpleNamespace(datasets={"coco": dataset})))
    assert (found.name, found.percent, found.scrubbed) == ("coco", 100, shown)
    assert found.model_dump(by_alias=True)["scrubbed"] == shown
