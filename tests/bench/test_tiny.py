"""Every benchmark runs as people start it, at a size that takes seconds: figures mean nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import scale
from tests.testbed import starts, waiting

_GROUPS = [(room, name) for room, named in bench.rooms([]).items() for name in named]


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("room", "name"), _GROUPS)
def test_benchmark_runs_at_a_tiny_size(room: str, name: str) -> None:
    # Without what pytest has Python load: nobody else has it.
    own = {
        key: each for key, each in os.environ.items() if key not in ("PYTHONPATH", starts.RECORD)
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", room, "--only", name, "--tiny"],
        env=own, capture_output=True, text=True, timeout=waiting.limit(50), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1].split()[0]) > 0  # programs may log before


@pytest.mark.real
def test_scale_runs_at_a_tiny_size(area: Path) -> None:
    found = scale.measure(area, 600, 150)
    assert found["files"] == 600
    assert found["coordinator_rss_mib"] > 0
