"""CephFS as a source: odd trees at a snapshot, unflushed writers, a client that dies."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import mountinfo
from tests.cache import test_access
from tests.testbed import ceph, held, leftovers, trees, waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture
def fs(run_folder: Path, cluster: ceph.CephCluster) -> Iterator[Path]:
    """The root of the session's CephFS, mounted for writing."""
    target = run_folder / f"fs-{os.urandom(3).hex()}"
    with cluster.mounted(target) as mounted:
        yield mounted


def dataset(cluster: ceph.CephCluster, area: Path, path: str, **more: Any) -> dict[str, Any]:
    secret = area / "secret"
    secret.write_text(cluster.secret())
    source = {
        "kind": "cephfs", "monitors": [cluster.monitor], "path": path, "snapshot": "v1",
        "user": "admin", "secret_file": str(secret), **more,
    }  # fmt: skip
    return {"name": "a", "freshness": "snapshot", "source": source}


def snapshot(fs: Path, path: str) -> Path:
    made = fs / path / ".snap" / "v1"
    made.mkdir()
    return made


def begin(node: Agent, wanted: dict[str, Any]) -> held.Fill:
    """A fill that is held, its overlay in place."""
    node.cache["datasets"] = [wanted]
    fill = held.Fill(node, 20)
    node.start()
    node.wait_served("a", "overlay")
    fill.wait()
    return fill


def daemons(node: Agent) -> list[int]:
    """ceph-fuse processes of the agent's source mounts."""
    found = []
    for pid in leftovers.processes(node.state):
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/comm").read_text().startswith("ceph-fuse"):
                found.append(pid)
    return found


