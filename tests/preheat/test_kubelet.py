"""The kubelet's thresholds as it has them, and the disk seen through them."""

import dataclasses
import os
from pathlib import Path

import pytest

import kit.errors
from kube import kubelet
from kube.kubelet import Limit
from kube.settings import KubeletSettings, ThisNode
from preheat import doctor, settings
from preheat.planning import desired, plan, stock
from tests.preheat.planning.test_plan import NOW
from tests.testbed import kubelet_files

GiB = 1024**3
ASSUMED = kubelet.thresholds(KubeletSettings())


def read(folder: Path, text: str, **drop_ins: str) -> kubelet.Thresholds:
    file = folder / "config.yaml"
    file.write_text(text)
    drops = folder / "conf.d"
    drops.mkdir(exist_ok=True)
    for name, content in drop_ins.items():
        (drops / f"{name}.conf").write_text(content)
    section = KubeletSettings(config=file, config_dir=drops if drop_ins else None)
    return kubelet.thresholds(section)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("15%", Limit(share=0.15)),
        ("500Gi", Limit(amount=500 * GiB)),
        ("1.5Gi", Limit(amount=3 * GiB // 2)),
        ("10G", Limit(amount=10**10)),
        ("100k", Limit(amount=100_000)),
        ("1e9", Limit(amount=10**9)),
        ("0", Limit()),
        (1048576, Limit(amount=1048576)),
        ("1e99Ei", Limit(amount=2**63 - 1)),
    ],
)
def test_quantities_are_those_of_kubernetes(text: object, limit: Limit) -> None:
    assert kubelet.quantity(text) == limit


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "-5Gi",
        "5 GB",
        "120%",
        "5GiB",
        "1e999999999",
        pytest.param("9" * 400, id="digits"),
    ],
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        kubelet.quantity(text)


def test_thresholds_of_a_file(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\n"
        'evictionHard: {imagefs.available: "500Gi", imagefs.inodesFree: "3%"}\n'
        'evictionSoft: {imagefs.available: "20%"}\n',
    )
    assert (found.gc_high, found.gc_low, found.assumed) == (0.7, 0.6, False)
    assert found.free == (Limit(amount=500 * GiB), Limit(share=0.2))
    assert found.inodes == (Limit(share=0.03),)
    assert max(each.of(1000 * GiB) for each in found.free) == 0.5
    assert max(each.of(10000 * GiB) for each in found.free) == 0.2
    assert max(each.of(100 * GiB) for each in found.free) == 1.0


@pytest.mark.parametrize(
    ("text", "free", "inodes"),
    [
        ("", (Limit(share=0.15),), (Limit(share=0.05),)),
        ("evictionHard: {}", (Limit(share=0.15),), (Limit(share=0.05),)),
        # Any signal of one's own switches the other defaults off.
        ("evictionHard: {memory.available: 1Gi}", (), ()),
        (
            "evictionHard: {memory.available: 1Gi}\nmergeDefaultEvictionSettings: true",
            (Limit(share=0.15),),
            (Limit(share=0.05),),
        ),
    ],
)
def test_defaults_are_the_kubelets(
    text: str, free: tuple[Limit, ...], inodes: tuple[Limit, ...], tmp_path: Path
) -> None:
    found = read(tmp_path, text)
    assert (found.gc_high, found.gc_low) == (0.85, 0.8)
    assert (found.free, found.inodes) == (free, inodes)


def test_drop_ins_are_merged_in_the_order_of_their_names(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "imageGCHighThresholdPercent: 90",
        **{
            "10-a": 'imageGCHighThresholdPercent: 80\nevictionHard: {imagefs.available: "10%"}',
            "20-b": "imageGCHighThresholdPercent: 75\nimageGCLowThresholdPercent: 70\n"
            "evictionHard: {imagefs.inodesFree: null}",
        },
    )
    (tmp_path / "conf.d" / "30-not-read.yaml").write_text("imageGCHighThresholdPercent: 1")
    assert (found.gc_high, found.gc_low) == (0.75, 0.7)
    assert found.free == (Limit(share=0.1),)
    assert found.inodes == ()


@pytest.mark.parametrize(
    "text",
    [
        "- a list",
        "a: [",
        "evictionHard: {imagefs.available: much}",
        "evictionHard: {imagefs.available: 1e999999999}",
        "imageGCHighThresholdPercent: .inf",
        pytest.param("a: " + "[" * 1_000, id="deep"),
    ],
)
def test_an_unusable_file_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(kit.errors.SettingsError, match=r"config\.yaml"):
        read(tmp_path, text)


