"""What the logs said recently: frequency, forgetting, joining to devices. Pure."""

from tests.volumes.audit.world import place, scene, volume
from volumes.audit.inventory.model import Publish
from volumes.audit.logs import matcher, patterns

PATTERNS = patterns.built_in()


def by_id() -> dict[str, patterns.Pattern]:
    return {p.id: p for p in PATTERNS}


def raw(pattern: str, count: int = 1, **groups: str) -> matcher.Hit:
    return matcher.Hit(pattern, "s", "t", groups, count)


def test_frequent_waits_for_at_least() -> None:
    state = patterns.note(patterns.Hits(), [raw("ceph-session-flaps", 9)], by_id(), 100.0, 900.0)
    assert patterns.frequent(state, by_id()) == ()
    state = patterns.note(state, [raw("ceph-session-flaps", 1)], by_id(), 150.0, 900.0)
    assert len(patterns.frequent(state, by_id())) == 1
    late = patterns.note(state, [raw("ceph-session-flaps", 1)], by_id(), 250.0, 900.0)
    assert patterns.frequent(late, by_id()) == ()


def test_note_forgets_old_hits_and_keeps_at_most_300() -> None:
    state = patterns.note(patterns.Hits(), [raw("rbd-in-use", image="a/b")], by_id(), 100.0, 900.0)
    assert patterns.frequent(patterns.note(state, [], by_id(), 999.0, 900.0), by_id())
    assert not patterns.frequent(patterns.note(state, [], by_id(), 1001.0, 900.0), by_id())
    many = [raw("rbd-in-use", image=f"a/{n}") for n in range(1000)]
    state = patterns.note(patterns.Hits(), many, by_id(), 100.0, 900.0)
    assert len(state.recent) == patterns.MOST


def test_join_finds_the_device_by_volume_path_pod_or_image() -> None:
    uid = "1c6f2fcb-2a35-4a3c-a1f0-3d2fd3b0f1aa"
    staged = volume(publishes=(Publish(uid, "/p", "pvc-9", mounted=True, read_only=False),))
    inventory = scene(volumes=(staged,), host=(place("/mnt/x"),)).inventory
    state = patterns.note(
        patterns.Hits(),
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
    joined = patterns.join(patterns.frequent(state, by_id()), inventory)
    assert [hit.device for hit in joined] == ["rbd0", "rbd0", "rbd0", "rbd0", ""]
