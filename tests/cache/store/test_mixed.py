"""What a view shows by a device of ours, as far as sysfs says it."""

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from cache.sources import rbd_child
from cache.store import mixed
from cache.views import view
from ceph.protocol import SnapshotFacts
from linux import devmapper, krbd, mountinfo, mounts
from linux.devmapper import Line

NAME = f"{mixed.PREFIX}0123456789ab-cdef01234567-00000001"


def mount(target: Path) -> mountinfo.Mount:
    line = f"36 35 253:7 / {target} ro,nosuid,nodev shared:1 - ext4 /dev/dm-7 ro"
    return mountinfo.parse_line(line.encode())


def stage(tmp_path: Path, shown: view.Shown, tree: int) -> view.Stage:
    image = tmp_path / "image"
    image.touch()
    return view.stage_of(
        str(tmp_path / "data"), str(image), [mount(tmp_path / "data")], shown, tree
    )


def shows(monkeypatch: pytest.MonkeyPatch, uuid: str, *below: str) -> None:
    monkeypatch.setattr(devmapper, "uuid_of", lambda _: uuid)
    monkeypatch.setattr(devmapper, "below", lambda _: list(below))


@pytest.mark.parametrize(
    ("below", "wanted"),
    [
        (("rbd0",), view.Stage.SOURCE),
        (("loop1", "rbd0"), view.Stage.OVERLAY),
        (("loop1",), view.Stage.STORE),
    ],
)
def test_a_restarted_agent_knows_what_the_table_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: tuple[str, ...], wanted: view.Stage
) -> None:
    shows(monkeypatch, NAME, *below)
    for layer in (0, 11):  # a killed agent may not have noted that it shows the copy
        assert stage(tmp_path, view.Shown("253:7", "/", layer), 11) is wanted


def test_a_device_that_was_not_published_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows(monkeypatch, NAME, "loop1", "rbd0")
    assert stage(tmp_path, view.Shown("253:6", "/", 11), 11) is view.Stage.UNKNOWN
    # A copy that is not the one of the store any more.
    assert stage(tmp_path, view.Shown("253:7", "/", 11), 12) is view.Stage.UNKNOWN
    assert stage(tmp_path, view.Shown("253:7", "/", 11), 0) is view.Stage.UNKNOWN


def test_a_logical_volume_is_not_ours_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows(monkeypatch, "LVM-QdXm", "sda1")
    assert mixed.shows((253, 7)) is None
    assert stage(tmp_path, view.Shown("253:7", "/", 0), 11) is view.Stage.SOURCE


V1, V2 = SnapshotFacts("c", 2, "i", 4, 2**20), SnapshotFacts("c", 2, "i", 5, 2**20)


def named(facts: SnapshotFacts, token: str) -> str:
    return f"{mixed.PREFIX}0123456789ab-{mixed._digest(mixed._ids(facts))}-{token}"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Line]]:
    """By name; 7:N are loop devices, 252:N mapped images."""
    found: dict[str, list[Line]] = {}

    def switch(name: str, lines: list[Line], _: float) -> None:
        found[name] = lines

    monkeypatch.setattr(mixed, "_kernel_name", lambda d: f"loop{d}" if d[:2] == "7:" else "rbd0")
    monkeypatch.setattr(
        devmapper, "names", lambda prefix: sorted(each for each in found if each.startswith(prefix))
    )
    monkeypatch.setattr(devmapper, "table", lambda name: found[name])
    monkeypatch.setattr(devmapper, "switch", switch)
    return found


@pytest.mark.parametrize("token", ["00000000", "ffffffff"])  # in whatever order they are found
def test_who_reads_an_earlier_snapshot_never_gets_blocks_of_another(
    tables: dict[str, list[Line]], token: str
) -> None:
    whole = [Line(0, 8, "7:1", 0)]
    old, new = named(V1, "77777777"), named(V2, token)
    tables |= {old: whole, new: [Line(0, 8, "252:0", 0)]}
    mixed.part(new)
    assert tables[old] == whole


def test_all_devices_of_one_snapshot_go_back_to_it(tables: dict[str, list[Line]]) -> None:
    source = [Line(0, 8, "252:0", 0)]
    complete, fresh = named(V1, "00000001"), named(V1, "00000002")
    tables |= {complete: [Line(0, 8, "7:1", 0)], fresh: source}
    mixed.part(fresh)
    assert tables == {complete: source, fresh: source}


def test_another_snapshot_by_the_same_name_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = mount(tmp_path)
    monkeypatch.setattr(devmapper, "uuid_of", lambda _: named(V1, "00000001"))
    assert not mixed.shows_another(there, V1)
    assert mixed.shows_another(there, V2)
    monkeypatch.setattr(devmapper, "uuid_of", lambda _: "")  # mounted without a device of ours
    monkeypatch.setattr(mixed, "snapshot_of", lambda _: mixed._ids(V1))
    assert not mixed.shows_another(there, V1)
    assert mixed.shows_another(there, V2)
    monkeypatch.setattr(mixed, "snapshot_of", lambda _: None)  # a loop device over a partition
    assert not mixed.shows_another(there, V2)


class Krbd:
    """Mappings by number; those in ``used`` cannot be unmapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mapped = {"0": "seq0"}
        self.used: set[str] = set()
        monkeypatch.setattr(krbd, "mapped", lambda _: list(self.mapped))
        monkeypatch.setattr(krbd, "diskseq", lambda number: self.mapped.get(number, ""))
        monkeypatch.setattr(krbd, "unmap", self.unmap)
        monkeypatch.setattr(krbd, "map_snapshot", self.map)
        monkeypatch.setattr(mounts, "attach", lambda *_: None)
        monkeypatch.setattr(rbd_child, "_mounted", lambda *_: os.open("/dev/null", os.O_RDONLY))
        monkeypatch.setattr(
            rbd_child, "_shows", lambda number, facts: facts.snap_id == 4 + int(number)
        )
        monkeypatch.setattr(rbd_child, "_UNMAP_SECONDS", 0.0)

    def unmap(self, number: str) -> None:
        if number in self.used:
            raise OSError(errno.EBUSY, "in use")
        del self.mapped[number]

    def map(self, *_: object) -> str:
        number = str(len(self.mapped))
        self.mapped[number] = f"seq{number}"
        return number


ACCESS = {
    "conf": "/c", "user": "admin", "pool": "p", "namespace": "", "image": "i", "snapshot": "v1",
    "partition": 0,
}  # fmt: skip


def mount_snapshot(folder: Path, facts: SnapshotFacts) -> None:
    asked = dataclasses.asdict(facts)
    assert rbd_child.mount_snapshot(str(folder), ("v2", ["h:1"]), "k", ACCESS, asked, "it") == ""


def test_mapping_that_jobs_still_read_is_unmapped_when_they_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Krbd(monkeypatch)
    kernel.mapped.clear()
    mount_snapshot(tmp_path, V1)
    mount_snapshot(tmp_path, V1)
    assert list(kernel.mapped) == ["0"], "the same snapshot is mapped once"
    kernel.used = {"0"}
    mount_snapshot(tmp_path, V2)  # made anew under the same name
    assert list(kernel.mapped) == ["0", "1"]
    with pytest.raises(OSError, match="in use"):
        rbd_child.unmap_ours(str(tmp_path))
    assert list(kernel.mapped) == ["0"], "nobody uses the other one"
    kernel.used = set()
    rbd_child.unmap_ours(str(tmp_path))
    assert not kernel.mapped
    assert not (tmp_path / rbd_child.MAPPED).exists()
