"""The accident, replayed on real block devices: a probe fails, mkfs runs."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, formatters, grave, waiting
from tests.testbed.agent import Agent

pytestmark = pytest.mark.real

MiB = blockdev.MiB
SIZE = 320 * MiB
CHECKPOINT = "checkpoint.bin"


def _all(**what: Any) -> dict[str, Any]:
    return {"offset": 0, "length": SIZE, **what}


# name: (faults of reads, whether they are over when mkfs runs)
FAULTS: dict[str, tuple[dict[str, Any], bool]] = {
    "EIO everywhere, over when mkfs runs": (_all(errno=5), True),
    "ETIMEDOUT everywhere, over when mkfs runs": (_all(errno=110), True),
    "EIO in the first 4 KiB, over when mkfs runs": (
        {"offset": 0, "length": 4096, "errno": 5}, True,
    ),
    "EIO in the first MiB, over when mkfs runs": (
        {"offset": 0, "length": MiB, "errno": 5}, True,
    ),
    "EIO in the last MiB": ({"offset": SIZE - MiB, "length": MiB, "errno": 5}, False),
    "reads of zeros": (_all(zero=True), False),
    "primary superblock reads as zeros": ({"offset": 0, "length": 64 * 1024, "zero": True}, False),
}  # fmt: skip


@dataclass
class Original:
    image: Path
    checksum: str


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    """A volume with a checkpoint on it, per file system; copied for each case."""
    folder = tmp_path_factory.mktemp("originals")
    made = {}
    for fstype in ("ext4", "xfs"):
        image = folder / fstype
        blockdev.blank(image, SIZE)
        with blockdev.loop(image) as device:
            blockdev.run(f"mkfs.{fstype}", *formatters.KUBELET_MKFS[fstype], device)
            with blockdev.mounted(device, folder / "mnt") as target:
                data = target / CHECKPOINT
                data.write_bytes(os.urandom(8 * MiB))
                made[fstype] = Original(image, blockdev.sha256(data))
    return made


@pytest.fixture
def disk(
    originals: dict[str, Original], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[blockdev.FaultyDisk]:
    image = tmp_path / "image"
    original = originals[request.node.callspec.params["fstype"]].image
    blockdev.run("cp", "--sparse=always", str(original), str(image))
    with blockdev.faulty_disk(tmp_path / "disk", backing=image) as made:
        yield made


def _intact(disk: blockdev.FaultyDisk, folder: Path, original: Original) -> bool:
    """The checkpoint as it was, once the fault is over."""
    disk.clear()
    try:
        with blockdev.mounted(disk.device, folder / "look") as target:
            data = target / CHECKPOINT
            return data.exists() and blockdev.sha256(data) == original.checksum
    except RuntimeError:
        return False


def _replay(
    run: formatters.Run, way: Callable[..., formatters.Outcome], disk: blockdev.FaultyDisk,
    fstype: str, fault: str, folder: Path,
) -> formatters.Outcome:  # fmt: skip
    faults, over = FAULTS[fault]
    target = folder / "mnt"
    target.mkdir()
    # mkfs.xfs reads back what it writes and crashes over a fault that lasts.
    over = over or fstype == "xfs"
    disk.fault(faults)
    outcome = way(run, disk.device, fstype, str(target), disk.clear if over else lambda: None)
    if outcome.mounted:
        blockdev.run("umount", str(target))
    return outcome


def _plain(*command: str) -> Any:
    return blockdev.run(*command, check=False)


@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
@pytest.mark.parametrize("fault", FAULTS)
def test_accident_without_guard_loses_data(
    disk: blockdev.FaultyDisk, originals: dict[str, Original], fault: str, fstype: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    outcome = _replay(_plain, formatters.kubelet, disk, fstype, fault, tmp_path)

    assert (outcome.found, outcome.mkfs) == ("", 0)
    assert not _intact(disk, tmp_path, originals[fstype])


@pytest.mark.parametrize("way", [formatters.kubelet, formatters.ceph_csi])
@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
@pytest.mark.parametrize("fault", FAULTS)
def test_accident_with_guard_keeps_data(
    disk: blockdev.FaultyDisk, originals: dict[str, Original], fault: str, fstype: str,
    way: Callable[..., formatters.Outcome], where: cell.Cell, agent: Agent, tmp_path: Path,
) -> None:  # fmt: skip
    # The ledger knows a volume that was seen healthy once; 'reads of zeros' rests on that alone.
    waiting.until(
        lambda: (agent.guarded(disk.device).get("verdict") or {}).get("type") == fstype,
        20,
        "the healthy volume is in the ledger",
    )

    outcome = _replay(where.run, way, disk, fstype, fault, tmp_path)

    may_be_formatted = agent.guarded(disk.device)["may_be_formatted"]
    with grave.wrong_bytes():
        assert _intact(disk, tmp_path, originals[fstype])
    with grave.missing_denial():
        assert outcome.mkfs not in (0, None)
    assert "Operation not permitted" in outcome.mkfs_error
    assert outcome.found == "" and not may_be_formatted
