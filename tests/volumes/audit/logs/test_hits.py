"""What the logs said recently: frequency, forgetting, joining to devices. Pure."""

import dataclasses
from typing import Any

import pytest

from linux.blockdev import DeviceLayer
from tests.volumes.audit.world import IMAGE, device, place, scene, volume
from volumes.audit.inventory.model import Inventory, Publish
from volumes.audit.logs import matcher, patterns
from volumes.audit.types import Severity

PATTERNS = patterns.built_in()


def by_id() -> dict[str, patterns.Pattern]:
    return {p.id: p for p in PATTERNS}


def raw(pattern: str, count: int = 1, **groups: str) -> matcher.Hit:
    return matcher.Hit(pattern, "s", "t", groups, count)


def test_frequent_waits_for_at_least() -> None:
    state = patterns.note(
        patterns.PatternHits(), [raw("ceph-session-flaps", 9)], by_id(), 100.0, 900.0
    )
    assert patterns.frequent(state, by_id()) == ()
    state = patterns.note(state, [raw("ceph-session-flaps", 1)], by_id(), 150.0, 900.0)
    assert len(patterns.frequent(state, by_id())) == 1
    late = patterns.note(state, [raw("ceph-session-flaps", 1)], by_id(), 250.0, 900.0)
    assert patterns.frequent(late, by_id()) == ()


def test_note_forgets_old_hits() -> None:
    state = patterns.note(
        patterns.PatternHits(), [raw("rbd-in-use", image="a/b")], by_id(), 100.0, 900.0
    )
    assert patterns.frequent(patterns.note(state, [], by_id(), 999.0, 900.0), by_id())
    assert not patterns.frequent(patterns.note(state, [], by_id(), 1001.0, 900.0), by_id())


def flood(source: str, pattern: str = "rbd-in-use") -> list[matcher.Hit]:
    return [matcher.Hit(pattern, source, "t", {"image": f"a/{n}"}) for n in range(400)]


def test_a_flood_of_one_log_hides_no_line_of_another() -> None:
    kernel = [
        matcher.Hit("block-io-error", "kernel", "t", {"device": "rbd0"}),
        matcher.Hit("ext4-error", "kernel", "t", {"device": "rbd0"}),
    ]
    state = patterns.note(patterns.PatternHits(), kernel, by_id(), 100.0, 900.0)
    for now in (101.0, 102.0):
        found = [*flood("ceph-csi"), *flood("kubelet")]
        state = patterns.note(state, found, by_id(), now, 900.0)
    kept = [hit.source for hit in patterns.frequent(state, by_id())]
    assert {hit.pattern for hit in state.recent.values() if hit.source == "kernel"} == {
        "block-io-error", "ext4-error",
    }  # fmt: skip
    assert kept.count("ceph-csi") == kept.count("kubelet") == patterns.quota("kubelet")
    assert set(state.flooding) == {"ceph-csi", "kubelet"}


def test_a_flooding_log_keeps_the_graver_lines_then_the_first() -> None:
    state = patterns.note(patterns.PatternHits(), flood("kubelet"), by_id(), 100.0, 900.0)
    before = set(state.recent)
    state = patterns.note(state, flood("kubelet")[::-1], by_id(), 101.0, 900.0)
    assert set(state.recent) == before  # no finding clears and none is raised
    grave = by_id()["rbd-in-use"].model_copy(update={"id": "grave", "severity": Severity.CRITICAL})
    known = by_id() | {"grave": grave}
    state = patterns.note(state, [matcher.Hit("grave", "kubelet", "t", {})], known, 102.0, 900.0)
    assert len(state.recent) == patterns.quota("kubelet")
    assert "grave" in {hit.pattern for hit in patterns.frequent(state, known)}


def test_a_log_that_stopped_flooding_is_no_longer_one_after_hold() -> None:
    state = patterns.note(patterns.PatternHits(), flood("kubelet"), by_id(), 100.0, 900.0)
    assert patterns.note(state, [], by_id(), 999.0, 900.0).flooding
    assert not patterns.note(state, [], by_id(), 1000.0, 900.0).flooding


