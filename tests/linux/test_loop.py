"""Loop devices over files: they read as the disk below does."""

from pathlib import Path

import pytest

from linux import loop
from tests.testbed import blockdev

MIB = 2**20


def read_ahead(device: str) -> Path:
    return Path(f"/sys/block/{Path(device).name}/queue/read_ahead_kb")


@pytest.mark.real
@pytest.mark.parametrize("wanted", [768, 64])
def test_device_reads_ahead_as_the_disk_below(area: Path, wanted: int) -> None:
    """A free device keeps what was set on it before, so each value shows that this one is set."""
    with blockdev.loop(blockdev.blank(area / "disk", 64 * MIB)) as disk:
        blockdev.run("mkfs.ext4", "-q", disk)
        read_ahead(disk).write_text(str(wanted))
        with blockdev.mounted(disk, area / "ssd") as ssd:
            file = blockdev.blank(ssd / "copy", 4 * MIB)
            with loop.attached(str(file)) as device:
                assert read_ahead(device).read_text() == f"{wanted}\n"
