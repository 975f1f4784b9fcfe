"""The proof of the guard where /var takes no device nodes (nodev), and with very many majors."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import blockdev, cell
from volumes import settings
from volumes.guard import canary, kernel

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def guarded(where: cell.Cell) -> Iterator[cell.Cell]:
    # krbd without single_major has a major for each device: more than fit into a small table.
    majors = {7: "loop"} | dict.fromkeys(range(512, 512 + 1000), "rbd")
    wanted = settings.GuardSettings(drivers=("loop", "rbd"))
    guard = where.guard()
    guard.apply(kernel.wanted(wanted, kernel.Mode.ENFORCE, majors))
    guard.close()
    yield where


def test_a_thousand_majors_are_guarded(guarded: cell.Cell, tmp_path: Path) -> None:
    guard = guarded.guard()
    assert len(guard.read().majors) == 1001
    guard.close()
    node = tmp_path / "node"
    os.mknod(node, 0o60600, os.makedev(1500, 0))
    done = guarded.run("sh", "-c", f"echo x > {node}")
    assert done.returncode != 0 and "not permitted" in done.stderr
    os.mknod(tmp_path / "other", 0o60600, os.makedev(1600, 0))
    assert "not permitted" not in guarded.run("sh", "-c", f"echo x > {tmp_path}/other").stderr


def _attempt(cgroup: str, directory: str) -> str:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(canary.attempt, (cgroup, directory))


def test_proof_does_not_need_device_nodes_below_the_state_directory(
    guarded: cell.Cell, tmp_path: Path
) -> None:
    blockdev.run("mount", "-t", "tmpfs", "-o", "nodev", "tmpfs", str(tmp_path))
    try:
        assert canary._attempt(str(tmp_path)).startswith("unknown")
        assert _attempt(str(guarded.path), str(tmp_path)) == "enforced"
    finally:
        blockdev.run("umount", str(tmp_path))
