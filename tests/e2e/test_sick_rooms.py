"""Each room broken on purpose: the others serve, readiness and findings say so, and it heals."""

import contextlib
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import blockdev, cell, containerd, trees
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

HEALED_SECONDS = 90.0


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cell.Cell]:
    with cell.cell(tmp_path_factory.mktemp("cell")) as made:
        yield made


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[containerd.Containerd]:
    made = containerd.Containerd(tmp_path_factory.mktemp("containerd"), "trixie")
    try:
        made.start()
        yield made
    finally:
        made.remove()


@pytest.fixture
def rooms(area: Path, node: Agent, where: cell.Cell, daemon: containerd.Containerd) -> Agent:
    """An agent with all rooms and one dataset, not started."""
    trees.plain(area / "source", 20)
    node.add_dir("a", area / "source")
    node.settings["preheat"] = {
        "socket": str(daemon.socket), "hosts_dir": str(daemon.certs), "images": [],
    }  # fmt: skip
    node.settings["volumes"] = {
        "audit": {"enabled": False},
        "guard": cell.settings(where, mode="dry-run", names=["none"]),
    }
    return node


def sick(node: Agent) -> dict[str, str]:
    """What readiness says of each room that is not ready."""
    reasons = node.get("/readyz")["reasons"]
    return {reason.partition(": ")[0]: reason.partition(": ")[2] for reason in reasons}


def found(node: Agent, rule: str) -> list[dict[str, Any]]:
    return [each for each in node.findings() if each["rule"] == rule]


def told(node: Agent, method: str, path: str) -> int:
    """The status of a refusal; 0 when there is none."""
    try:
        node.call(method, path)
    except ApiError as error:
        return error.status
    return 0


def assert_serves(node: Agent, *names: str) -> None:
    """Each named room does its work: it is asked for some."""
    assert node.get("/healthz")["alive"]
    if "cache" in names:
        node.wait_state("a", "complete")
        trees.assert_equal(node.folder.parent / "source", node.view("a"))
    if "preheat" in names:
        assert node.get("/v1/images")["images"] == []
    if "volumes" in names:
        assert node.get("/v1/volumes/guard")["attached"]


def healed(node: Agent) -> None:
    node.wait_for(lambda: sick(node) == {}, HEALED_SECONDS, "all rooms to be ready")
    assert_serves(node, "cache", "preheat", "volumes")


@contextlib.contextmanager
def disk(area: Path) -> Iterator[Path]:
    """An ext4 on a loop device that can be mounted at the folder it yields."""
    image, target = area / "ssd.img", area / "ssd"
    with image.open("wb") as stream:
        stream.truncate(48 * 2**20)
    subprocess.run(["mkfs.ext4", "-qF", "-m", "0", str(image)], check=True)
    losetup = ["losetup", "--find", "--show", str(image)]
    device = subprocess.run(losetup, check=True, capture_output=True, text=True).stdout.strip()
    target.mkdir()
    (area / "device").write_text(device)
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=False)
        blockdev.detach(device, str(area))


def mount(area: Path, *options: str) -> None:
    device = (area / "device").read_text()
    subprocess.run(["mount", *options, device, str(area / "ssd")], check=True)


@pytest.mark.parametrize("setting", [True, False], ids=["setting", "memory"])
def test_unmounted_ssd_does_not_fill_the_disk_below(
    area: Path, rooms: Agent, setting: bool
) -> None:
    with disk(area) as ssd:
        rooms.put_store(ssd / "store")
        if setting:
            rooms.cache["disk"] = str(ssd)
        else:  # used once
            mount(area)
            rooms.start()
            healed(rooms)
            assert rooms.stop() == 0
            subprocess.run(["umount", "-l", str(rooms.view("a"))], check=True)
            subprocess.run(["umount", str(ssd)], check=True)
        rooms.start()
        rooms.wait_served("a", "source")
        rooms.wait_for(lambda: list(sick(rooms)) == ["cache"], 30, "the other rooms to be ready")
        assert f"no disk is mounted at {ssd}" in sick(rooms)["cache"]
        (finding,) = found(rooms, "store-unusable")
        assert f"mount the SSD at {ssd}" in finding["advice"]
        trees.assert_equal(area / "source", rooms.view("a"))
        assert_serves(rooms, "preheat", "volumes")
        assert told(rooms, "POST", "/v1/datasets/a/warm") >= 400
        assert list(ssd.iterdir()) == [], "nothing was written below the mount point"
        mount(area)
        healed(rooms)
        assert found(rooms, "store-unusable") == []
        assert (ssd / "store" / "a").is_dir()


