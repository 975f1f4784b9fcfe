"""Block devices from sysfs."""

from pathlib import Path

import pytest

import kit.errors
from volumes import devices


def _sysfs(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


def test_identify_names_krbd_volume(tmp_path: Path) -> None:
    (tmp_path / "devices").write_text("Block devices:\n254 rbd\n")
    sysfs = _sysfs(tmp_path / "sys", {
        "class/block/rbd3/dev": "254:48", "class/block/rbd3/size": "131072",
        "class/block/rbd3/ro": "0", "class/block/rbd3/diskseq": "9",
        "bus/rbd/devices/3/cluster_fsid": "f10a1c15", "bus/rbd/devices/3/pool": "rbd",
        "bus/rbd/devices/3/pool_id": "3", "bus/rbd/devices/3/pool_ns": "team",
        "bus/rbd/devices/3/name": "vol", "bus/rbd/devices/3/image_id": "101db0894ea2",
        "bus/rbd/devices/3/current_snap": "-",
    })  # fmt: skip
    found = devices.identify("rbd3", sysfs, tmp_path)
    assert found is not None
    assert found.volume == "rbd:f10a1c15/3/team/101db0894ea2"
    assert (found.title, found.size, found.number) == ("rbd/team/vol", 2**26, (254, 48))
    _sysfs(sysfs, {"bus/rbd/devices/3/current_snap": "s1"})
    snapshot = devices.identify("rbd3", sysfs, tmp_path)
    assert snapshot is not None and snapshot.volume.endswith("@s1")
    assert devices.identify("rbd4", sysfs, tmp_path) is None


def test_by_path_refuses_other_files(tmp_path: Path) -> None:
    with pytest.raises(kit.errors.NotFoundError):
        devices.by_path(str(tmp_path / "none"))
    with pytest.raises(kit.errors.RefusedError, match="is no block device"):
        devices.by_path("/dev/null")
