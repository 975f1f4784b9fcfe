"""When a store may be used: its disk is mounted where it was before, or where the settings say."""

from pathlib import Path

import pytest

import kit.errors
from cache.store import disk
from cache.views import view
from linux import mountinfo


@pytest.mark.parametrize(
    ("found", "wanted", "good"),
    [
        ("/", "/", True),
        ("/mnt/ssd", "/", True),
        ("/mnt/ssd", "/mnt/ssd", True),
        ("/mnt/ssd/part", "/mnt/ssd", True),
        ("/", "/mnt/ssd", False),
        ("/mnt", "/mnt/ssd", False),
        ("/mnt/ssd2", "/mnt/ssd", False),
    ],
)
def test_store_lies_on_the_disk_that_is_wanted(found: str, wanted: str, good: bool) -> None:
    assert (disk.problem(found, wanted) == "") is good


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the store lies: the last entry."""
    places = ["/mnt/ssd"]
    monkeypatch.setattr(disk, "place", lambda _: places[-1])
    return places


def test_first_disk_is_remembered(tmp_path: Path, place: list[str]) -> None:
    disk.check("/mnt/ssd/store", None, tmp_path)
    disk.remember("/mnt/ssd/store", tmp_path)
    place.append("/")
    with pytest.raises(kit.errors.HostError, match="no disk is mounted at /mnt/ssd"):
        disk.check("/mnt/ssd/store", None, tmp_path)
    disk.check("/mnt/ssd/store", Path("/"), tmp_path)  # the operator's word counts
    disk.check("/elsewhere/store", None, tmp_path)  # another store was never anywhere
    place.append("/mnt/ssd")
    disk.check("/mnt/ssd/store", None, tmp_path)


def test_setting_counts_at_the_first_start(tmp_path: Path, place: list[str]) -> None:
    place.append("/")
    with pytest.raises(kit.errors.HostError, match="mount the SSD at /mnt/ssd"):
        disk.check("/mnt/ssd/store", Path("/mnt/ssd"), tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"disk": 1}', '{"store": "/s"}'])
def test_after_a_damaged_memory_only_a_store_that_is_there_is_used(
    tmp_path: Path, place: list[str], text: str
) -> None:
    (tmp_path / "cache-disk.json").write_text(text)
    store = tmp_path / "s"
    store.mkdir()
    for _ in range(2):  # nothing was written meanwhile
        with pytest.raises(kit.errors.HostError, match="no store is there"):
            disk.check(str(store), None, tmp_path)
    disk.check(str(store), Path("/"), tmp_path)  # the operator's word counts
    (store / disk.MARKER).write_text('{"format": 1, "uuid": "u"}')
    disk.check(str(store), None, tmp_path)
    disk.remember(str(store), tmp_path)
    place.append("/")
    with pytest.raises(kit.errors.HostError, match="no disk is mounted at /mnt/ssd"):
        disk.check(str(store), None, tmp_path)


HOST = """\
20 1 253:0 / / rw shared:1 - ext4 /dev/vda rw
21 20 259:1 / /mnt/nvme rw shared:2 - xfs /dev/nvme0n1 rw
22 20 0:25 / /dev/shm rw - tmpfs tmpfs rw
23 20 0:90 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/c/rootfs rw - overlay overlay rw
24 20 253:9 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/d/rootfs rw - ext4 /dev/dm-9 rw
"""
STATE = "60 {root} 253:0 /var/lib/nodeagent /var/lib/nodeagent rw shared:7 - ext4 /dev/vda rw\n"
POD = "50 49 0:90 / / rw master:1 - overlay overlay rw\n" + STATE.format(root=50)
THIN = "51 49 253:9 / / rw master:1 - ext4 /dev/dm-9 rw\n" + STATE.format(root=51)  # devmapper
UNIT = "52 49 253:0 / / rw master:1 - ext4 /dev/vda rw\n"  # of systemd, with mounts of its own
ROOTED = "53 49 253:0 /srv/agent / rw master:1 - ext4 /dev/vda rw\n"  # RootDirectory=
NODE = POD + "61 50 0:91 / /var rw - overlay overlay rw\n"


@pytest.mark.parametrize(
    ("own", "store", "why"),
    [
        (POD, "/mnt/nvme/store", "own layer"),
        (THIN, "/mnt/nvme/store", "own layer"),
        (POD, "/var/lib/nodeagent/store", ""),
        (THIN, "/var/lib/nodeagent/store", ""),
        (NODE, "/var/other/store", ""),  # an overlay that somebody mounted: it may be a disk's
        (UNIT, "/mnt/nvme/store", ""),
        (ROOTED, "/mnt/nvme/store", ""),
        (HOST, "/mnt/nvme/store", ""),
        (HOST, "/dev/shm/store", "memory"),
    ],
)
def test_store_is_not_in_memory_nor_in_a_containers_layer(
    own: str, store: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {mountinfo.OWN: own, Path("/proc/1/mountinfo"): HOST}
    monkeypatch.setattr(
        mountinfo, "read", lambda path=mountinfo.OWN: mountinfo.parse(tables[path].encode())
    )
    if why:
        with pytest.raises(kit.errors.HostError, match=why):
            disk.check(store, Path("/"), tmp_path)
    else:
        disk.check(store, Path("/"), tmp_path)
    if why == "own layer":  # views there reach nobody
        with pytest.raises(kit.errors.HostError, match="neither the host nor pods"):
            view.prepare(store.replace("store", "views"))


def test_container_is_not_told_where_the_hosts_mounts_cannot_be_read() -> None:
    assert disk.fleeting("/mnt/nvme/store", mountinfo.parse(POD.encode()), []) == ""


def test_place_is_the_mount_point_of_a_path() -> None:
    assert disk.place("/proc/self") == "/proc"
    assert disk.place("/") == "/"