def test_an_unusable_drop_in_is_named(tmp_path: Path) -> None:
    with pytest.raises(kit.errors.SettingsError, match=r"10-bad\.conf"):
        read(tmp_path, "", **{"10-bad": "- a list"})


def test_what_is_assumed_is_said(tmp_path: Path) -> None:
    assert kubelet.thresholds(KubeletSettings()).assumed
    assert "assumed" in doctor.thresholds({})
    read(tmp_path, 'evictionHard: {imagefs.available: "500Gi"}')
    file = tmp_path / "config.yaml"
    said = doctor.thresholds({"config": str(file)})
    assert said == f"images are deleted above 85%, pods evicted below 500.0 GiB free ({file})"


def test_node_has_the_disk_and_a_bounded_pin_budget(tmp_path: Path) -> None:
    held = os.statvfs(tmp_path)
    capacity = held.f_blocks * held.f_frsize
    section = settings.PreheatSettings(pin_budget=capacity * 2)
    found = stock.node(str(tmp_path), section)

    assert found.capacity == capacity
    assert found.pin_budget == int(0.8 * capacity)
    assert found.thresholds_assumed
    small = settings.PreheatSettings(pin_budget=5)
    assert stock.node(str(tmp_path), small).pin_budget == 5
    # A remote snapshotter has no directory where CRI says.
    remote = tmp_path / "io.containerd.snapshotter.v1.stargz"
    assert stock.node(str(remote), section).capacity == capacity
    with pytest.raises(kit.errors.HostError, match="mount the host's directory"):
        stock.node(str(tmp_path / "not-there"), section)


def test_nodefs_counts_where_images_share_its_disk(tmp_path: Path) -> None:
    """The kubelet evicts at nodefs.available too when its own directory fills."""
    hard = {"imagefs.available": "2%", "nodefs.available": "30%"}
    soft = {"nodefs.inodesFree": "40%"}
    named = kubelet_files.written(tmp_path, evictionHard=hard, evictionSoft=soft)
    shared, other, unknown = (
        stock.node(
            str(tmp_path),
            settings.PreheatSettings().at(
                ThisNode(kubelet=KubeletSettings(**named, root_dir=root))
            ),
        )
        for root in (tmp_path, Path("/proc"), tmp_path / "not-there")
    )
    assert (shared.eviction_free, shared.eviction_inodes) == (0.3, 0.4)
    assert (other.eviction_free, other.eviction_inodes) == (0.02, 0.0)
    assert unknown.eviction_free == other.eviction_free


def test_no_inodes_are_pressure() -> None:
    full = plan.Node(*(1000, 900, 0.85, 0.8, 0.1, 300, 50), inodes_free=0.04, eviction_inodes=0.05)
    pin = plan.Pinned("h", "r", "d", (1, 0, 0.0), {"s a": 100})
    other = plan.Pinned("i", "s", "e", (2, 0, 0.0), {"s b": 100})
    found = plan.decide(full, [], [pin, other], 1, NOW)
    assert found.pause == "the disk has 4 % of its inodes free"
    assert found.releases == (), "the kubelet has unpinned images to delete"
    bare = plan.Node(*(1000, 900, 0.85, 0.8, 0.1, 300, 0), inodes_free=0.04, eviction_inodes=0.05)
    assert [r.hold for r in plan.decide(bare, [], [pin, other], 1, NOW).releases] == ["h"]
    enough = plan.Node(*(1000, 900, 0.85, 0.8, 0.1, 300), inodes_free=0.5, eviction_inodes=0.05)
    assert not plan.decide(enough, [], [pin, other], 1, NOW).pause


@pytest.mark.parametrize(
    ("inodes", "has_table", "pulls"), [(450, True, True), (451, True, False), (451, False, True)]
)
def test_an_image_that_took_too_many_inodes_waits_for_them(
    inodes: int, has_table: bool, pulls: bool
) -> None:
    node = plan.Node(
        *(1000, 900, 0.85, 0.8, 0.1, 300), inodes_free=0.5, eviction_inodes=0.05, inodes=1000
    )
    node = node if has_table else dataclasses.replace(node, inodes=0)
    request = desired.Request("r", "policy", measured=True, fetch=1, inodes=inodes)
    found = plan.decide(node, [request], [], 1, NOW)

    assert bool(found.pulls) is pulls
    texts = [skip.text for skip in found.skips]
    told = f"it took {inodes} inodes of the disk, 450 are free above the kubelet's threshold"
    assert texts == ([] if pulls else [told])
