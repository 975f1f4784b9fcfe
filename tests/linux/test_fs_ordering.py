"""Which file systems keep the order of changes, told on real ones."""

import os
import subprocess
from pathlib import Path

import pytest

from linux import fs_ordering
from tests.cache.test_space import disk

pytestmark = pytest.mark.real


def asked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return fs_ordering.keeps_order(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_a_journal_keeps_the_order(area: Path, fstype: str) -> None:
    with disk(area, fstype, 400 * 2**20) as ssd:
        assert asked(ssd)


def test_ext4_without_a_journal_and_what_is_no_disk_do_not(area: Path) -> None:
    image, target = area / "bare.img", area / "bare"
    with image.open("wb") as stream:
        stream.truncate(64 * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    target.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(target)], check=True)
    try:
        assert not asked(target)
    finally:
        subprocess.run(["umount", str(target)], check=True)
    assert not asked(Path("/proc"))
