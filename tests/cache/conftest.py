import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from linux import mountinfo, mounts
from tests.testbed import waiting


@pytest.fixture
def memory(area: Path) -> Iterator[Path]:
    """A file system of its own. What is mounted below it goes at the end."""
    target = area / "disk"
    target.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", str(target)], check=True, timeout=waiting.limit(60)
    )
    try:
        yield target
    finally:
        for mount in reversed(mountinfo.read()):
            if mount.target.startswith(f"{target}/"):
                mounts.detach(mount.target)
        subprocess.run(["umount", "-l", str(target)], check=False, timeout=waiting.limit(60))
