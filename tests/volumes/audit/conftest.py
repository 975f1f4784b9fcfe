"""Fixtures of the audit's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.volumes.audit import stage as stages


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[stages.Stage]:
    with stages.staged(tmp_path) as stage:
        yield stage
