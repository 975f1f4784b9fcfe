"""Loop devices over files: they read as the disk below does."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from linux import loop, mountinfo
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


def test_a_loop_device_that_may_lie_on_a_network_file_system_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead server keeps the answer waiting. After its lazy unmount a path seems to lie elsewhere,
    where no such file is. That of a file's own mount is "/" then."""
    files = (
        "/net/a", "/data/b", "/c", "/dev/nbd0", "/cluster/d", "/container/e", "/f", "/data/g", "/",
    )  # fmt: skip
    gone = {"/f", "/data/g"}
    for number, file in enumerate(files):
        (tmp_path / f"loop{number}" / "loop").mkdir(parents=True)
        (tmp_path / f"loop{number}" / "loop/backing_file").write_text(f"{file}\n")
    table = (
        ("8:3", "/", "xfs"), ("0:2", "/net", "nfs4"), ("8:1", "/data", "ext4"),
        ("0:3", "/dev", "devtmpfs"), ("8:2", "/cluster", "gfs2"), ("0:4", "/container", "overlay"),
    )  # fmt: skip
    mounts = [
        mountinfo.parse_line(f"{number} 0 {device} / {target} rw - {kind} src rw".encode())
        for number, (device, target, kind) in enumerate(table)
    ]
    asked = []

    def node(number: int) -> contextlib.AbstractContextManager[str]:
        asked.append(files[number])
        raise OSError(errno.ENXIO, "No such device")

    monkeypatch.setattr(loop, "_BLOCK", tmp_path)
    monkeypatch.setattr(mountinfo, "of", lambda pid: mounts)
    monkeypatch.setattr(
        os.path, "lexists", lambda path: path.removeprefix("/proc/1/root") in {*files} - gone
    )
    monkeypatch.setattr(loop, "_node", node)
    assert loop.backings() == ([], ["loop0", "loop6", "loop7", "loop8"])
    assert asked == [file for file in files if file not in {"/net/a", "/", *gone}]
