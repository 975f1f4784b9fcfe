"""A file system of its own for a test."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmpfs(area: Path) -> Iterator[Path]:
    made = area / "mount"
    made.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(made)], check=True)
    yield made
    subprocess.run(["umount", "-l", str(made)], check=True)
