"""Every benchmark runs, at a size that takes seconds; what it measures then means nothing."""

from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import harness, scale

_GROUPS = {
    f"{room}-{name}": group
    for room, named in bench.rooms([]).items()
    for name, group in named.items()
}


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", _GROUPS)
def test_benchmark_runs_at_a_tiny_size(name: str, area: Path) -> None:
    with harness.Workplace(area / "work", tiny=True) as place:
        entries = dict(_GROUPS[name](place))
    assert entries


@pytest.mark.real
def test_scale_runs_at_a_tiny_size(area: Path) -> None:
    found = scale.measure(area, 600, 150)
    assert found["files"] == 600
    assert found["coordinator_rss_mib"] > 0