def test_join_finds_the_device_by_volume_path_pod_or_image() -> None:
    uid = "1c6f2fcb-2a35-4a3c-a1f0-3d2fd3b0f1aa"
    staged = volume(publishes=(Publish(uid, "/p", "pvc-9", mounted=True, read_only=False),))
    inventory = scene(volumes=(staged,), host=(place("/mnt/x"),)).inventory
    state = patterns.note(
        patterns.PatternHits(),
        [
            raw("unmap-failed", volume="h1"),
            raw("target-busy", path="/mnt/x"),
            raw("orphaned-pod", pod=uid),
            raw("rbd-in-use", image="rbd/csi-vol-1"),
            raw("rbd-in-use", image="rbd/another"),
        ],
        by_id(),
        100.0,
        900.0,
    )
    joined = patterns.join(patterns.frequent(state, by_id()), inventory, ("rbd",))
    assert [hit.device for hit in joined] == ["rbd0", "rbd0", "rbd0", "rbd0", ""]


def test_a_line_is_about_the_volume_that_it_names_before_one_of_its_pod() -> None:
    """Another volume of that pod may come first."""
    uid = "1c6f2fcb-2a35-4a3c-a1f0-3d2fd3b0f1aa"
    pod = (Publish(uid, "/p", "pvc-9", mounted=True, read_only=False),)
    its = dataclasses.replace(IMAGE, name="csi-vol-2")
    inventory = scene(
        volumes=(
            volume(publishes=pod, device="rbd1", image=its),
            volume(publishes=pod, handle="h2", image=None),
        ),
        host=(place("/mnt/x"),),
    ).inventory
    lines = [
        raw("unmap-failed", volume="h2", pod=uid), raw("target-busy", path="/mnt/x", pod=uid),
        raw("rbd-in-use", image="rbd/csi-vol-1", pod=uid), raw("orphaned-pod", pod=uid),
    ]  # fmt: skip
    state = patterns.note(patterns.PatternHits(), lines, by_id(), 100.0, 900.0)
    joined = patterns.join(patterns.frequent(state, by_id()), inventory, ("rbd",))
    assert [hit.device for hit in joined] == ["rbd0", "rbd0", "rbd0", "rbd1"]


ALIVE = device(active=("xfs",))


def later(state: patterns.PatternHits, now: float, *, mounted: bool) -> patterns.PatternHits:
    """A look at ``now`` that saw the device's file system, or none."""
    devices = (ALIVE,) if mounted else (device(),)
    state = patterns.unmounted(state, scene(devices=devices, taken=now).inventory)
    return patterns.note(state, [], by_id(), now, 900.0)


def test_what_the_kernel_says_once_lasts_until_the_device_is_unmounted() -> None:
    """A file system that has stopped says nothing more (ceph-csi#4712, #5439)."""
    state = patterns.note(
        patterns.PatternHits(), [raw("xfs-shutdown", device="rbd0")], by_id(), 100.0, 900.0
    )
    for now in (800.0, 2000.0, 90_000.0):
        state = later(state, now, mounted=True)
        assert [hit.pattern for hit in patterns.frequent(state, by_id())] == ["xfs-shutdown"]
    state = later(state, 90_100.0, mounted=False)
    state = later(state, 90_200.0, mounted=True)  # somebody mounted it anew
    assert patterns.frequent(state, by_id()) == ()


def test_it_is_remembered_as_long_as_others_after_an_unmount() -> None:
    state = patterns.note(
        patterns.PatternHits(), [raw("xfs-shutdown", device="rbd0")], by_id(), 100.0, 900.0
    )
    state = later(later(state, 200.0, mounted=False), 300.0, mounted=True)
    assert patterns.frequent(state, by_id())
    assert not patterns.frequent(later(state, 1001.0, mounted=True), by_id())
    # A line after the new mount is about that.
    again = [raw("xfs-shutdown", device="rbd0")]
    state = patterns.note(state, again, by_id(), 400.0, 900.0)
    assert patterns.frequent(later(state, 5000.0, mounted=True), by_id())


