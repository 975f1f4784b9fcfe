"""One API server for all tests of this folder, with the kinds of the agent and its rights.

Those that need the session's Ceph, too, run in the worker that has it, beside one of their own.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube import planes
from tests.testbed import control_plane


@pytest.fixture(scope="package")
def plane(run_folder: Path) -> Iterator[control_plane.ControlPlane]:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    with planes.with_kinds(run_folder / f"plane{worker}") as made:
        yield made
