"""The plugin that distributes tests keeps a group in one worker."""

import os

import pytest


@pytest.mark.xdist_group("kept")
def test_worker_knows_group_of_test(request: pytest.FixtureRequest) -> None:
    """pytest-xdist writes it into the test's id; versions that do not fit each other ignore it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@kept")
