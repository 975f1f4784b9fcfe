"""Rules about mapped devices. Pure; test_ceph.py has a real cluster."""

import dataclasses

import pytest

from ceph.protocol import ImageView, Watcher
from linux.rbd_sysfs import RbdClient, RbdImage
from tests.volumes.audit.world import (
    DEVICE,
    OURS,
    OWNER,
    THEIRS,
    device,
    image_view,
    judge,
    log_hit,
    only,
    place,
    scene,
    space,
    view,
    volume,
)
from volumes.audit.inventory import model
from volumes.audit.rules import mappings
from volumes.audit.rules.base import Outcome
from volumes.audit.types import Severity


def test_mapped_unmounted_means_no_use_at_all() -> None:
    used = (
        scene(host=(place(),)),
        scene(spaces=(space(),)),
        scene(devices=(device(active=("ext4",)),)),
        scene(devices=(device(holders=("dm-0",)),)),
        scene(devices=(device(partitions=("rbd0p1",)),)),
        scene(raw={"rbd0": ("/publish/x",)}),
    )
    assert [judge(mappings.mapped_unmounted, at).troubles for at in used] == [()] * 6
    assert "no record" in only(mappings.mapped_unmounted, scene()).message


def test_mapped_unmounted_names_a_loop_device_and_is_silent_about_processes() -> None:
    at = model.Owner(0, 0, "loop3", "", host=True)
    loop = model.User(at, DEVICE.number, ("/publish/x",), 0)
    trouble = only(mappings.mapped_unmounted, scene(users=(loop,)))
    assert "not used, except by loop device loop3 (kubelet has no record" in trouble.message
    assert "'losetup -d /dev/loop3'" in trouble.advice
    failing = scene(logs=(log_hit(image="rbd/csi-vol-1"),), users=(loop,))
    assert "held by: loop device loop3" in only(mappings.unmap_failing, failing).advice
    process = model.User(OWNER, DEVICE.number, ("device fd 3",), 99)
    assert judge(mappings.mapped_unmounted, scene(users=(loop, process))).troubles == ()


def test_unmap_failing_names_device_and_holder() -> None:
    rule = mappings.unmap_failing
    trouble = only(rule, scene(logs=(log_hit(image="rbd/csi-vol-1"),), spaces=(space(),)))
    assert trouble.device == "rbd0"
    assert "node_exporter" in trouble.advice
    assert judge(rule, scene(logs=(log_hit(image="rbd/another"),))).troubles == ()


def test_unmap_failing_without_a_name_is_the_only_leaked_device() -> None:
    """'rbd: unmap failed: (16)' names none."""
    rule = mappings.unmap_failing
    assert only(rule, scene(logs=(log_hit(),), spaces=(space(),))).device == "rbd0"
    old = log_hit(last=1000.0 - mappings.NAMELESS_SECONDS)
    assert judge(rule, scene(logs=(old,), spaces=(space(),))).troubles == ()


@pytest.mark.parametrize(
    ("second", "severity"),
    [
        ({"read_only": False}, Severity.CRITICAL),
        ({"read_only": True}, Severity.WARNING),
        ({"image": RbdImage("rbd", "csi-vol-1", snapshot="s", fsid="f1")}, None),
        ({"image": RbdImage("rbd", "csi-vol-1", namespace="n", fsid="f1")}, None),
        ({"image": RbdImage("rbd", "csi-vol-1", fsid="another")}, None),
    ],
)
def test_mapped_twice_is_one_image_with_a_writer(
    second: dict[str, object], severity: Severity | None
) -> None:
    twin = device(name="rbd1", number=(252, 16), **second)
    outcome = judge(mappings.mapped_twice, scene(devices=(DEVICE, twin)))
    assert [t.severity for t in outcome.troubles] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("here", "there", "severity"),
    [
        (False, False, Severity.CRITICAL),
        (True, False, Severity.WARNING),
        (False, True, Severity.WARNING),
        (True, True, None),
    ],
)
def test_mapped_twice_sees_the_other_mapping_under_any_name(
    here: bool, there: bool, severity: Severity | None
) -> None:
    """A second writer destroys a watched device, also one that volumes.audit.names leaves out."""
    twin = device(name="rbd-of-others", number=(252, 16), read_only=there)
    at = scene(devices=(device(read_only=here),), related=(twin,))
    outcome = judge(mappings.mapped_twice, at)
    assert [(t.subject, t.device, t.severity) for t in outcome.troubles] == (
        [("rbd0", "rbd0", severity)] if severity else []
    )


