"""What a volume asks for and when it can be had: every reason is a sentence with what to do."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.errors
from cache.csi import volumes
from cache.views.view import Stage

FILLING = volumes.Shown(
    stage=Stage.OVERLAY, state="filling", why="", reached=True,
    files=200, bytes=1000, done_files=86, done_bytes=439,
)  # fmt: skip
COMPLETE = dataclasses.replace(
    FILLING, stage=Stage.STORE, state="complete", reached=False, done_files=200, done_bytes=1000
)


def wanted(layout: str = "direct", wait: str = "available") -> volumes.WantedVolume:
    return volumes.WantedVolume("coco", volumes.VolumeLayout(layout), volumes.Wait(wait))


def ask(attributes: dict[str, str], **more: Any) -> volumes.WantedVolume:
    flags = {"read_only": True, "block": False, "options": False, **more}
    return volumes.wanted(attributes, **flags)


def test_attributes_have_defaults_and_kubelet_adds_the_pod() -> None:
    found = ask(
        {
            "dataset": "coco",
            "csi.storage.k8s.io/pod.name": "train-0",
            "csi.storage.k8s.io/pod.namespace": "ml",
            "csi.storage.k8s.io/ephemeral": "true",
        }
    )
    assert found == volumes.WantedVolume(
        "coco", volumes.VolumeLayout.DIRECT, volumes.Wait.AVAILABLE, "ml/train-0"
    )


@pytest.mark.parametrize(
    ("attributes", "flags", "words"),
    [
        ({}, {}, "has no 'dataset'"),
        ({"dataset": "coco", "datset": "x"}, {}, "'datset', which does not exist"),
        ({"dataset": "coco", "layout": "flat"}, {}, "layout 'flat'; it is direct or parent"),
        ({"dataset": "coco", "wait": "ever"}, {}, "wait 'ever'; it is available or complete"),
        ({"dataset": "coco"}, {"read_only": False}, "readOnly is false"),
        ({"dataset": "coco"}, {"block": True}, "volumeMode: Filesystem"),
        ({"dataset": "coco"}, {"options": True}, "mountOptions or an fsType"),
    ],
)
def test_a_wrong_volume_is_refused_with_what_to_write(
    attributes: dict[str, str], flags: dict[str, bool], words: str
) -> None:
    with pytest.raises(kit.errors.SettingsError) as caught:
        ask(attributes, **flags)
    assert words in str(caught.value)


def test_a_long_wrong_value_does_not_fill_the_events() -> None:
    with pytest.raises(kit.errors.SettingsError) as caught:
        ask({"dataset": "coco", "layout": "x" * 5000})
    assert len(str(caught.value)) < 400


def test_complete_is_waited_for_with_the_progress() -> None:
    trouble = volumes.obstacle(FILLING, wanted(wait="complete"), last=True)
    assert isinstance(trouble, kit.errors.RefusedError)
    assert "not complete yet: 43 % (86 of 200 files" in str(trouble)
    assert volumes.obstacle(COMPLETE, wanted(wait="complete"), last=True) is None


def test_image_that_nothing_maps_is_waited_for_as_a_whole() -> None:
    """Its source answers, but nobody can read it before all is stored."""
    why = "this kernel has no RBD client"
    image = dataclasses.replace(FILLING, stage=Stage.NONE, block=True, late=why)
    trouble = volumes.obstacle(image, wanted(), last=True)
    assert isinstance(trouble, kit.errors.RefusedError)
    assert "43 % (86 of 200 chunks" in str(trouble) and why in str(trouble)
    given = dataclasses.replace(image, state="evicted")
    assert "nodeagent dataset show coco" in str(volumes.obstacle(given, wanted(), last=True))
    whole = dataclasses.replace(image, stage=Stage.STORE, state="complete")
    assert volumes.obstacle(whole, wanted(wait="complete"), last=True) is None


def test_image_that_is_mapped_is_given_at_once() -> None:
    """There is no overlay to wait for: one device shows copy and source, or the source stays."""
    mapped = dataclasses.replace(FILLING, stage=Stage.SOURCE, block=True)
    assert volumes.obstacle(mapped, wanted(), last=False) is None


def test_view_that_is_not_there_yet_is_no_trouble_of_the_source() -> None:
    early = dataclasses.replace(FILLING, stage=Stage.NONE)
    assert "its view is not mounted yet" in str(volumes.obstacle(early, wanted(), last=True))


def test_a_dataset_that_nobody_fills_says_so() -> None:
    cold = dataclasses.replace(FILLING, state="cold", stage=Stage.SOURCE)
    trouble = volumes.obstacle(cold, wanted(wait="complete"), last=True)
    assert "nodeagent dataset show coco" in str(trouble)


@pytest.mark.parametrize("stage", [Stage.NONE, Stage.SOURCE, Stage.OVERLAY])
def test_a_source_that_is_away_is_named_unless_all_is_stored(stage: Stage) -> None:
    away = dataclasses.replace(FILLING, stage=stage, reached=False, why="no monitor answers")
    trouble = volumes.obstacle(away, wanted(), last=True)
    assert isinstance(trouble, kit.errors.SourceError)
    assert "no monitor answers" in str(trouble)
    assert volumes.obstacle(COMPLETE, wanted(), last=True) is None


def test_a_direct_volume_waits_for_the_overlay_but_not_for_ever() -> None:
    early = dataclasses.replace(FILLING, stage=Stage.SOURCE, state="scanning")
    assert volumes.obstacle(early, wanted(), last=False) is not None
    assert volumes.obstacle(early, wanted(), last=True) is None
    assert volumes.obstacle(early, wanted("parent"), last=False) is None


@given(
    st.builds(
        volumes.Shown,
        stage=st.sampled_from(Stage),
        state=st.sampled_from(["filling", "cold", "removed", "complete", "waiting", "partial"]),
        why=st.just("because"),
        reached=st.booleans(),
        **{
            name: st.integers(0, 2**50)
            for name in ("files", "bytes", "done_files", "done_bytes")
        },
    ),
    st.builds(
        volumes.WantedVolume, st.just("coco"), st.sampled_from(volumes.VolumeLayout),
        st.sampled_from(volumes.Wait),
    ),
)  # fmt: skip
def test_what_is_given_can_be_read(shown: volumes.Shown, volume: volumes.WantedVolume) -> None:
    trouble = volumes.obstacle(shown, volume, last=True)
    if trouble is None:
        assert shown.stage is Stage.STORE or (
            shown.stage in (Stage.SOURCE, Stage.OVERLAY) and shown.reached
        )
        assert volume.wait is volumes.Wait.AVAILABLE or shown.stage is Stage.STORE
    else:
        assert trouble.thing == "dataset coco" and trouble.cause
    assert 0 <= shown.percent <= 100


def test_stats_are_the_datasets_own_size() -> None:
    found = volumes.stats("coco", FILLING, mounted=True)
    assert (found.bytes, found.inodes) == (1000, 200)
    assert not found.trouble and "43 % stored" in found.said
    assert volumes.stats("coco", FILLING, mounted=False).trouble
    assert "settings" in volumes.stats("coco", None, mounted=True).trouble
    image = dataclasses.replace(FILLING, block=True)
    assert volumes.stats("coco", image, mounted=True, held=(70, 5)).inodes == 5
    nobody = volumes.stats("coco", image, mounted=False)
    assert (nobody.bytes, nobody.inodes) == (1000, 0)  # a chunk is no file
    away = dataclasses.replace(FILLING, reached=False, why="gone")
    assert "gone" in volumes.stats("coco", away, mounted=True).trouble


@pytest.mark.parametrize(
    "path",
    ["/k/pods", "/k/pods/../x", "/k/pods//x", "/etc", "relative", "", "/k/podsx/a", "/k/pods/a/"],
)
def test_only_targets_below_the_pods_are_touched(path: str) -> None:
    with pytest.raises(kit.errors.SettingsError, match="does not lie below"):
        volumes.target_below(path, "/k/pods")
    assert volumes.target_below("/k/pods/u/volumes/x/mount", "/k/pods")


@pytest.mark.parametrize(
    ("fstype", "maps"),
    [("overlay", False), ("fuse.ceph-fuse", False), ("nfs4", False), ("lustre", False),
     ("ext4", True), ("xfs", True), ("ceph", True)],
)  # fmt: skip
def test_mounts_whose_users_a_runtime_can_map(fstype: str, maps: bool) -> None:
    assert volumes.maps(fstype) is maps


def test_folder_of_a_pod_is_found_from_its_volume() -> None:
    target = "/var/lib/kubelet/pods/7-uid/volumes/kubernetes.io~csi/coco/mount"
    assert str(volumes.pod_folder(target)) == "/var/lib/kubelet/pods/7-uid"
