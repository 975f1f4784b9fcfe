"""One API server for all tests of this folder, with the kinds of the agent and its rights."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube import planes
from tests.testbed import control_plane


@pytest.fixture(scope="package")
def plane(run_folder: Path) -> Iterator[control_plane.ControlPlane]:
    with planes.with_kinds(run_folder / "plane") as made:
        yield made
