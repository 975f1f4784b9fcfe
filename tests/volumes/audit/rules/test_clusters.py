"""Rules about clusters. Pure; test_ceph.py has a real cluster."""

import pytest

from ceph.protocol import FeatureGroup, VersionCount
from linux.rbd_sysfs import RbdClient, RbdImage
from linux.syscalls import ClockState
from tests.volumes.audit.world import DEVICE, device, image_view, judge, only, scene, view
from volumes.audit.rules import clusters
from volumes.audit.rules.base import Outcome
from volumes.audit.types import NetworkPath, Severity, cluster_of

PACIFIC = "ceph version 16.2.15 (618f440892089921c3e944a991122ddc44e60516) pacific (stable)"


@pytest.mark.parametrize(
    ("expected", "versions", "client", "key"),
    [
        (None, (PACIFIC,), "16.2.15", None),
        (None, (PACIFIC,), "", None),
        (None, (PACIFIC, PACIFIC.replace("15 ", "14 ")), "16.2.15", None),  # an upgrade
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
    counts = tuple(VersionCount("osd", version, 1) for version in versions)
    at = scene(
        clusters={"c1": view(versions=counts, node_client=client)},
        expected_versions={"c1": expected} if expected else {},
    )
    outcome = judge(clusters.version_skew, at)
    assert [t.key for t in outcome.troubles] == ([key] if key else [])


def test_feature_skew_of_clients_older_than_required() -> None:
    groups = (FeatureGroup("client", "jewel", 1, 3), FeatureGroup("client", "luminous", 2, 1))
    strict = scene(clusters={"c1": view(features=groups, min_client="luminous")})
    assert "3 clients of jewel" in only(clusters.feature_skew, strict).message
    at = scene(clusters={"c1": view(features=groups)})
    assert judge(clusters.feature_skew, at).troubles == ()


def test_feature_skew_names_image_features_that_the_kernel_lacks() -> None:
    images = (image_view(features=0b1111101),)
    at = scene(clusters={"c1": view(images=images)}, supported_features=0b111101)
    assert only(clusters.feature_skew, at).evidence["missing"] == "journaling"


def test_feature_skew_ignores_the_same_image_name_of_another_cluster() -> None:
    kernel = 0x3D
    modern = view(name="c2", fsid="f2", images=(image_view(features=kernel | 0x2),))
    own = view(images=(image_view(features=kernel),))
    at = scene(supported_features=kernel, clusters={"c2": modern, "c1": own})
    assert judge(clusters.feature_skew, at).troubles == ()
    assert cluster_of(at.clusters, DEVICE) is own


def test_cluster_of_a_silent_driver_is_the_only_cluster() -> None:
    own = view()
    nameless = device(image=RbdImage("rbd", "csi-vol-1"))  # without the cluster's fsid
    assert cluster_of({"c1": own, "c2": view(name="c2", fsid="f2")}, nameless) is None
    assert cluster_of({"c1": own}, nameless) is own
    assert cluster_of({"c1": own, "c2": "not asked yet"}, nameless) is None


def test_clock_skew_of_this_node() -> None:
    trouble = only(clusters.clock_skew, scene(clock=ClockState(False, 16.0)))
    assert trouble.key == "unsynchronised" and clusters.clock_skew.severity is Severity.INFO
    assert judge(clusters.clock_skew, scene(clock=ClockState(True, 0.0))).troubles == ()
    assert "cannot be read" in judge(clusters.clock_skew, scene(clock=None)).unknown


def test_mtu_mismatch_is_a_smaller_path_than_interface() -> None:
    views = {"c1": view()}
    small = NetworkPath("c1", "10.0.0.1", 1500, "eth0", 9000)
    assert only(clusters.mtu_mismatch, scene(paths=(small,), clusters=views)).key == "10.0.0.1"
    fine = NetworkPath("c1", "10.0.0.1", 9000, "eth0", 9000)
    assert judge(clusters.mtu_mismatch, scene(paths=(fine,), clusters=views)).troubles == ()


def test_mtu_mismatch_is_unknown_without_a_route() -> None:
    outcomes = {
        "not asked yet": "not asked yet",
        "'ceph mon dump' is not allowed": view(denied=("mon dump",)),
        "no route to any": view(),
    }
    for why, each in outcomes.items():
        outcome = judge(clusters.mtu_mismatch, scene(clusters={"c1": each}))
        assert why in outcome.unknown and "c1" in outcome.unknown
    assert judge(clusters.mtu_mismatch, scene()).off
    path = NetworkPath("c1", "10.0.0.1", 1500, "eth0", 1500)
    at = scene(clusters={"c1": view()}, paths=(path,))
    assert judge(clusters.mtu_mismatch, at) == Outcome()


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
def test_messenger_mode(config: str, v1: tuple[str], v2: tuple[str], found: bool) -> None:
    mapped = device(client=RbdClient("0", "client10", "a", config=config))
    at = scene(devices=(mapped,), clusters={"c1": view(monitors_v1=v1, monitors_v2=v2)})
    assert bool(judge(clusters.messenger_mode, at).troubles) is found
