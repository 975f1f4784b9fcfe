"""The chart, installed once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, installed, kubernetes


@pytest.fixture(scope="package")
def node(kube: kubernetes.Kubernetes, run_folder: Path) -> Iterator[installed.Node]:
    with installed.installed(kube, run_folder / "node") as made:
        yield made


@pytest.fixture
def enforcing(node: installed.Node) -> Iterator[installed.Node]:
    """By an operator: agents keep to it until the settings are in force again."""
    node.set_mode("enforce")
    yield node
    node.set_mode("settings")


@pytest.fixture
def volume(area: Path) -> Iterator[str]:
    """A device with data, so that nothing may write to it."""
    with blockdev.loop(blockdev.blank(area / "volume.img", 64 * blockdev.MiB)) as device:
        blockdev.run("mkfs.ext4", "-q", device)
        yield device
