"""One API server for all tests of this folder, with the kinds of the agent and its rights.

Those that need the session's Ceph, too, have one of their own: they run in another group, perhaps
in the same worker, where this is set up once more.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube import planes
from tests.testbed import control_plane


@pytest.fixture(scope="package")
def plane(run_folder: Path) -> Iterator[control_plane.ControlPlane]:
    with planes.with_kinds(run_folder / control_plane.unique("plane")) as made:
        yield made