@pytest.mark.parametrize(
    ("recorded", "no_records", "told", "untold"),
    [
        (("rbd0",), "", ("rbd0: end its pod, kubelet unmaps it", "rbd1: kubelet has no"), ()),
        (("rbd0", "rbd1"), "", ("rbd0: end its pod", "rbd1: end its pod"), ("no record",)),
        ((), "no kubelet directory at /k", ("unmap nothing",), ("no record",)),
    ],
)
def test_mapped_twice_advises_to_unmap_only_what_kubelet_has_no_record_of(
    recorded: tuple[str, ...], no_records: str, told: tuple[str, ...], untold: tuple[str, ...]
) -> None:
    volumes = tuple(volume(device=name, handle=f"of-{name}") for name in recorded)
    twin = device(name="rbd1", number=(252, 16))
    at = scene(devices=(DEVICE, twin), volumes=volumes, no_records=no_records)
    (trouble,) = judge(mappings.mapped_twice, at).troubles
    for text in told:
        assert text in trouble.advice
    for text in untold:
        assert text not in trouble.advice


def test_mapped_twice_is_not_about_devices_that_are_left_out() -> None:
    """Both are there because of their client, not of what they show."""
    others = tuple(
        device(name=f"rbd{n}", number=(252, 16 * n), image=RbdImage("rbd", "another", fsid="f1"))
        for n in (1, 2)
    )
    assert judge(mappings.mapped_twice, scene(related=others)).troubles == ()


def test_mapped_elsewhere_knows_this_nodes_mappings_under_any_name() -> None:
    client = RbdClient("1", THEIRS.client, THEIRS.address)
    at = scene(
        related=(device(name="rbd1", number=(252, 16), client=client),),
        clusters={"c1": view(images=(image_view(OURS, THEIRS),))},
    )
    assert judge(mappings.mapped_elsewhere, at).troubles == ()


def test_mapped_elsewhere_is_another_writing_client() -> None:
    rule = mappings.mapped_elsewhere
    alone = scene(clusters={"c1": view(images=(image_view(OURS),))})
    assert judge(rule, alone).troubles == ()
    both = scene(clusters={"c1": view(images=(image_view(OURS, THEIRS),))})
    assert only(rule, both).severity is Severity.CRITICAL
    reader = device(read_only=True)
    reading = scene(devices=(reader,), clusters={"c1": view(images=(image_view(THEIRS),))})
    assert only(rule, reading).severity is Severity.WARNING
    lock = Watcher("client77", "10.0.0.9:0/9")
    locked = scene(clusters={"c1": view(images=(image_view(OURS, THEIRS, locks=(lock,)),))})
    assert "client77" in only(rule, locked).evidence["locks"]


def test_mapped_elsewhere_is_not_raw_block_mirroring_or_migration() -> None:
    rule = mappings.mapped_elsewhere
    both = image_view(OURS, THEIRS)
    raw = scene(raw={"rbd0": ("/publish/x",)}, clusters={"c1": view(images=(both,))})
    mirrored = dataclasses.replace(both, mirrored=True)
    migrating = dataclasses.replace(both, features=1 << 9)
    for at in (raw, *(scene(clusters={"c1": view(images=(i,))}) for i in (mirrored, migrating))):
        assert judge(rule, at).troubles == ()
    third = dataclasses.replace(mirrored, watchers=(*both.watchers, Watcher("client78", "x")))
    assert only(rule, scene(clusters={"c1": view(images=(third,))}))


