"""The reserve and the kubelet's thresholds: what they come to, and that they are followed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.child
from cache.fill import space
from cache.fill.protocol import Least
from cache.settings import CacheSettings
from cache.space import reserve
from cache.store import disk as store_disk
from kube import kubelet
from kube.settings import ThisNode
from tests.cache.test_space import MIB, disk, free_of
from tests.testbed import trees
from tests.testbed.agent import Agent

GIB = 2**30


def thresholds(hard: dict[str, str], soft: dict[str, str] | None = None) -> kubelet.Thresholds:
    given = {"evictionHard": hard, "evictionSoft": soft or {}}
    return kubelet.of(kubelet.defaulted(given), "a test")


@pytest.mark.parametrize(
    ("hard", "soft", "wanted"),
    [
        ({"nodefs.available": "10%"}, {}, Least(share=0.1125)),
        ({"nodefs.available": "10%"}, {"nodefs.available": "16%"}, Least(share=0.18)),
        ({"nodefs.available": "8Gi"}, {}, Least(bytes=9 * GIB)),
        ({"nodefs.available": "8Gi"}, {"nodefs.available": "8%"}, Least(0.09, 9 * GIB)),
        ({"nodefs.inodesFree": "8%"}, {}, Least(inodes_share=0.09)),
        ({"nodefs.inodesFree": "800"}, {}, Least(inodes=900)),
        ({"imagefs.available": "50%"}, {}, Least()),
        ({"nodefs.available": "100%"}, {}, Least(share=1.0)),
        ({}, {}, Least(share=0.1125, inodes_share=0.05625)),  # the kubelet's defaults
    ],
)
def test_thresholds_count_with_a_margin(
    hard: dict[str, str], soft: dict[str, str], wanted: Least
) -> None:
    found = reserve.least(thresholds(hard, soft), nodefs=True, imagefs=False)
    assert found.share == pytest.approx(wanted.share)
    assert found.inodes_share == pytest.approx(wanted.inodes_share)
    assert (found.bytes, found.inodes) == (wanted.bytes, wanted.inodes)


def test_only_the_file_system_of_the_store_counts(tmp_path: Path) -> None:
    both = thresholds({"nodefs.available": "10%", "imagefs.available": "20%"})
    of = {
        (nodefs, imagefs): reserve.least(both, nodefs=nodefs, imagefs=imagefs).share
        for nodefs in (False, True)
        for imagefs in (False, True)
    }
    assert of[False, False] == 0
    assert of[True, False] == pytest.approx(0.1125)
    assert of[False, True] == of[True, True] == pytest.approx(0.225)
    folders = [str(tmp_path.parent), "/proc", "/not/to/be/seen"]
    # The last one may be there.
    assert store_disk.shares_disk(str(tmp_path), folders) == [True, False, True]


@given(
    size=st.integers(1, 2**50), inodes=st.integers(0, 2**32), share=st.floats(0, 0.99),
    least=st.builds(
        Least, st.floats(0, 1), st.integers(0, 2**50), st.floats(0, 1), st.integers(0, 2**32)
    ),
)  # fmt: skip
def test_reserve_is_never_smaller_than_the_configured_one(
    size: int, inodes: int, share: float, least: Least
) -> None:
    plain = space.floors(size, inodes, share, Least())
    found = space.floors(size, inodes, share, least)
    assert found.bytes >= plain.bytes
    assert found.inodes >= plain.inodes
    assert found.bytes >= least.bytes
    assert found.inodes >= least.inodes or not inodes


def following(tmp_path: Path, **kubelet_section: Any) -> tuple[reserve.Reserve, list[int]]:
    section = {"root_dir": str(tmp_path), "image_dir": "/proc", **kubelet_section}
    here = ThisNode.model_validate({"kubelet": section})
    settings = CacheSettings(store=tmp_path / "store", views=tmp_path / "views").at(here)
    changes = [0]

    def changed() -> None:
        changes[0] += 1

    (tmp_path / "store").mkdir()
    return reserve.Reserve(settings, changed), changes


async def test_kubelets_file_is_followed_and_a_wrong_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kubelet.yaml"
    one, changes = following(tmp_path, config=str(file))
    file.write_text(json.dumps({"evictionHard": {"nodefs.available": "8%"}}))
    await one.look()
    assert one.least.share == pytest.approx(0.09)
    assert changes == [1]
    await one.look()
    assert changes == [1]
    file.write_text(json.dumps({"evictionHard": {"nodefs.available": "8 percent"}}))
    await one.look()
    assert one.least.share == pytest.approx(0.09), "what it said last counts"
    (finding,) = one.findings()
    assert "'8 percent'" in finding.message
    assert str(file) in finding.message
    file.write_text(json.dumps({"evictionHard": {"nodefs.available": "16%"}}))
    await one.look()
    assert one.least.share == pytest.approx(0.18)
    assert list(one.findings()) == []


async def test_disk_that_hangs_leaves_what_the_kubelet_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubelet.yaml"
    one, _ = following(tmp_path, config=str(file))
    file.write_text(json.dumps({"evictionHard": {"nodefs.available": "8%"}}))
    await one.look()
    assert one.least.share == pytest.approx(0.09)
    ends: list[Exception] = [
        kit.child.DeadlineError("the store", "no answer within 30s", "look"),
        RuntimeError("the child ended with 1"),
    ]

    async def call(*_: object, deadline: float) -> None:
        raise ends[0]

    monkeypatch.setattr(kit.child, "call", call)
    file.write_text(json.dumps({"evictionHard": {"nodefs.available": "16%"}}))
    while ends:
        await one.look()
        assert one.least.share == pytest.approx(0.09)
        (finding,) = one.findings()
        assert str(ends.pop(0)) in finding.message
    monkeypatch.undo()
    await one.look()
    assert one.least.share == pytest.approx(0.18)
    assert list(one.findings()) == []


@pytest.mark.parametrize("value", ["1e999999999", "9" * 400], ids=["exponent", "digits"])
async def test_amount_that_fits_nowhere_is_named(tmp_path: Path, value: str) -> None:
    file = tmp_path / "kubelet.yaml"
    one, _ = following(tmp_path, config=str(file))
    file.write_text(json.dumps({"evictionHard": {"nodefs.available": value}}))
    await one.look()
    (finding,) = one.findings()
    assert value in finding.message


@pytest.mark.real
@pytest.mark.timeout(300)
def test_fill_stops_at_the_kubelets_threshold_and_follows_it(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 1500, mean=60_000)
    file = area / "kubelet.yaml"

    def kubelet_says(available: str) -> None:
        file.write_text(json.dumps({"evictionHard": {"nodefs.available": available}}))

    def reserved() -> float:
        size, free = free_of(ssd)
        return free / size

    kubelet_says("40%")
    with disk(area, "ext4", 160 * MIB) as ssd:
        (ssd / "kubelet").mkdir()
        node.put_store(ssd / "store")
        node.cache["reserve"] = "5%"
        node.settings["kubelet"] = {
            "config": str(file), "root_dir": str(ssd / "kubelet"), "image_dir": "/proc",
        }  # fmt: skip
        node.add_dir("a", source)
        node.start()
        node.wait_state("a", "partial", seconds=120)
        assert 0.45 <= reserved() < 0.6, "40 %, and an eighth of that"
        kubelet_says("56%")
        node.cache["reserve"] = "6%"  # changed settings are a reason to look at once
        node.write()
        node.wait_for(lambda: reserved() >= 0.63, 120, "the reserve to be what is wanted now")
        trees.assert_equal(source, node.view("a"))
        assert node.dataset("a")["files"]["done"] > 0
        assert os.path.ismount(node.view("a"))
        node.end()


GIB = 2**30
LASTED = reserve.LASTS_SECONDS


@pytest.mark.parametrize(
    ("takes", "told"),
    [
        ([(0, 90), (1, 90), (LASTED * 2, 90)], []),
        ([(0, 90), (1, 50), (2, 50), (1 + LASTED, 50), (2 + LASTED, 50)], [1 + LASTED]),
        ([(0, 90), (1, 50), (LASTED, 90), (1 + LASTED, 90), (2 * LASTED, 90)], []),  # for a moment
        ([(0, 90), (1, 89.9), (2 * LASTED, 89.9)], []),  # next to nothing
        ([(0, 90), (1, 50), (1 + LASTED, 50), (2 + LASTED, 20), (3 + 2 * LASTED, 20)],
         [1 + LASTED, 3 + 2 * LASTED]),
    ],
)  # fmt: skip
def test_room_that_others_leave_is_told_once_it_lasts(
    takes: list[tuple[float, float]], told: list[float]
) -> None:
    others = reserve.Others()
    found = [at for at, each in takes if others.left_room(at, int(each * GIB), 100 * GIB)]
    assert found == told
