"""Every rule: what it finds, and what it must not find. Pure."""

from pathlib import Path
from typing import Any

import pytest

from kit.finding import Severity
from linux.clock import ClockState
from tests.volumes.audit.world import (
    DEVICE,
    IMAGE,
    device,
    judge,
    only,
    place,
    scene,
    space,
    view,
    volume,
)
from volumes.inventory import model
from volumes.inventory.cluster import (
    Check,
    FeatureGroup,
    ImageView,
    Lock,
    NetworkPath,
    VersionCount,
    Watcher,
)
from volumes.inventory.model import Client, Image, Publish
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
from volumes.rules.base import Claim, GuardView, LedgerMismatch, LogHit, Outcome, cluster_of

CLUSTER = {"name": "c1", "monitors": ["10.0.0.1:6789"], "secret_file": "/k"}


def hit(**changes: object) -> LogHit:
    fields: dict[str, object] = {
        "pattern": "unmap-failed",
        "severity": Severity.WARNING,
        "source": "kubelet",
        "text": "rbd: unmap failed: (16) Device or resource busy",
        "first": 1.0,
        "last": 2.0,
        "count": 3,
        "meaning": "m",
        "advice": "a",
        "hint": "unmap-failed",
    }
    return LogHit(**(fields | changes))  # type: ignore[arg-type]


def test_a_mounted_device_is_not_leaked_whatever_others_do() -> None:
    at = scene(devices=(device(active=("ext4",)),), host=(place(),), spaces=(space(),))
    assert judge(leaked_mount.RULE, at).troubles == ()


def test_an_active_device_without_any_holder_waits_for_the_write_back() -> None:
    trouble = only(leaked_mount.RULE, scene(devices=(device(active=("ext4",)),)))
    assert trouble.patience == leaked_mount.UNEXPLAINED_SECONDS
    assert trouble.severity is Severity.WARNING


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


def test_rules_are_named_once_and_documented() -> None:
    assert len(registry.BY_NAME) == len(registry.RULES)
    docs = Path(__file__).parents[3] / "docs" / "audit.md"
    text = docs.read_text()
    for rule in registry.RULES:
        assert f"### {rule.name}\n" in text, rule.name


def test_the_model_survives_the_pipe() -> None:
    import json

    from tests.volumes.audit.world import INVENTORY

    inventory = scene(spaces=(space(),), host=(place(),), volumes=(volume(image=IMAGE),)).inventory
    for each in (INVENTORY, inventory):
        assert model.from_json(model.Inventory, json.loads(json.dumps(model.to_json(each)))) == each