def test_ssd_that_goes_and_comes_back(area: Path, rooms: Agent) -> None:
    with disk(area) as ssd:
        rooms.put_store(ssd / "store")
        mount(area)
        rooms.start()
        healed(rooms)
        subprocess.run(["umount", "-l", str(ssd)], check=True)
        rooms.wait_for(lambda: found(rooms, "store-unusable"), 60, "the finding")
        rooms.wait_for(lambda: list(sick(rooms)) == ["cache"], 30, "the cache to begin anew")
        rooms.wait_for(
            lambda: "read from" in sick(rooms).get("cache", ""), 30, "the cache to begin anew"
        )
        rooms.wait_for(lambda: not told(rooms, "GET", "/v1/datasets"), 30, "an answer")
        rooms.wait_served("a", "source")
        trees.assert_equal(area / "source", rooms.view("a"))
        assert_serves(rooms, "preheat", "volumes")
        assert list(ssd.iterdir()) == []
        mount(area)
        healed(rooms)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_ssd_that_cannot_be_written(area: Path, rooms: Agent, how: str) -> None:
    with disk(area) as ssd:
        rooms.put_store(ssd / "store")
        mount(area)
        ballast = ssd / "ballast"
        if how == "full":
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
                while True:
                    stream.write(b"x" * 2**16)
            with contextlib.suppress(OSError), (ssd / "more").open("wb", buffering=0) as stream:
                while True:
                    stream.write(b"x")
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(ssd)], check=True)
        rooms.start()
        rooms.wait_served("a", "source")
        rooms.wait_for(lambda: list(sick(rooms)) == ["cache"], 30, "the other rooms to be ready")
        trees.assert_equal(area / "source", rooms.view("a"))
        assert_serves(rooms, "preheat", "volumes")
        (finding,) = found(rooms, "store-unusable")
        assert ("full" if how == "full" else "read-only") in finding["message"].lower()
        if how == "full":
            ballast.unlink()
            (ssd / "more").unlink()
        else:
            subprocess.run(["mount", "-o", "remount,rw", str(ssd)], check=True)
        healed(rooms)


def test_state_folder_of_the_guard_that_cannot_be_written(rooms: Agent) -> None:
    """A file where the ledger's folder has to be stands for a state folder that is lost."""
    rooms.state.mkdir()
    (rooms.state / "volumes").write_text("in the way")
    rooms.start()
    rooms.wait_for(lambda: list(sick(rooms)) == ["volumes"], 30, "only volumes to be sick")
    assert_serves(rooms, "cache", "preheat")
    (finding,) = found(rooms, "component-degraded")
    assert finding["subject"] == "volumes"
    assert str(rooms.state / "volumes") in finding["message"]
    (rooms.state / "volumes").unlink()
    healed(rooms)
    assert found(rooms, "component-degraded") == []


def test_no_socket_of_the_runtime(area: Path, rooms: Agent, daemon: containerd.Containerd) -> None:
    late = area / "late.sock"
    rooms.settings["preheat"]["socket"] = str(late)
    rooms.start()
    # Until it has tried, it says that it is not connected yet.
    rooms.wait_for(lambda: str(late) in sick(rooms).get("preheat", ""), 30, "preheat to be sick")
    rooms.wait_for(lambda: list(sick(rooms)) == ["preheat"], 30, "the other rooms to be ready")
    assert_serves(rooms, "cache", "volumes")
    rooms.wait_for(lambda: found(rooms, "preheat-runtime"), 30, "the finding")
    late.symlink_to(daemon.socket)
    healed(rooms)


