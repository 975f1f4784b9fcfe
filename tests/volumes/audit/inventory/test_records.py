"""kubelet's records and their mounts, by index: as many comparisons as there are volumes."""

import json
from pathlib import Path

from linux import blockdev, mountinfo
from volumes.audit.inventory import records


def _mount(number: int, target: str) -> mountinfo.Mount:
    line = f"{number} 1 252:{number} / {target} rw shared:1 - ext4 /dev/rbd{number} rw"
    return mountinfo.parse_line(line.encode())


def test_volumes_find_their_mounts_and_devices_among_thousands(tmp_path: Path) -> None:
    kubelet = f"{tmp_path}/kubelet"
    base = f"{kubelet}/plugins/kubernetes.io/csi/rbd.csi.ceph.com"
    mounts, devices = [], []
    for number in range(300):
        home = Path(f"{base}/{number:03}")
        home.mkdir(parents=True)
        home.joinpath("vol_data.json").write_text(json.dumps({"volumeHandle": f"h{number}"}))
        mounts.append(_mount(number, f"{home}/globalmount/{number}"))
        devices.append(blockdev.BlockDevice(f"rbd{number}", (252, number), "rbd", 1, False))
    # Neighbours in the order of names are not below.
    mounts += [_mount(n, f"{base}/001/globalmount{c}") for n, c in ((900, "-x"), (901, "0"))]
    found, gaps = records.volumes(kubelet, mounts, devices)
    assert not gaps
    assert [(v.handle, v.device, v.mounts) for v in found] == [
        (f"h{n}", f"rbd{n}", (f"{base}/{n:03}/globalmount/{n}",)) for n in range(300)
    ]


def test_mount_at_the_staging_directory_itself_counts(tmp_path: Path) -> None:
    assert records._at_or_below(["/a", "/a-b", "/a/b", "/a0", "/b"], "/a") == ["/a", "/a/b"]
    assert records._at_or_below(["/a/b"], "/a") == ["/a/b"]
    assert records._at_or_below(["/b"], "/a") == []