def test_an_earlier_look_says_nothing_of_a_later_line() -> None:
    before = scene(devices=(device(),), taken=50.0).inventory  # not mounted yet
    state = patterns.note(
        patterns.PatternHits(), [raw("xfs-shutdown", device="rbd0")], by_id(), 100.0, 900.0
    )
    state = patterns.unmounted(state, before)
    assert patterns.frequent(later(state, 5000.0, mounted=True), by_id())


def mounted_at(now: float, **changes: Any) -> Inventory:
    """A look that saw a file system on a device, and on the mapping upon it."""
    upon = (DeviceLayer("dm-3", (253, 3), ("xfs",)),)
    made = scene(devices=(device(active=("xfs",), layers=upon, **changes),), taken=now).inventory
    assert made is not None
    return made


OTHER_IMAGE = {"image": dataclasses.replace(IMAGE, fsid="f2", image_id="9")}


@pytest.mark.parametrize("name", ["rbd0", "dm-3"])
@pytest.mark.parametrize(("changes", "expected"), [
    ({"diskseq": 99}, False),
    ({"number": (252, 16)}, False),
    (OTHER_IMAGE, False),
    ({"size": 2 << 30}, True),  # it was grown
])  # fmt: skip
def test_what_lasts_ends_with_the_attachment_of_its_device(
    name: str, changes: dict[str, Any], expected: bool
) -> None:
    """The name goes to another medium at once: unmounted, unmapped, mapped and mounted between two
    looks."""
    line = [raw("xfs-shutdown", device=name)]
    state = patterns.note(patterns.PatternHits(), line, by_id(), 100.0, 900.0)
    # The look before the line may have seen the medium before.
    for looked in (mounted_at(99.0, diskseq=6), mounted_at(101.0), mounted_at(5000.0, **changes)):
        state = patterns.note(patterns.unmounted(state, looked), [], by_id(), 200.0, 900.0)
    for now in (6000.0, 90_000.0):  # and once it is over it stays so
        state = patterns.note(patterns.unmounted(state, looked), [], by_id(), now, 900.0)
        assert bool(patterns.frequent(state, by_id())) is expected


def test_a_later_line_is_about_the_new_attachment() -> None:
    line = [raw("xfs-shutdown", device="rbd0")]
    state = patterns.note(patterns.PatternHits(), line, by_id(), 100.0, 900.0)
    state = patterns.unmounted(state, mounted_at(101.0))
    state = patterns.note(state, line, by_id(), 200.0, 900.0)
    new = mounted_at(201.0, diskseq=99)
    state = patterns.note(patterns.unmounted(state, new), [], by_id(), 5000.0, 900.0)
    assert patterns.frequent(state, by_id())


def test_other_lines_end_as_before() -> None:
    state = patterns.note(
        patterns.PatternHits(), [raw("block-io-error", device="rbd0")], by_id(), 100.0, 900.0
    )
    assert not patterns.frequent(later(state, 1001.0, mounted=True), by_id())


def test_lines_about_a_mapping_are_about_the_volume_below_it() -> None:
    """Of an encrypted volume the kernel names the mapping; of others' mappings nothing is said."""
    encrypted = device(layers=(DeviceLayer("dm-3", (253, 3), ("ext4",)),))
    inventory = scene(devices=(encrypted,)).inventory
    found = [raw("ext4-error", device=name) for name in ("dm-3", "dm-4", "rbd0")]
    state = patterns.note(patterns.PatternHits(), found, by_id(), 100.0, 900.0)
    hits = patterns.frequent(state, by_id())
    joined = patterns.join(hits, inventory, ("rbd",))
    assert [hit.device for hit in joined] == ["rbd0", "rbd0"]
    assert len(patterns.join(hits, inventory, ("rbd", "device-mapper"))) == 3
    assert [hit.device for hit in patterns.join(hits, None, ("rbd",))] == ["rbd0"]
