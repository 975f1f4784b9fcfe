"""The chart, installed once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import installed, kubernetes


@pytest.fixture(scope="package")
def node(kube: kubernetes.Kubernetes, run_folder: Path) -> Iterator[installed.Node]:
    with installed.installed(kube, run_folder / "node") as made:
        yield made
