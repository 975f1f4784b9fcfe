"""The CephFS source without a cluster: its mounts, what it tells the kernel, its errors."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cache.settings import CephfsSource, DatasetSettings
from cache.sources import cephfs
from ceph.monitors import Address
from linux import mountinfo, mounts


def source(folder: Path, **more: Any) -> cephfs.Cephfs:
    settings = CephfsSource(
        kind="cephfs", monitors=("127.0.0.1:1",), path="/a", secret_file=folder / "secret", **more
    )
    freshness = "snapshot" if settings.snapshot else "frozen"
    dataset = DatasetSettings(name="a", freshness=freshness, source=settings)
    return cephfs.Cephfs(dataset, settings, folder / "sources" / "a")


@pytest.mark.parametrize(
    ("addresses", "expected", "mode"),
    [
        ([("v2", "10.0.0.1", 3300), ("v2", "::1", 3300)], "10.0.0.1:3300,[::1]:3300:/a", True),
        ([("v2", "10.0.0.1", 3300), ("v1", "10.0.0.1", 6789)], "10.0.0.1:6789:/a", False),
    ],
)
def test_mount_kernel_speaks_one_protocol(
    monkeypatch: pytest.MonkeyPatch, addresses: list[Any], expected: str, mode: bool
) -> None:
    given: list[Any] = []

    def new_filesystem(*arguments: Any) -> int:
        given.append(arguments)
        return os.open("/", os.O_RDONLY)

    monkeypatch.setattr(mounts, "new_filesystem", new_filesystem)
    monkeypatch.setattr(mounts, "attach", lambda *_: None)
    # As it arrives in the child process.
    arrived = json.loads(json.dumps([Address(*each) for each in addresses]))
    cephfs.mount_kernel("/target", arrived, "fs", "/a", "user", "secret")
    ((fstype, strings, *_),) = given
    assert fstype == "ceph"
    assert strings["source"] == expected
    assert ("ms_mode" in strings) == mode


@pytest.mark.parametrize(
    ("number", "cause"),
    [("13", "is refused"), ("2", "does not exist"), ("110", "no monitor of"), ("", "no reason")],
)
def test_explain_names_the_cause(tmp_path: Path, number: str, cause: str) -> None:
    error = source(tmp_path)._explain(number)
    assert cause in error.cause
    assert error.remedy.endswith("it is tried again")


def test_native_access_only_for_snapshots(tmp_path: Path) -> None:
    assert not source(tmp_path).immutable
    snapshot = source(tmp_path, snapshot="v1")
    assert snapshot.immutable
    assert snapshot._access().root == "/a/.snap/v1"


@pytest.mark.real
async def test_release_unmounts_stacked_mounts(area: Path) -> None:
    made = source(area)
    target = area / "sources" / "a" / "mount"
    target.mkdir(parents=True)
    for _ in range(2):
        mounts.mount(str(area), target, None, mounts.MS_BIND)
    assert len(mountinfo.at(str(target), mountinfo.read())) == 2
    await made.release()
    assert mountinfo.at(str(target), mountinfo.read()) == []
    assert not target.parent.exists()
