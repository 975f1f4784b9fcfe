"""The power goes while a dataset fills: every name that the tree has afterwards has right bytes."""

import contextlib
import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest
import xxhash

from tests.cache.test_space import disk
from tests.testbed import grave, trees
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

# linux/fs.h: _IOR('X', 125, __u32); 1 flushes the journal first, 2 does not
SHUTDOWN = 0x8004587D
LOG_FLUSHED, LOG_LOST = 1, 2


def cut(ssd: Path, flag: int) -> None:
    descriptor = os.open(ssd, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", flag))
    finally:
        os.close(descriptor)


def remount(ssd: Path, image: Path) -> None:
    subprocess.run(["umount", str(ssd)], check=True, timeout=60)
    # A loop device of its own: should anything still hold the file system that was cut (a mount
    # namespace of somebody else), the same device would bring back that one, dead as it is.
    command = ["losetup", "-f", "--show", str(image)]
    device = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    options = ["-o", "nouuid"] if image.name == "xfs.img" else []
    subprocess.run(["mount", *options, device.stdout.strip(), str(ssd)], check=True, timeout=60)


def empty_or_wrong(tree: Path) -> list[str]:
    """Files that are not what their name and checksum promise."""
    bad = []
    for path, directory, name, _ in trees.walk(tree):
        full = f"/proc/self/fd/{directory}/{os.fsdecode(name)}"
        if os.path.isfile(full):
            data = Path(full).read_bytes()
            kept = os.getxattr(full, "trusted.nodeagent.xxh3-128").decode()
            if xxhash.xxh3_128_hexdigest(data) != kept:
                bad.append(f"{path!r}: {len(data)} bytes")
    return bad


def marked(tree: Path, source: Path) -> int:
    """How many directories hide the source; each of them must have every name of it."""
    found = 0
    for folder in tree.iterdir():
        if "trusted.overlay.opaque" in os.listxattr(folder):
            assert sorted(os.listdir(folder)) == sorted(os.listdir(source / folder.name))
            found += 1
    return found


def staged_files(staging: Path) -> int:
    """Files of all staging folders; a folder may be renamed away meanwhile."""
    found = 0
    for folder in staging.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += len(os.listdir(folder))
    return found


def wait_for_batches(node: Agent, staged: int) -> None:
    """Until more batches are in the store and the next one has this many files in staging."""
    least = node.dataset("a")["files"]["done"] + 150
    node.wait_for(lambda: node.dataset("a")["files"]["done"] > least, 60, "two more batches")
    (generation,) = node.generations("a")
    staging = generation / "staging"
    node.wait_for(lambda: staged_files(staging) >= staged, 60, "a batch under way")


@pytest.mark.parametrize("flag", [LOG_FLUSHED, LOG_LOST])
@pytest.mark.parametrize("fstype", ["ext4", "xfs"])
def test_fill_survives_power_cuts(area: Path, node: Agent, fstype: str, flag: int) -> None:
    source = area / "source"
    trees.plain(source, 1500, directories=60, mean=20_000)
    with disk(area, fstype, 400 * 2**20) as ssd:
        image = area / f"{fstype}.img"
        node.put_store(ssd / "store")
        node.cache["fill"] = {"files_per_second": 100}
        node.add_dir("a", source)
        node.start()
        node.wait_for(lambda: node.dataset("a")["files"]["done"] > 20, 60, "some files")
        survived = sealed = 0
        for round_ in range(3):
            wait_for_batches(node, staged=10 + 20 * round_)
            # What is not synced when the power goes must be seen to be lost, or nothing is shown.
            bait = ssd / f"bait{round_}"
            (ssd / "bait.new").write_bytes(b"z" * 8192)
            (ssd / "bait.new").rename(bait)
            cut(ssd, flag)
            node.kill()
            node.wait_for(lambda: not node.passes(), 20, "the pass to end")
            subprocess.run(["umount", "-l", str(node.view("a"))], check=False, timeout=30)
            remount(ssd, image)
            assert not bait.exists() or bait.read_bytes() != b"z" * 8192, "nothing was at risk"
            bait.unlink(missing_ok=True)
            tree = node.tree("a")
            assert empty_or_wrong(tree) == []
            sealed += marked(tree, source)
            node.start()
            node.wait_served("a", "source", "overlay")
            with grave.wrong_bytes():
                assert trees.differences(trees.records(source), trees.records(node.view("a"))) == []
            survived += sum(r.kind == "file" for r in trees.records(tree, content=False).values())
        assert survived and sealed, "nothing was there to be checked"
        node.cache["fill"] = {}
        node.write()
        node.wait_state("a", "complete", seconds=90)
        trees.assert_equal(source, node.view("a"))
        assert empty_or_wrong(node.tree("a")) == []
        node.end()


def test_complete_dataset_survives_power_cut(area: Path, node: Agent) -> None:
    source = area / "source"
    trees.plain(source, 400, mean=20_000)
    with disk(area, "ext4", 200 * 2**20) as ssd:
        node.put_store(ssd / "store")
        node.add_dir("a", source)
        node.start()
        # As soon as it is said to be complete, and not a moment later.
        node.wait_for(lambda: node.dataset("a")["state"] == "complete", 60, "a to be complete")
        cut(ssd, LOG_LOST)
        node.kill()
        subprocess.run(["umount", "-l", str(node.view("a"))], check=False, timeout=30)
        remount(ssd, area / "ext4.img")
        trees.assert_equal(source, node.tree("a"))
        source.rename(area / "gone")  # nothing is needed of the source
        node.start()
        node.wait_state("a", "complete")
        trees.assert_equal(area / "gone", node.view("a"))
        node.end()
