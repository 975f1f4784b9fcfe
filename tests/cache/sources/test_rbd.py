"""Datasets of kind rbd by a whole agent and a real cluster, on a kernel without an RBD client.

What a kernel with one adds is in test_rbd_guest.py.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cache.csi import csi_pb2 as pb
from tests.testbed import csi, held, rbdimage, waiting
from tests.testbed.agent import Agent, ApiError
from tests.testbed.ceph import CephCluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

MIB = 2**20
VOLUME = {"dataset": "train"}
FILES = {f"d{n % 5}/f{n}": hashlib.sha256(b"%d" % n).digest() * (n * 31) for n in range(1, 120)}


def write(top: Path) -> None:
    for name, data in FILES.items():
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_bytes(data)


def other(top: Path) -> None:
    (top / "other").write_bytes(b"other")


def shown(view: Path) -> dict[str, bytes]:
    return {
        str(each.relative_to(view)): each.read_bytes()
        for each in view.rglob("*")
        if each.is_file() and "lost+found" not in each.parts
    }


@pytest.fixture
def image(cluster: CephCluster, area: Path) -> Iterator[str]:
    """A new image rbd/NAME with a snapshot v1 of FILES."""
    name = f"train-{area.name}"
    made = area / "image"
    rbdimage.file_system(made, "ext4", 64 * MIB, write)
    rbdimage.imported(cluster, made, name)
    yield name
    cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{name}")
    cluster.run("rbd", "rm", "--no-progress", f"rbd/{name}")


def settings(cluster: CephCluster, area: Path, image: str) -> dict[str, Any]:
    secret = area / "secret"
    secret.write_text(cluster.secret())
    return {
        "budget": "1GiB",
        "reserve": "1%",
        "source_check": "1s",
        "datasets": [
            {
                "name": "train",
                "freshness": "snapshot",
                "source": {
                    "kind": "rbd", "monitors": [cluster.monitor], "pool": "rbd", "image": image,
                    "snapshot": "v1", "user": "admin", "secret_file": str(secret),
                },
            }
        ],
    }  # fmt: skip


def answered(kubelet: csi.Kubelet, target: Path) -> Any:
    """The answer to NodeGetVolumeStats, or None while the driver does not answer."""
    with contextlib.suppress(grpc.RpcError):
        return kubelet.stats(target)
    return None


def loops(node: Agent) -> str:
    listed = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listed.splitlines() if str(node.folder) in line)


def test_image_is_copied_served_adopted_and_removed(
    cluster: CephCluster, area: Path, node: Agent, image: str
) -> None:
    node.cache.update(settings(cluster, area, image))
    fill = held.Fill(node, 1)
    kubelet = csi.Kubelet(area / "k")
    kubelet.serve(node)
    direct, parent = kubelet.target(), kubelet.target()
    node.start()
    fill.wait()
    node.wait_state("train", "filling")
    notes = node.dataset("train")["notes"]
    assert any("no RBD client" in note for note in notes), notes
    # And why nothing else maps it. (A kernel with nbd says that rbd-nbd is not used.)
    assert any("rbd-nbd" in note and "rbd-fuse shows no snapshots" in note for note in notes)
    waiting.until(kubelet.registration.exists, 20, "the driver")
    with csi.refused("FAILED_PRECONDITION", "chunks, ") as said:
        kubelet.publish(direct, VOLUME)
    assert "not complete yet" in said[0] and "the view comes with the complete copy" in said[0]
    fill.go_on()
    complete = node.wait_state("train", "complete")
    node.wait_served("train", "store")
    assert complete["bytes"]["done"] > 0 and complete["store_bytes"] < 64 * MIB
    assert shown(node.view("train")) == FILES
    assert cluster.run("rbd", "status", f"rbd/{image}").count("watcher=") == 0
    kubelet.publish(direct, VOLUME)
    kubelet.publish(parent, {**VOLUME, "layout": "parent", "wait": "complete"}, identity="w")
    # A killed agent changes nothing; the next one takes view and volumes as they are.
    node.kill()
    for each in (node.view("train"), direct, parent / "data"):
        assert shown(each) == FILES
    before = loops(node)
    assert before
    node.start()
    node.wait_served("train", "store")
    assert loops(node) == before
    waiting.until(kubelet.registration.exists, 20, "the driver")
    disk = os.statvfs(direct)
    for target in (direct, parent):
        found = waiting.until(functools.partial(answered, kubelet, target), 20, "the sizes")
        assert [(each.unit, each.total, each.used, each.available) for each in found.usage] == [
            (pb.Usage.BYTES, *[(disk.f_blocks - disk.f_bfree) * disk.f_frsize] * 2, 0),
            (pb.Usage.INODES, *[disk.f_files - disk.f_ffree] * 2, 0),
        ]
        assert found.usage[1].used >= len(FILES)
        assert not found.volume_condition.abnormal, found
    with pytest.raises(ApiError, match="in use: pod"):
        node.remove("train")
    kubelet.unpublish(direct)
    kubelet.unpublish(parent, identity="w")
    node.remove("train")
    waiting.until(lambda: not loops(node), 30, "the loop device's end")
    assert not node.view("train").exists()


def test_bad_chunk_is_replaced_under_the_view(
    cluster: CephCluster, area: Path, node: Agent, image: str
) -> None:
    node.cache.update(settings(cluster, area, image))
    node.start()
    node.wait_state("train", "complete")
    node.wait_served("train", "store")
    (copy,) = node.folder.glob("store/train/*/image")
    with copy.open("r+b") as stream:
        stream.seek(8 * MIB)
        stream.write(b"rot" * 4096)
    node.tell("train", "verify", {})
    verified = waiting.until(
        lambda: (found := node.dataset("train")["verify"])
        and found["state"] in ("good", "bad")
        and found,
        60, "the end of the verify",
    )  # fmt: skip
    assert (verified["bad"], verified["replaced"]) == (1, 1)
    waiting.until(lambda: shown(node.view("train")) == FILES, 30, "the right bytes")


def test_image_gives_its_room_when_an_operator_asks_and_comes_back(
    cluster: CephCluster, area: Path, node: Agent, image: str
) -> None:
    """Nothing can map it here: so it goes only when nobody reads it."""
    node.cache.update(settings(cluster, area, image))
    node.start()
    taken = node.wait_state("train", "complete")["store_bytes"]
    node.wait_served("train", "store")
    told = node.cli("dataset", "show", "train")
    assert f"rbd rbd/{image}@v1 (snapshot)" in told.stdout, told
    name = next(iter(FILES))
    with (node.view("train") / name).open("rb") as held:
        reader = subprocess.Popen(["sleep", "600"], stdin=held)
    try:
        refused = node.cli("dataset", "evict", "train")
        assert refused.returncode == 6, refused
        assert f"pid {reader.pid} (sleep)" in refused.stderr
    finally:
        reader.kill()
        reader.wait()
    said = node.cli("dataset", "evict", "train", seconds=120)
    assert said.returncode == 0, said.stderr
    given = node.dataset("train")
    assert (given["state"], given["served_by"], given["files"]["done"]) == ("evicted", "none", 0)
    assert given["evict"]["bytes"] > taken * 0.9
    assert not list(node.folder.glob("store/train/*/image"))
    assert not loops(node)
    node.kill()
    node.start()
    assert node.dataset("train")["state"] == "evicted", "it stays out until it is asked for"
    node.tell("train", "warm")
    node.wait_state("train", "complete")
    node.wait_served("train", "store")
    assert shown(node.view("train")) == FILES


def test_snapshot_made_anew_is_another_generation(
    cluster: CephCluster, area: Path, node: Agent, image: str
) -> None:
    """Who has the old one as a volume keeps it; new pods wait for the new one."""
    node.cache.update(settings(cluster, area, image))
    kubelet = csi.Kubelet(area / "k")
    kubelet.serve(node)
    node.start()
    node.wait_state("train", "complete")
    node.wait_served("train", "store")
    direct, parent, late = kubelet.target(), kubelet.target(), kubelet.target()
    kubelet.publish(direct, VOLUME)
    kubelet.publish(parent, {**VOLUME, "layout": "parent"})
    made = area / "anew"
    rbdimage.file_system(made, "ext4", 64 * MIB, other)
    cluster.run("rbd", "snap", "purge", "--no-progress", f"rbd/{image}")
    cluster.run("rbd", "rm", "--no-progress", f"rbd/{image}")
    rbdimage.imported(cluster, made, image)

    def anew() -> bool:
        with contextlib.suppress(OSError):  # the view was swapped between a look and a read
            return shown(node.view("train")) == {"other": b"other"}
        return False

    waiting.until(anew, 90, "the new bytes")
    node.wait_state("train", "complete")
    kubelet.publish(late, VOLUME)
    assert shown(direct) == FILES
    assert shown(late) == shown(parent / "data") == {"other": b"other"}
    for each in (direct, parent, late):
        kubelet.unpublish(each)
    assert any("another image" in note for note in node.dataset("train")["notes"])