def test_mapped_elsewhere_takes_a_silent_driver_for_one_watcher() -> None:
    nbd = device(name="nbd0", client=None)
    one = scene(devices=(nbd,), clusters={"c1": view(images=(image_view(THEIRS),))})
    assert judge(mappings.mapped_elsewhere, one).troubles == ()
    two = scene(devices=(nbd,), clusters={"c1": view(images=(image_view(OURS, THEIRS),))})
    assert len(judge(mappings.mapped_elsewhere, two).troubles) == 1


def test_mapped_elsewhere_expects_an_image_in_its_own_cluster_only() -> None:
    """Each cluster is asked about every image; DEVICE is of the cluster with fsid f1."""
    rule = mappings.mapped_elsewhere
    missing = ImageView("rbd", "", "csi-vol-1", error="RBD image not found")
    other = view(name="c2", fsid="f2", images=(missing,))
    at = scene(clusters={"c1": view(images=(image_view(OURS),)), "c2": other})
    assert judge(rule, at) == Outcome()
    trouble = only(rule, scene(clusters={"c2": other, "c1": view(images=(image_view(THEIRS),))}))
    assert trouble.evidence["cluster"] == "c1"
    lacking = scene(clusters={"c1": view(images=(missing,)), "c2": view(name="c2", fsid="f2")})
    assert "not found" in judge(rule, lacking).unknown


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("10.0.0.5:0/111", True),
        ("10.0.0.5:0/0", True),
        ("v1:10.0.0.5:0/111", True),
        ("10.0.0.5:0/112", False),
        ("10.0.0.55:0/0", False),
        ("10.0.0.6:0/111", False),
        ("cidr:10.0.0.0:0/24", True),
        ("cidr:10.0.0.5:0/32", True),
        ("cidr:10.0.1.0:0/24", False),
        ("10.0.0.0:0/24", False),  # one client with the nonce 24, not a range
        ("cidr:[fd00::]:0/64", False),
    ],
)
def test_blocklisted_client_matches_address_and_nonce(entry: str, found: bool) -> None:
    at = scene(clusters={"c1": view(blocklist=(entry,))})
    assert bool(judge(mappings.blocklisted_client, at).troubles) is found


@pytest.mark.parametrize(("entry", "found"), [("fd00::", True), ("fd01::", False)])
def test_blocklisted_client_matches_ipv6_ranges(entry: str, found: bool) -> None:
    ours = device(client=RbdClient("0", "client10", "[fd00::5]:0/111"))
    at = scene(devices=(ours,), clusters={"c1": view(blocklist=(f"cidr:[{entry}]:0/64",))})
    assert bool(judge(mappings.blocklisted_client, at).troubles) is found


def test_blocklisted_client_of_a_silent_driver_is_its_last_only_watcher() -> None:
    nbd = device(name="nbd0", client=None)
    watched_by = {("c1", "rbd", "", "csi-vol-1"): "10.0.0.7:0/5"}
    for entry, found in (("10.0.0.7:0/5", True), ("10.0.0.8:0/5", False)):
        clusters = {"c1": view(blocklist=(entry,))}
        at = scene(devices=(nbd,), clusters=clusters, watched_by=watched_by)
        assert bool(judge(mappings.blocklisted_client, at).troubles) is found


def test_read_only_claim_is_a_writable_mapping_with_read_only_mounts() -> None:
    rule = mappings.read_only_claim
    reading = (place(read_only=True),)
    assert only(rule, scene(host=reading)).device == "rbd0"
    assert judge(rule, scene(devices=(device(read_only=True),), host=reading)).troubles == ()
    assert judge(rule, scene(host=(place(),))).troubles == ()
    assert judge(rule, scene()).troubles == ()