def test_socket_of_the_runtime_that_hangs(
    area: Path, rooms: Agent, daemon: containerd.Containerd
) -> None:
    hangs = area / "h.sock"
    rooms.settings["preheat"]["socket"] = str(hangs)
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(area):
        listening.bind("h.sock")  # the whole path is too long
        listening.listen()  # and nobody ever answers
        rooms.start()
        rooms.wait_for(lambda: list(sick(rooms)) == ["preheat"], 60, "only preheat to be sick")
        assert_serves(rooms, "cache", "volumes")
        rooms.wait_for(lambda: found(rooms, "preheat-runtime"), 30, "the finding")
    hangs.unlink()
    hangs.symlink_to(daemon.socket)
    healed(rooms)


def test_node_without_libbpf(area: Path, rooms: Agent) -> None:
    """libbpf is hidden by an empty file, in the agent's own mount namespace."""
    library = (
        next(
            Path(line.split()[-1])
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/libc.so" in line
        ).parent
        / "libbpf.so.1"
    )
    assert library.exists()
    (area / "empty").write_bytes(b"")
    hide = f"mount --bind {shlex.quote(str(area / 'empty'))} {library}"
    apart = ("unshare", "--mount", "--propagation", "private", str(blockdev.APART), str(area), "--")
    shares = f'mount --make-rshared / && mount --make-private / && {hide} && exec "$@"'
    rooms.start(*apart, "sh", "-c", shares, "sh")
    rooms.wait_for(lambda: list(sick(rooms)) == ["volumes"], 30, "only volumes to be sick")
    assert "libbpf" in sick(rooms)["volumes"]
    rooms.wait_for(lambda: found(rooms, "guard-not-in-force"), 30, "the finding")
    assert rooms.get("/v1/images")["images"] == []
    rooms.wait_state("a", "complete")
    subprocess.run(
        ["nsenter", f"--mount=/proc/{rooms.pid}/ns/mnt", "umount", str(library)], check=True
    )
    rooms.wait_for(lambda: sick(rooms) == {}, HEALED_SECONDS, "the guard to be in force")
    assert rooms.get("/v1/volumes/guard")["attached"]


def test_node_without_the_right_to_load_bpf(rooms: Agent) -> None:
    """CAP_SYS_ADMIN, without which the cache could not mount, would allow BPF, too: it is gone."""
    lacks = "-sys_admin,-bpf,-perfmon,-net_admin"
    rooms.start("setpriv", f"--bounding-set={lacks}", f"--inh-caps={lacks}")
    rooms.wait_for(
        lambda: "guard is not attached" in sick(rooms).get("volumes", ""), 30, "volumes to be sick"
    )
    rooms.wait_for(lambda: found(rooms, "guard-not-in-force"), 30, "the finding")
    rooms.wait_for(lambda: "preheat" not in sick(rooms), 30, "preheat to be ready")
    assert_serves(rooms, "preheat")
    assert rooms.stop() == 0


@pytest.mark.parametrize("kind", ["missing", "pipe"])
def test_secret_that_cannot_be_read(area: Path, rooms: Agent, kind: str) -> None:
    secret = area / "ceph.secret"
    if kind == "pipe":
        os.mkfifo(secret)
    rooms.cache["datasets"].append(
        {
            "name": "b", "freshness": "snapshot",
            "source": {
                "kind": "cephfs", "monitors": ["127.0.0.1:1"], "path": "/", "snapshot": "v1",
                "secret_file": str(secret),
            },
        }
    )  # fmt: skip
    rooms.settings["volumes"]["clusters"] = [
        {"name": "c", "monitors": ["127.0.0.1:1"], "secret_file": str(secret)}
    ]
    rooms.start()
    rooms.wait_for(lambda: "secret_file" in rooms.dataset("b")["why"], 30, "the cause")
    assert "cache" in sick(rooms)
    assert_serves(rooms, "cache", "preheat", "volumes")  # dataset a is served
