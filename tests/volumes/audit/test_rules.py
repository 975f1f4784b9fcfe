"""Every rule: what it finds, and what it must not find. Pure."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kit.findings import Finding, Severity
from linux.syscalls import ClockState
from tests.volumes.audit.world import (
    DEVICE,
    IMAGE,
    OWNER,
    device,
    judge,
    only,
    place,
    scene,
    space,
    view,
    volume,
)
from volumes.actions import plan
from volumes.audit import clusters
from volumes.audit.settings import ClusterSettings
from volumes.inventory import ceph, model
from volumes.inventory.cluster import (
    Check,
    FeatureGroup,
    ImageView,
    Lock,
    NetworkPath,
    VersionCount,
    Watcher,
)
from volumes.inventory.model import Client, Image, Layer, Publish
from volumes.rules import (
    attachment,
    blocklisted_client,
    busy_mount,
    cluster_health,
    guard_state,
    leaked_mount,
    mapped_elsewhere,
    mapped_twice,
    mapped_unmounted,
    mount_options,
    network,
    propagation,
    read_only_claim,
    registry,
    unmap_failing,
    version_skew,
)
from volumes.rules.base import (
    Claim,
    GuardView,
    LedgerMismatch,
    LogHit,
    Outcome,
    Rule,
    Scene,
    Trouble,
    cluster_of,
)

COPY = "/host/var/lib/kubelet/plugins/kubernetes.io/csi/rbd.csi.ceph.com/1/globalmount"
USER = model.User(OWNER, DEVICE.number, ("fd 3",), 1)
CLUSTER = {"name": "c1", "monitors": ["10.0.0.1:6789"], "secret_file": "/k"}


def hit(**changes: object) -> LogHit:
    fields: dict[str, object] = {
        "pattern": "unmap-failed",
        "severity": Severity.WARNING,
        "source": "kubelet",
        "text": "rbd: unmap failed: (16) Device or resource busy",
        "first": 900.0,
        "last": 990.0,
        "count": 3,
        "meaning": "m",
        "advice": "a",
        "hint": "unmap-failed",
    }
    return LogHit(**(fields | changes))  # type: ignore[arg-type]


def test_a_mounted_device_is_not_leaked_whatever_others_do() -> None:
    at = scene(devices=(device(active=("ext4",)),), host=(place(),), spaces=(space(),))
    assert judge(leaked_mount.RULE, at).troubles == ()


def detaching(at: Scene, trouble: Trouble) -> plan.Plan:
    """What the action would do about a leaked mount."""
    finding = Finding(
        f"leaked-mount/rbd0/{trouble.key}", "leaked-mount", Severity.CRITICAL, "rbd0",
        trouble.message, trouble.advice, {**trouble.evidence, "device": "rbd0"},
    )  # fmt: skip
    assert at.inventory is not None
    (step,) = plan.plans([finding], at.inventory, None, {}, 0.0)
    return step


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (space(place("/data", namespace=99, propagation="private")), "end the container instead"),
        (space(place(COPY, namespace=99, propagation="slave")), "find the one they come from"),
        (
            space(
                place(COPY, namespace=99, propagation="private"),
                owners=(dataclasses.replace(OWNER, pod_uid="uid"),),
            ),
            "pod uid still owns the volume",
        ),
    ],
)
def test_the_advice_never_says_to_do_what_the_action_refuses(held: model.Space, said: str) -> None:
    published = volume(publishes=(Publish("uid", "/p", "pv", False, False),))
    at = scene(spaces=(held,), volumes=(published,), kubelet=place("/", device=(8, 1)))
    trouble = only(leaked_mount.RULE, at)
    assert said in trouble.advice
    assert "volume act" not in trouble.advice and "umount" not in trouble.advice
    assert detaching(at, trouble).refusal


def test_without_kubelets_directory_nothing_is_detached_or_unmapped() -> None:
    held = space(place(COPY, namespace=99, propagation="private"))
    at = scene(spaces=(held,))
    step = detaching(at, only(leaked_mount.RULE, at))
    assert "kubelet's directory is not seen" in step.refusal
    seen = scene(spaces=(held,), kubelet=place("/", device=(8, 1)))
    assert detaching(seen, only(leaked_mount.RULE, seen)).refusal == ""


@pytest.mark.parametrize(
    ("changes", "refused"),
    [({}, False), ({"raw": ("/pods/x/dev",)}, True), ({"holders": ("dm-0",)}, True)],
)
def test_what_is_in_use_is_not_flagged_read_only(changes: dict[str, Any], refused: bool) -> None:
    at = scene(devices=(device(**changes),))
    assert at.inventory is not None
    (step,) = plan.plans([], at.inventory, GuardView(True, unreadable=("rbd0",)), {}, 0.0)
    assert bool(step.refusal) is refused


PARTITIONED = device(
    active=("ext4",),
    holders=("rbd0p1", "rbd0p2"),
    layers=(Layer("rbd0p1", (259, 1), ("ext4",)), Layer("rbd0p2", (259, 2), ("ext4",))),
)


def test_a_layer_that_the_host_does_not_have_is_leaked_and_one_that_it_has_is_not() -> None:
    first = place("/mnt/1", device=(259, 1))
    copies = space(
        place("/host/1", device=(259, 1), propagation="private"),
        place("/host/2", device=(259, 2), propagation="private"),
    )
    both = (first, place("/mnt/2", device=(259, 2)))
    mounted = scene(devices=(PARTITIONED,), host=both, spaces=(copies,))
    assert judge(leaked_mount.RULE, mounted).troubles == ()
    assert judge(mapped_unmounted.RULE, mounted).troubles == ()
    leaked = scene(devices=(PARTITIONED,), host=(first,), spaces=(copies,))
    trouble = only(leaked_mount.RULE, leaked)
    assert (trouble.device, trouble.evidence["on"]) == ("rbd0", "rbd0p2")
    assert trouble.evidence["targets"] == "/host/2"
    assert only(leaked_mount.RULE, scene(devices=(PARTITIONED,), host=(first,))).key == "nobody"


def test_a_users_file_on_a_layer_is_the_devices() -> None:
    user = model.User(space().owners[0], (259, 2), ("fd 3",), 99)
    host = (place("/mnt/1", device=(259, 1)),)
    at = scene(devices=(PARTITIONED,), host=host, users=(user,))
    assert only(leaked_mount.RULE, at).pid == 42
    elsewhere = model.User(space().owners[0], (259, 1), ("fd 3",), 99)
    at = scene(devices=(PARTITIONED,), host=host, users=(elsewhere,))
    assert only(leaked_mount.RULE, at).key == "nobody"  # it uses what the host has mounted


def test_a_copy_is_unmounted_by_the_number_of_its_mount() -> None:
    target = "/host/plugins/kubernetes.io/csi/x/globalmount"
    copies = space(
        place("/host/1", device=(259, 1), propagation="private"),
        place(target, device=(259, 2), propagation="private"),
    )
    host = (place("/mnt/1", device=(259, 1)),)
    inventory = scene(
        devices=(PARTITIONED,), host=host, spaces=(copies,), kubelet=place("/", device=(8, 1))
    ).inventory
    assert inventory is not None
    finding = Finding(
        "leaked-mount/rbd0/mnt-99",
        "leaked-mount",
        Severity.CRITICAL,
        *("rbd0", "m", "a"),
        evidence={"device": "rbd0", "kind": "mount", "namespace": "99"},
    )
    (step,) = plan.plans([finding], inventory, None, {}, 60.0)
    assert step.refusal == ""
    assert step.arguments["copies"] == [[259, 2, target]]
    again = dataclasses.replace(inventory, host=(*host, place("/mnt/2", device=(259, 2))))
    (step,) = plan.plans([finding], again, None, {}, 60.0)
    assert "the host has it mounted again" in step.refusal


def test_a_btrfs_whose_mounts_have_another_number_is_neither_leaked_nor_idle() -> None:
    at = scene(devices=(device(active=("btrfs",)),), host=(place(device=(0, 44), fstype="btrfs"),))
    assert judge(leaked_mount.RULE, at).troubles == ()
    assert judge(mapped_unmounted.RULE, at).troubles == ()


def test_an_active_device_without_any_holder_waits_for_the_write_back() -> None:
    trouble = only(leaked_mount.RULE, scene(devices=(device(active=("ext4",)),)))
    assert trouble.patience == leaked_mount.UNEXPLAINED_SECONDS
    assert trouble.severity is Severity.WARNING


@pytest.mark.parametrize("rule", [leaked_mount.RULE, propagation.RULE])
def test_namespaces_that_could_not_be_looked_at_make_nothing_found_unknown(rule: Rule) -> None:
    kubelet = place("/", device=(8, 1))
    gaps = ("mount namespace 7: Operation not permitted",)
    assert judge(rule, scene(kubelet=kubelet)) == Outcome()
    assert "namespace 7" in judge(rule, scene(kubelet=kubelet, space_gaps=gaps)).unknown
    private = space(place("/host", device=(8, 1), propagation="private"), place("/host/v"))
    outcome = judge(rule, scene(kubelet=kubelet, spaces=(private,), space_gaps=gaps))
    assert outcome.troubles and not outcome.unknown  # what is seen is judged and can clear


def test_a_file_system_that_sysfs_does_not_show_is_leaked_by_its_mount_alone() -> None:
    trouble = only(leaked_mount.RULE, scene(spaces=(space(),)))
    assert trouble.pid == 42


def test_a_mapping_in_use_is_not_idle() -> None:
    used = (
        scene(host=(place(),)),
        scene(spaces=(space(),)),
        scene(devices=(device(active=("ext4",)),)),
        scene(devices=(device(holders=("dm-0",)),)),
        scene(devices=(device(raw=("/publish/x",)),)),
    )
    assert [judge(mapped_unmounted.RULE, at).troubles for at in used] == [()] * 5
    assert "no record" in only(mapped_unmounted.RULE, scene()).message


def test_a_staged_volume_is_busy_only_when_no_pod_has_it() -> None:
    user = model.User(space().owners[0], DEVICE.number, ("cwd",), 99)
    staged = volume(mounts=("/mnt",))
    base: dict[str, Any] = {"host": (place(),), "users": (user,)}
    assert only(busy_mount.RULE, scene(volumes=(staged,), **base)).pid == 42
    has = Publish("u", "/p", "v", mounted=True, read_only=False)
    owned = volume(mounts=("/mnt",), publishes=(has,))
    assert judge(busy_mount.RULE, scene(volumes=(owned,), **base)).troubles == ()
    by_log = scene(logs=(hit(hint="busy", device="rbd0"),), **base)
    assert only(busy_mount.RULE, by_log).pid == 42


def test_propagation_matters_for_kubelets_own_file_system_only() -> None:
    kubelet = place("/", device=(8, 1))
    other = space(place("/host", device=(9, 1), propagation="private"))
    slave = space(place("/host", device=(8, 1), propagation="slave"))
    private = space(place("/host", device=(8, 1), propagation="private"))
    rule = propagation.RULE
    assert judge(rule, scene(kubelet=kubelet, spaces=(other,))).troubles == ()
    assert judge(rule, scene(kubelet=kubelet, spaces=(slave,))).troubles == ()
    trouble = only(rule, scene(kubelet=kubelet, spaces=(private,)))
    assert trouble.severity is Severity.INFO  # nothing is pinned yet
    pinning = space(
        place("/host", device=(8, 1), propagation="private"),
        place("/host/v", propagation="private"),
    )
    trouble = only(rule, scene(kubelet=kubelet, spaces=(pinning,)))
    assert (trouble.severity, trouble.device) == (Severity.WARNING, "rbd0")


@pytest.mark.parametrize(
    ("second", "severity"),
    [
        ({"read_only": False}, Severity.CRITICAL),
        ({"read_only": True}, Severity.WARNING),
        ({"image": Image("rbd", "csi-vol-1", snapshot="s", fsid="f1")}, None),
        ({"image": Image("rbd", "csi-vol-1", namespace="n", fsid="f1")}, None),
        ({"image": Image("rbd", "csi-vol-1", fsid="another")}, None),
    ],
)
def test_mapped_twice_is_one_image_with_a_writer(
    second: dict[str, object], severity: Severity | None
) -> None:
    twin = device(name="rbd1", number=(252, 16), **second)
    outcome = judge(mapped_twice.RULE, scene(devices=(DEVICE, twin)))
    assert [t.severity for t in outcome.troubles] == ([severity] if severity else [])


def watched(*watchers: Watcher, locks: tuple[Lock, ...] = (), features: int = 0) -> ImageView:
    return ImageView("rbd", "", "csi-vol-1", features, watchers, locks)


OURS = Watcher("client10", "10.0.0.5:0/111")
THEIRS = Watcher("client77", "10.0.0.9:0/9")


def test_another_client_that_writes_our_image_is_seen() -> None:
    rule = mapped_elsewhere.RULE
    alone = scene(clusters={"c1": view(images=(watched(OURS),))})
    assert judge(rule, alone).troubles == ()
    both = scene(clusters={"c1": view(images=(watched(OURS, THEIRS),))})
    assert only(rule, both).severity is Severity.CRITICAL
    reader = device(read_only=True)
    reading = scene(devices=(reader,), clusters={"c1": view(images=(watched(THEIRS),))})
    assert only(rule, reading).severity is Severity.WARNING
    lock = Lock("client77", "10.0.0.9:0/9", "auto 1")
    locked = scene(clusters={"c1": view(images=(watched(OURS, THEIRS, locks=(lock,)),))})
    assert "client77" in only(rule, locked).evidence["locks"]


def test_a_driver_that_does_not_tell_its_client_counts_as_one_watcher() -> None:
    nbd = device(name="nbd0", client=None)
    one = scene(devices=(nbd,), clusters={"c1": view(images=(watched(THEIRS),))})
    assert judge(mapped_elsewhere.RULE, one).troubles == ()
    two = scene(devices=(nbd,), clusters={"c1": view(images=(watched(OURS, THEIRS),))})
    assert len(judge(mapped_elsewhere.RULE, two).troubles) == 1


def missing(**changes: Any) -> ImageView:
    return ImageView("rbd", "", "csi-vol-1", error="RBD image not found", **changes)


def test_an_image_that_only_the_other_cluster_lacks_is_known() -> None:
    """Each cluster is asked for every image; DEVICE is of the cluster with fsid f1."""
    rule = mapped_elsewhere.RULE
    other = view(name="c2", fsid="f2", images=(missing(),))
    at = scene(clusters={"c1": view(images=(watched(OURS),)), "c2": other})
    assert judge(rule, at) == Outcome()
    trouble = only(rule, scene(clusters={"c2": other, "c1": view(images=(watched(THEIRS),))}))
    assert trouble.evidence["cluster"] == "c1"
    lacking = scene(clusters={"c1": view(images=(missing(),)), "c2": view(name="c2", fsid="f2")})
    assert "not found" in judge(rule, lacking).unknown


def test_an_image_of_the_same_name_in_another_cluster_is_another_image() -> None:
    rule, kernel = version_skew.FEATURE, 0x3D
    modern = view(name="c2", fsid="f2", images=(watched(features=kernel | 0x2),))
    own = view(images=(watched(features=kernel),))
    at = scene(supported_features=kernel, clusters={"c2": modern, "c1": own})
    assert judge(rule, at).troubles == ()
    assert cluster_of(at.clusters, DEVICE) is own
    nameless = device(image=Image("rbd", "csi-vol-1"))  # a driver that does not tell the cluster
    assert cluster_of(at.clusters, nameless) is None
    assert cluster_of({"c1": own}, nameless) is own
    assert cluster_of({"c1": own, "c2": "not asked yet"}, nameless) is None


def test_a_cluster_that_does_not_answer_makes_its_rules_unknown() -> None:
    at = scene(clusters={"c1": "no answer within 15s"}, clock=ClockState(True, 0.0))
    rules = (
        mapped_elsewhere.RULE,
        blocklisted_client.RULE,
        version_skew.VERSIONS,
        version_skew.FEATURE,
        cluster_health.NEAR_FULL,
        cluster_health.CLOCK,
        network.MESSENGER,
    )
    for rule in rules:
        assert "no answer" in judge(rule, at).unknown, rule.name


def test_without_an_inventory_every_rule_about_the_node_is_unknown() -> None:
    at = scene(inventory=None, blind="the look gave no answer within 10s")
    for rule in (leaked_mount.RULE, mapped_unmounted.RULE, mapped_twice.RULE, propagation.RULE):
        assert "no answer" in judge(rule, at).unknown


def test_without_kubelets_directory_rules_that_need_its_records_are_unknown() -> None:
    at = scene(no_records="no kubelet directory at /var/lib/kubelet", claims={})
    rules = (
        busy_mount.RULE,
        propagation.RULE,
        mapped_unmounted.RULE,
        read_only_claim.RULE,
        attachment.RULE,
        mount_options.RULE,
    )
    for rule in rules:
        outcome = judge(rule, at)
        assert outcome.unknown == "no kubelet directory at /var/lib/kubelet", rule.name
        assert outcome.troubles == (), rule.name  # DEVICE is idle, and nobody knows for whom
    assert not judge(leaked_mount.RULE, at).unknown
    by_log = scene(no_records="x", host=(place(read_only=True),))
    assert only(read_only_claim.RULE, by_log).severity is Severity.INFO  # what is seen is told


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
def test_a_blocklist_entry_is_matched_by_address_and_nonce(entry: str, found: bool) -> None:
    at = scene(clusters={"c1": view(blocklist=(entry,))})
    assert bool(judge(blocklisted_client.RULE, at).troubles) is found


def test_a_blocklisted_range_of_ipv6_is_matched() -> None:
    ours = device(client=Client("0", "client10", "[fd00::5]:0/111"))
    for entry, found in (("cidr:[fd00::]:0/64", True), ("cidr:[fd01::]:0/64", False)):
        at = scene(devices=(ours,), clusters={"c1": view(blocklist=(entry,))})
        assert bool(judge(blocklisted_client.RULE, at).troubles) is found


def test_a_read_only_claim_mapped_read_write_is_found() -> None:
    rule = read_only_claim.RULE
    claim = {"h1": Claim("h1", "ns/data", read_only=True)}
    at = scene(volumes=(volume(),), claims=claim)
    assert only(rule, at).severity is Severity.WARNING
    assert judge(rule, scene(devices=(device(read_only=True),), claims=claim)).troubles == ()
    reading = scene(host=(place(read_only=True),))
    assert only(rule, reading).severity is Severity.INFO
    assert judge(rule, scene(host=(place(),))).troubles == ()


def test_a_mapping_without_attachment_is_found_only_when_the_api_says_so() -> None:
    rule = attachment.RULE
    assert judge(rule, scene(volumes=(volume(),))).off
    for attached, count in ((False, 1), (True, 0), (None, 0)):
        claims = {"h1": Claim("h1", "ns/data", read_only=False, attached=attached)}
        outcome = judge(rule, scene(volumes=(volume(),), claims=claims))
        assert len(outcome.troubles) == count


def test_mount_options_that_are_asked_for_must_be_there() -> None:
    wanted = {"mount_options": [{"target": "/var/*", "options": ["noatime"], "fstype": "ext4"}]}
    rule = mount_options.RULE
    bad = scene(host=(place("/var/x"),), settings=wanted)
    assert only(rule, bad).key == "noatime"
    fine = (
        place("/var/x", options=("rw", "noatime")),
        place("/mnt"),
        place("/var/y", fstype="xfs"),
    )
    assert judge(rule, scene(host=fine, settings=wanted)).troubles == ()


def test_kubelets_directory_must_be_shared() -> None:
    rule = mount_options.RULE
    assert judge(rule, scene(kubelet=place("/"))).troubles == ()
    assert "shared" in only(rule, scene(kubelet=place("/", propagation="private"))).message


def test_what_the_guard_says_is_passed_on() -> None:
    silent, fine = scene(), scene(guard=GuardView(enforcing=True))
    weak = scene(guard=GuardView(enforcing=False, reasons=("its mode is dry-run",)))
    assert judge(guard_state.ENFORCING, silent).unknown
    assert judge(guard_state.ENFORCING, fine) == judge(guard_state.LEDGER, fine)
    assert "dry-run" in only(guard_state.ENFORCING, weak).message
    odd = GuardView(True, mismatches=(LedgerMismatch("rbd0", "i", "ext4 a", "ext4 b"),))
    assert "ext4 a" in only(guard_state.LEDGER, scene(guard=odd)).message


PACIFIC = "ceph version 16.2.15 (618f440892089921c3e944a991122ddc44e60516) pacific (stable)"


@pytest.mark.parametrize(
    ("expected", "versions", "client", "key"),
    [
        (None, (PACIFIC,), "16.2.15", None),
        (None, (PACIFIC,), "", None),
        (None, (PACIFIC, PACIFIC.replace("15 ", "14 ")), "16.2.15", "mixed"),
        (None, (PACIFIC,), "19.2.0", "apart"),
        (None, (PACIFIC,), "18.2.0", None),
        ("16.2", (PACIFIC,), "16.2.15", None),
        ("16.2.15", (PACIFIC,), "16.2.15", None),
        ("16.2.1", (PACIFIC,), "16.2.15", "expected"),
        ("17.2", (PACIFIC,), "17.2.0", "expected"),
        ("16.2", (PACIFIC,), "17.2.0", "expected"),
    ],
)
def test_version_skew(
    expected: str | None, versions: tuple[str, ...], client: str, key: str | None
) -> None:
    at = scene(
        clusters={
            "c1": view(
                versions=tuple(VersionCount("osd", v, 1) for v in versions), node_client=client
            )
        },
        settings={"clusters": [CLUSTER | {"expected_version": expected}]},
    )
    outcome = judge(version_skew.VERSIONS, at)
    assert [t.key for t in outcome.troubles] == ([key] if key else [])


def test_clients_older_than_the_cluster_requires_are_found() -> None:
    groups = (FeatureGroup("client", "jewel", 1, 3), FeatureGroup("client", "luminous", 2, 1))
    rule = version_skew.FEATURE
    strict = scene(clusters={"c1": view(features=groups, min_client="luminous")})
    assert "3 clients of jewel" in only(rule, strict).message
    assert judge(rule, scene(clusters={"c1": view(features=groups)})).troubles == ()


def test_image_features_that_the_kernel_lacks_are_named() -> None:
    images = (watched(features=0b1111101),)
    at = scene(clusters={"c1": view(images=images)}, supported_features=0b111101)
    assert only(version_skew.FEATURE, at).evidence["missing"] == "journaling"


def test_near_full_and_clock_checks_are_passed_on() -> None:
    check = Check("OSD_NEARFULL", "HEALTH_WARN", "1 nearfull osd(s)")
    at = scene(clusters={"c1": view(checks=(check,), used=0.9)})
    assert only(cluster_health.NEAR_FULL, at).key == "OSD_NEARFULL"
    full = Check("OSD_FULL", "HEALTH_ERR", "1 full osd(s)")
    at = scene(clusters={"c1": view(checks=(full,))})
    assert only(cluster_health.NEAR_FULL, at).severity is Severity.CRITICAL
    assert only(cluster_health.NEAR_FULL, scene(clusters={"c1": view(used=0.81)})).key == "used"
    assert judge(cluster_health.NEAR_FULL, scene(clusters={"c1": view(used=0.5)})).troubles == ()
    skew = Check("MON_CLOCK_SKEW", "HEALTH_WARN", "clock skew detected on mon.b")
    at = scene(clusters={"c1": view(checks=(skew,))}, clock=ClockState(True, 0.0))
    assert only(cluster_health.CLOCK, at).key == "monitors"
    assert only(cluster_health.CLOCK, scene(clock=ClockState(False, 16.0))).key == "unsynchronised"


def test_a_smaller_path_mtu_is_found() -> None:
    settings = {"clusters": [CLUSTER]}
    small = NetworkPath("c1", "10.0.0.1", 1500, "eth0", 9000)
    assert only(network.MTU, scene(paths=(small,), settings=settings)).key == "10.0.0.1"
    fine = NetworkPath("c1", "10.0.0.1", 9000, "eth0", 9000)
    assert judge(network.MTU, scene(paths=(fine,), settings=settings)).troubles == ()


def test_a_cluster_whose_monitors_no_way_is_known_to_is_unknown() -> None:
    settings = {"clusters": [{"name": "c1", "conf": "/etc/ceph/ceph.conf"}]}
    outcomes = {
        "not asked yet": {},
        "no answer": {"c1": "no answer"},
        "'ceph mon dump' is not allowed": {"c1": view(denied=("mon dump",))},
        "no way to any": {"c1": view()},
    }
    for why, views in outcomes.items():
        outcome = judge(network.MTU, scene(settings=settings, clusters=views))
        assert why in outcome.unknown and "c1" in outcome.unknown
    path = NetworkPath("c1", "10.0.0.1", 1500, "eth0", 1500)
    at = scene(settings=settings, clusters={"c1": view()}, paths=(path,))
    assert judge(network.MTU, at) == Outcome()


def test_monitors_of_a_cluster_with_only_a_conf_are_those_it_names_itself() -> None:
    by_conf = ClusterSettings.model_validate({"name": "c1", "conf": "/etc/ceph/ceph.conf"})
    told = view(monitors_v1=("10.0.0.1:6789",), monitors_v2=("10.0.0.1:3300", "[fd00::1]:3300"))
    assert clusters.addresses(by_conf, told) == ["10.0.0.1", "fd00::1"]
    assert clusters.addresses(by_conf, "no answer") == []
    by_name = ClusterSettings.model_validate(CLUSTER | {"monitors": ["mon-a:6789"]})
    assert clusters.addresses(by_name, told) == ["10.0.0.1", "fd00::1"]


@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("versions", (version_skew.VERSIONS,)),
        ("features", (version_skew.FEATURE,)),
        ("osd get-require-min-compat-client", (version_skew.FEATURE,)),
        ("osd blocklist ls", (blocklisted_client.RULE,)),
        ("health", (cluster_health.NEAR_FULL, cluster_health.CLOCK)),
        ("df", (cluster_health.NEAR_FULL,)),
        ("mon dump", (network.MESSENGER,)),
    ],
)
def test_what_the_key_may_not_ask_is_unknown(command: str, rules: tuple[Rule, ...]) -> None:
    for denied in ((), (command,)):
        at = scene(clusters={"c1": view(denied=denied)}, clock=ClockState(True, 0.0))
        for rule in rules:
            assert (f"'ceph {command}' is not allowed" in judge(rule, at).unknown) is bool(denied)


class _Rados:
    """A key that may run nothing but ``versions``."""

    def mon_command(self, command: str, _: bytes, *, timeout: int) -> tuple[int, bytes, str]:
        if json.loads(command)["prefix"] == "versions":
            return 0, b'{"mon": {"ceph version 16.2.15": 1}}', ""
        return -13, b"", "access denied"

    def get_fsid(self) -> str:
        return "f1"


def test_commands_that_are_refused_are_kept_with_the_view() -> None:
    seen = ceph._view("c1", _Rados(), None, [], 1.0)
    assert set(seen.denied) == {
        *("health", "df", "mon dump", "features"),
        *("osd blocklist ls", "osd get-require-min-compat-client"),
    }
    assert "'ceph df' is not allowed to this key" in seen.gaps
    assert seen.versions


@pytest.mark.parametrize(
    ("config", "v1", "v2", "found"),
    [
        ("10.0.0.1:3300 name=a,ms_mode=prefer-crc rbd vol -", ("m",), ("m",), False),
        ("10.0.0.1:3300 name=a,ms_mode=prefer-crc rbd vol -", ("m",), (), True),
        ("10.0.0.1:6789 name=a rbd vol -", ("m",), ("m",), False),
        ("10.0.0.1:6789 name=a rbd vol -", (), ("m",), True),
        ("", (), ("m",), False),
    ],
)
def test_messenger_modes(config: str, v1: tuple[str], v2: tuple[str], found: bool) -> None:
    mapped = device(client=Client("0", "client10", "a", config=config))
    at = scene(devices=(mapped,), clusters={"c1": view(monitors_v1=v1, monitors_v2=v2)})
    assert bool(judge(network.MESSENGER, at).troubles) is found


def test_a_failing_unmap_is_joined_to_its_device_and_its_holder() -> None:
    at = scene(logs=(hit(image="rbd/csi-vol-1"),), spaces=(space(),))
    trouble = only(unmap_failing.RULE, at)
    assert trouble.device == "rbd0"
    assert "node_exporter" in trouble.advice
    gone = scene(logs=(hit(image="rbd/another"),))
    assert judge(unmap_failing.RULE, gone).troubles == ()
    nameless = scene(logs=(hit(),), spaces=(space(),))  # 'rbd: unmap failed: (16)' names none
    assert only(unmap_failing.RULE, nameless).device == "rbd0"
    over = scene(logs=(hit(last=1000.0 - unmap_failing.NAMELESS_SECONDS),), spaces=(space(),))
    assert judge(unmap_failing.RULE, over).troubles == ()


def test_a_volume_that_a_pod_has_again_no_longer_fails_to_go() -> None:
    """The retried job came back to this node, and kubelet published what was staged still."""
    published = volume(mounts=("/mnt",), publishes=(Publish("uid", "/p", "pv", True, False),))
    base: dict[str, Any] = {"host": (place(),), "volumes": (published,), "users": (USER,)}
    base["users_of"] = (DEVICE.number,)
    failed = scene(logs=(hit(image="rbd/csi-vol-1"),), **base)
    busy = scene(logs=(hit(hint="busy", device="rbd0"),), **base)
    assert judge(unmap_failing.RULE, failed).troubles == ()
    assert judge(busy_mount.RULE, busy).troubles == ()


def test_rules_are_named_once_and_documented() -> None:
    assert len(registry.BY_NAME) == len(registry.RULES)
    docs = Path(__file__).parents[3] / "docs" / "audit.md"
    text = docs.read_text()
    for rule in registry.RULES:
        assert f"### {rule.name}\n" in text, rule.name


def test_the_model_survives_the_pipe() -> None:

    from tests.volumes.audit.world import INVENTORY

    inventory = scene(spaces=(space(),), host=(place(),), volumes=(volume(image=IMAGE),)).inventory
    for each in (INVENTORY, inventory):
        assert model.from_json(model.Inventory, json.loads(json.dumps(model.to_json(each)))) == each
