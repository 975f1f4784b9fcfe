"""ceph-fuse is in no cgroup of the agent: a container that ends takes all in its own with it."""

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache.sources import cephfs_mount
from tests.testbed import node_cgroups, waiting


@pytest.fixture
def container() -> Iterator[str]:
    """A cgroup in each hierarchy, as a container has."""
    name = f"nodeagent-test-{uuid.uuid4().hex[:8]}"
    folders = [root / name for root in node_cgroups.hierarchies() if root.name != "cpuset"]
    for each in folders:
        each.mkdir()
    yield name
    waiting.until(lambda: not any(map(_processes, folders)), 10, "the cgroups to be empty")
    for each in folders:
        each.rmdir()


def _processes(folder: Path) -> str:
    return (folder / "cgroup.procs").read_text()


@pytest.mark.real
def test_daemon_leaves_the_cgroup_of_every_hierarchy(
    container: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as daemon:
        try:
            for root in node_cgroups.hierarchies():
                if (root / container).exists():
                    (root / container / "cgroup.procs").write_text(str(daemon.pid))
            there = Path(f"/proc/{daemon.pid}/cgroup")
            assert container in there.read_text()
            monkeypatch.setattr(cephfs_mount, "_daemons", lambda _: [daemon.pid])
            cephfs_mount._move_out_of_our_cgroup(Path("/nowhere"))
            assert container not in there.read_text()
        finally:
            daemon.kill()


def test_each_hierarchy_has_its_way_out(tmp_path: Path) -> None:
    for name, files in (
        ("unified", ("cgroup.procs", "cgroup.controllers")),
        ("unified/kubepods", ("cgroup.procs", "cgroup.controllers")),
        ("cpuset", ("cgroup.procs", "cpuset.cpus")),
        ("devices", ("cgroup.procs",)),
        ("no hierarchy", ()),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    (tmp_path / "cpu").symlink_to("devices")
    own = tmp_path / "unified" / cephfs_mount.CGROUP
    assert cephfs_mount.cgroups(tmp_path) == [
        tmp_path / "cpuset", tmp_path / "devices" / cephfs_mount.CGROUP, own,
    ]  # fmt: skip
    # A node with v2 alone has one hierarchy, whatever cgroups lie below.
    assert cephfs_mount.cgroups(tmp_path / "unified") == [own]
    assert cephfs_mount.cgroups(tmp_path / "nowhere") == []
