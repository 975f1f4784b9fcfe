"""ceph-fuse is in no cgroup of the agent: a container that ends takes all in its own with it."""

import functools
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
    for each in folders:
        waiting.until(functools.partial(_is_empty, each), 10, f"{each} to be empty")
        each.rmdir()


def _is_empty(cgroup: Path) -> bool:
    return not (cgroup / "cgroup.procs").read_text()


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
        ("devices", ("cgroup.procs",)),
        ("no hierarchy", ()),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    (tmp_path / "cpu").symlink_to("devices")
    own = tmp_path / "unified" / cephfs_mount.CGROUP
    assert cephfs_mount._ways_out(tmp_path) == [tmp_path / "devices", own]
    # All of v2: the cgroups below are no hierarchies.
    assert cephfs_mount._ways_out(tmp_path / "unified") == [own]
