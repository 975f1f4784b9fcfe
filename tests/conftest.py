"""Fixtures of the whole suite: a folder on the real disk for each run, one cluster for a session."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.testbed import agent, ceph, leftovers

REPO = Path(__file__).parent.parent
BUILD = REPO / "build"

# A small shared machine: an example may be slow without being wrong.
hypothesis.settings.register_profile("suite", deadline=None, max_examples=150)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def run_folder() -> Iterator[Path]:
    """build/test-<pid>; gone at the end, with all that lives below it."""
    BUILD.mkdir(exist_ok=True)
    leftovers.clear_dead_runs(BUILD)
    folder = BUILD / f"test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        yield folder
    finally:
        leftovers.clear(folder)


@pytest.fixture
def area(run_folder: Path) -> Iterator[Path]:
    """A folder for one test on the real disk; processes, mounts and files go with the test."""
    number = len(list(run_folder.iterdir()))
    folder = run_folder / f"a{number}-{os.urandom(2).hex()}"
    folder.mkdir(mode=0o755)
    try:
        yield folder
    finally:
        leftovers.clear(folder)


@pytest.fixture
def node(area: Path) -> Iterator[agent.Agent]:
    """An agent with folders of its own, not started."""
    made = agent.Agent(area / "node")
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def cluster(run_folder: Path) -> Iterator[ceph.CephCluster]:
    """The session's Ceph: started when the first test asks for it."""
    made = ceph.CephCluster(run_folder / "ceph")
    made.start()
    try:
        yield made
    finally:
        made.stop()