def test_snapshot_of_odd_tree_is_copied_whole(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    top = fs / "odd"
    top.mkdir()
    trees.plain(top, 200, directories=3, mean=9000)
    raw = os.fsencode(top)
    trees.write(raw + b"/not utf-8 \xff", b"bytes")
    os.mkdir(raw + b"/dir \x80")
    trees.write(raw + b"/dir \x80/new\nline", b"odd")
    trees.write(raw + b"/" + b"n" * 255, b"long name")
    trees.write(raw + b"/empty", b"")
    os.mkdir(raw + b"/empty dir")
    os.symlink(b"d0/f00000", raw + b"/link")
    os.symlink(b"/dangling \xff", raw + b"/dangling")
    trees.write(raw + b"/one", b"linked" * 1000)
    os.link(raw + b"/one", raw + b"/two")
    trees.write(raw + b"/xattr", b"x" * 5000)
    os.setxattr(raw + b"/xattr", "user.label", b"\x00\xff")
    os.setxattr(raw + b"/d1", "user.label", b"directory")
    for name, size in ((b"4MiB", 4 * 2**20), (b"4MiB+1", 4 * 2**20 + 1), (b"9MiB", 9 * 2**20)):
        trees.write(raw + b"/" + name, os.urandom(size))
    with open(raw + b"/hole", "wb") as stream:
        stream.truncate(3 * 2**20)
    with open(raw + b"/end hole", "wb") as stream:
        stream.write(b"begin")
        stream.truncate(100_000)
    striped = raw + b"/striped"
    trees.write(striped, b"")
    os.setxattr(
        striped, "ceph.file.layout", b"stripe_unit=65536 stripe_count=2 object_size=1048576"
    )
    trees.write(striped, os.urandom(900_000))
    os.mkfifo(raw + b"/fifo")
    os.chmod(raw + b"/one", 0o4710)
    os.chown(raw + b"/xattr", 1001, 1002)
    trees.settle(top)
    frozen = snapshot(fs, "odd")
    node.cache["datasets"] = [dataset(cluster, area, "/odd")]
    # What changes after the snapshot is not part of it.
    trees.write(raw + b"/d0/f00000", b"later")
    trees.write(raw + b"/later", b"later")
    os.unlink(raw + b"/d0/f00003")
    node.start()
    shown = node.wait_state("a", "complete", seconds=120)
    assert shown["files"]["skipped"] == 1
    trees.assert_equal(frozen, node.view("a"), without=frozenset({b"fifo"}))


def test_snapshot_includes_unflushed_data(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    (fs / "dirty").mkdir()
    old, new = b"old " * 2000, b"new " * 2000
    names = [f"f{number}" for number in range(40)]
    for name in names:
        with (fs / "dirty" / name).open("wb") as stream:
            stream.write(old)
            os.fsync(stream.fileno())
    import cephfs  # unit tests are collected without Debian's bindings

    writer = cephfs.LibCephFS(conffile=str(cluster.conf), auth_id="admin")
    # Holds what is written for as long as it may.
    for key in ("client_oc_max_dirty_age", "client_caps_release_delay"):
        writer.conf_set(key, "300")
    writer.mount()
    try:
        held = []
        for name in names:
            descriptor = writer.open(f"/dirty/{name}", os.O_WRONLY, 0o644)
            writer.write(descriptor, new, 0)  # in place, of the same length
            held.append(descriptor)
        appended = writer.open("/dirty/fresh", os.O_WRONLY | os.O_CREAT, 0o644)
        writer.write(appended, new, 0)
        writer.mksnap("/dirty", "v1", 0o755)
        node.cache["datasets"] = [dataset(cluster, area, "/dirty")]
        node.start()
        node.wait_state("a", "complete", seconds=120)
        stored = {name: (node.view("a") / name).read_bytes() for name in [*names, "fresh"]}
    finally:
        for descriptor in [*held, appended]:
            writer.close(descriptor)
        writer.shutdown()
    truth = fs / "dirty" / ".snap" / "v1"
    for name, data in stored.items():
        assert data == (truth / name).read_bytes(), f"{name}: {data[:8]!r}"
    assert stored["f0"] == new, "the writer had flushed nothing that mattered: no proof"


def test_dead_ceph_fuse_is_replaced(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    top = fs / "killed"
    trees.plain(top, 400)
    frozen = snapshot(fs, "killed")
    fill = begin(node, dataset(cluster, area, "/killed"))
    (daemon,) = daemons(node)
    os.kill(daemon, signal.SIGKILL)
    fill.go_on()
    node.tell("a", "warm")

    def healed() -> bool:
        try:
            return trees.differences(trees.records(frozen), trees.records(node.view("a"))) == []
        except OSError:
            return False

    node.wait_for(healed, 90, "the view to heal")
    node.wait_state("a", "complete", seconds=90)


def test_source_mount_of_other_path_is_replaced(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    for name, files in (("before", 300), ("after", 120)):
        trees.plain(fs / name, files, seed=files)
        snapshot(fs, name)
    fill = begin(node, dataset(cluster, area, "/before"))
    node.kill()
    assert [m for m in mountinfo.read() if m.target.startswith(f"{node.state}/")]
    node.cache["datasets"] = [dataset(cluster, area, "/after")]
    fill.go_on()
    node.start()
    shown = node.wait_state("a", "complete", seconds=90)
    assert shown["files"]["done"] == 120
    trees.assert_equal(fs / "after" / ".snap" / "v1", node.view("a"))

    def released() -> bool:
        left = [m for m in mountinfo.read() if m.target.startswith(f"{node.state}/")]
        return not left and not (node.state / "sources" / "a").exists()

    node.wait_for(released, 30, "the source to be let go, with what was noted of it")
    assert 'cache_source_reachable{dataset="a"} 1.0' in node.get("/metrics")  # nobody is paged


def test_secret_is_never_shown(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    trees.plain(fs / "secret", 50)
    snapshot(fs, "secret")
    begin(node, dataset(cluster, area, "/secret"))
    secret = cluster.secret().encode()
    for pid in leftovers.processes(node.folder):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # it has just ended
                assert secret not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert (
        secret.decode()
        not in subprocess.run(["ps", "auxwwwe"], capture_output=True, text=True, check=True).stdout
    )
    assert secret.decode() not in node.said()
    answers = [node.get("/v1/datasets"), node.dataset("a"), node.get("/v1/findings")]
    assert secret.decode() not in str(answers)
    for file in node.state.rglob("*"):
        ours = file.is_file() and not file.is_symlink() and "mount" not in file.parts
        if ours and secret in file.read_bytes():
            assert file.stat().st_mode & 0o077 == 0


def test_what_ceph_fuse_prints_goes_into_no_pipe_of_its_protocol(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    trees.plain(fs / "said", 20)
    snapshot(fs, "said")
    node.cache["datasets"] = [dataset(cluster, area, "/said") | {"warm": False}]
    node.start()
    node.wait_served("a", "source")
    [pid] = daemons(node)
    [log] = (node.state / "sources").glob("*/ceph-fuse.log")
    places = [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)]
    assert places == ["/dev/null", str(log), str(log)]


def test_remove_of_dropped_dataset_leaves_nothing(
    area: Path, node: Agent, cluster: ceph.CephCluster, fs: Path
) -> None:
    trees.plain(fs / "lost", 200)
    snapshot(fs, "lost")
    begin(node, dataset(cluster, area, "/lost"))
    folder = node.state / "sources" / "a"
    assert (folder / "keyring").exists() and os.path.ismount(folder / "mount")
    node.cache["datasets"] = []
    node.write()
    node.wait_for(lambda: node.get("/v1/datasets")["orphans"] == ["a"], 30, "a to be an orphan")
    assert node.cli("dataset", "remove", "a").returncode == 0
    assert not folder.exists()
    assert not (node.state / "datasets" / "a.json").exists()
    node.wait_for(lambda: not daemons(node), 20, "ceph-fuse to end")


def test_acls_are_kept_and_obeyed(
    area: Path, node: Agent, run_folder: Path, cluster: ceph.CephCluster
) -> None:
    """On files, directories and the root; a user whom an ACL refuses stays refused."""
    target = run_folder / f"fs-{os.urandom(3).hex()}"
    options = ("--client_acl_type=posix_acl", "--fuse_default_permissions=0")
    with cluster.mounted(target, *options) as fs:
        top = fs / "acl"
        trees.plain(top, 60, directories=3)
        os.chmod(top, 0o755)
        refused, granted = 4711, 4712

        def give(entry: str, *paths: Path) -> None:
            subprocess.run(
                ["setfacl", "-m", entry, *map(str, paths)], check=True, timeout=waiting.limit(30)
            )

        give(f"u:{refused}:---", top / "d0" / "f00000")
        os.chmod(top / "d1" / "f00001", 0o640)
        give(f"u:{granted}:r--", top / "d1" / "f00001")
        give(f"u:{refused}:---", top / "d2")
        give(f"d:u:{granted}:r-x", top / "d2")
        give(f"g:{granted}:r-x", top)
        frozen = snapshot(fs, "acl")
        truth = trees.records(frozen)
        node.cache["datasets"] = [dataset(cluster, area, "/acl")]
        node.start()
        node.wait_state("a", "complete", seconds=90)
        assert trees.differences(truth, trees.records(node.view("a"))) == []
        kept = [path for path, what in truth.items() if "posix_acl" in str(what)]
        assert len(kept) >= 3, "no ACL was there to be kept"
    node.folder.chmod(0o755)

    def reads(name: str, user: int) -> bool:
        return test_access.reads(node.view("a") / name, user)

    assert reads("d0/f00000", granted)
    assert not reads("d0/f00000", refused)
    assert reads("d1/f00001", granted)
    assert not reads("d1/f00001", refused)
    assert not reads("d2/f00002", refused)
