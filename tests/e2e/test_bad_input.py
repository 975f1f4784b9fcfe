"""Bad input is refused with one line (cause and remedy) and an exit code; nothing is half made."""

import base64
import functools
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from linux import mountinfo
from tests.testbed import blockdev, ceph, ports, trees, waiting
from tests.testbed.agent import Agent, ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def assert_refused(node: Agent, *words: str, code: int) -> None:
    """``run`` ends by itself with ``code`` and one line that has these words and a remedy."""
    done = node.cli("run", seconds=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert done.returncode == code, done.stderr
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]
    assert lines[0].startswith("nodeagent: ")
    assert "; " in lines[0], "no remedy"


def assert_serves_without_store(node: Agent, *words: str) -> None:
    """The agent runs, says what is wrong with the store, and serves the source."""
    node.start()
    node.wait_served("a", "source")
    ready = node.get("/readyz")
    (found,) = (each for each in node.findings() if each["rule"] == "store-unusable")
    assert not ready["ready"]
    assert found["severity"] == "critical"
    for word in words:
        assert any(word in reason for reason in ready["reasons"]), ready
        assert word in f"{found['subject']} {found['message']} {found['advice']}", found
    assert node.view("a").is_dir() and os.listdir(node.view("a"))
    done = node.cli("dataset", "warm", "a")
    assert done.returncode == 4, done.stderr
    assert node.stop() == 0


def assert_nothing_made(node: Agent) -> None:
    assert not node.store.exists() or list(node.store.iterdir()) == []
    assert not node.views.exists() or list(node.views.iterdir()) == []
    assert [m for m in mountinfo.read() if m.target.startswith(str(node.views))] == []


@pytest.fixture
def source(area: Path) -> Path:
    trees.plain(area / "source", 10)
    return area / "source"


def test_run_without_root_is_refused(area: Path, node: Agent, source: Path) -> None:
    node.add_dir("a", source)
    node.write()
    os.chmod(node.folder, 0o777)
    os.chmod(node.config, 0o644)
    script = "import sys; sys.argv[0] = 'nodeagent'; from nodeagent.main import main; main()"
    if not os.access("/root", os.X_OK):
        raise AssertionError("this test runs as root")
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all",
         sys.executable, "-c", script, "--config", str(node.config), "run"],
        capture_output=True, text=True, check=False, timeout=waiting.limit(60),
    )  # fmt: skip
    if "Permission denied" in done.stderr and done.returncode in (126, 127):
        # The interpreter lies where only root may look (a home directory): CAP_DAC_READ_SEARCH
        # lets nobody read it, and gives no right that the agent asks for.
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
             "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
             sys.executable, "-c", script, "--config", str(node.config), "run"],
            capture_output=True, text=True, check=False, timeout=waiting.limit(60),
        )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("\n") == 1
    assert "not root" in done.stderr
    assert "run it as root" in done.stderr
    assert_nothing_made(node)


def test_store_without_xattrs_is_not_used(area: Path, node: Agent, source: Path) -> None:
    (area / "below").mkdir()
    (area / "plain").mkdir()
    command = ["bindfs", "--xattr-none", str(area / "below"), str(area / "plain")]
    subprocess.run(command, check=True, timeout=waiting.limit(30))
    node.cache["store"] = str(area / "plain" / "store")
    node.add_dir("a", source)
    assert_serves_without_store(node, str(area / "plain" / "store"), "xattrs", "ext4 or XFS")
    assert list((area / "below").iterdir()) == []


def test_foreign_store_is_left_alone(area: Path, node: Agent, source: Path) -> None:
    node.store.mkdir()
    (node.store / "precious").write_bytes(b"data")
    node.add_dir("a", source)
    assert_serves_without_store(node, "not empty and not a store", "precious")
    assert (node.store / "precious").read_bytes() == b"data"
    assert os.listdir(node.store) == ["precious"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}', '{"format": "x"}'])
def test_damaged_or_newer_store_is_left_alone(
    area: Path, node: Agent, source: Path, content: str
) -> None:
    node.store.mkdir()
    (node.store / "nodeagent.json").write_text(content)
    node.add_dir("a", source)
    assert_serves_without_store(node, "cache.store")
    assert os.listdir(node.store) == ["nodeagent.json"]
    assert (node.store / "nodeagent.json").read_text() == content


def test_store_of_agent_killed_at_first_start_is_used(
    area: Path, node: Agent, source: Path
) -> None:
    (node.store / ".probe").mkdir(parents=True)
    (node.store / ".nodeagent.json.new").write_bytes(b"{")
    node.add_dir("a", source)
    node.start()
    node.wait_state("a", "complete")


def test_kernel_without_overlayfs_degrades_the_cache(area: Path, node: Agent, source: Path) -> None:
    # An edited /proc/filesystems stands in for a kernel that lacks one.
    known = Path("/proc/filesystems").read_text()
    assert "\toverlay\n" in known
    (area / "filesystems").write_text(known.replace("nodev\toverlay\n", ""))
    node.add_dir("a", source)
    hide = f"mount --bind {shlex.quote(str(area / 'filesystems'))} /proc/filesystems"
    apart = ("unshare", "--mount", "--propagation", "slave", str(blockdev.APART), str(area), "--")
    node.start(*apart, "sh", "-c", f'{hide} && PATH=/nowhere exec "$@"', "sh")
    found = node.wait_for(node.findings, 30, "the finding")[0]
    (reason,) = node.get("/readyz")["reasons"]
    assert "lacks overlayfs" in reason
    assert "modprobe overlay" in reason
    assert found["id"] == "component-degraded/cache"
    assert node.get("/healthz")["alive"]
    with pytest.raises(ApiError) as refused:
        node.get("/v1/datasets")
    assert refused.value.status == 503
    assert node.stop() == 0
    assert_nothing_made(node)


def test_listen_address_in_use_is_refused(area: Path, node: Agent, source: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", node.port))
        taken.listen()
        node.add_dir("a", source)
        node.write()
        assert_refused(node, f"127.0.0.1:{node.port}", "in use", code=4)
    assert_nothing_made(node)


# --- sources: reported and tried again, the agent runs on --------------------------------------


def test_settings_file_that_cannot_be_read_any_more_is_told(
    area: Path, node: Agent, source: Path
) -> None:
    """Gone, a directory in its place, or larger than a ConfigMap: the next start would end."""
    node.add_dir("a", source)
    node.start()

    def told() -> list[str]:
        found = node.findings()
        return [each["message"] for each in found if each["rule"] == "settings-unusable"]

    def directory() -> None:
        node.config.unlink()
        node.config.mkdir()

    def large() -> None:
        node.config.write_bytes(b"#" * (2**20 + 1))

    cases: list[tuple[Callable[[], object], str]] = [
        (node.config.unlink, "there is no such settings file"),
        (directory, "it is no regular file"),
        (large, "more than 1048576 bytes"),
    ]
    for spoil, words in cases:
        spoil()
        waiting.until(lambda: told() != [], 30, words, detail=node.said)
        assert words in told()[0]
        assert any(words in each for each in node.get("/readyz")["reasons"])
        if node.config.is_dir():
            node.config.rmdir()
        node.write()
        waiting.until(lambda: not told(), 30, "the file to be taken again", detail=told)
    assert node.stop() == 0


@pytest.fixture
def secret(area: Path, cluster: ceph.CephCluster) -> Path:
    path = area / "secret"
    path.write_text(cluster.secret())
    return path


def ceph_source(cluster: ceph.CephCluster, secret: Path, **more: Any) -> dict[str, Any]:
    return {
        "kind": "cephfs", "monitors": [cluster.monitor], "path": "/", "snapshot": "none",
        "user": "admin", "secret_file": str(secret), **more,
    }  # fmt: skip


def wrong_secret(text: str) -> str:
    """A key of the right form that is not the user's."""
    raw = bytearray(base64.b64decode(text))
    raw[-1] ^= 0xFF
    return base64.b64encode(bytes(raw)).decode()


@pytest.fixture
def cases(area: Path, cluster: ceph.CephCluster, secret: Path) -> Iterator[dict[str, Any]]:
    other = area / "wrong"
    other.write_text(wrong_secret(secret.read_text()))
    noise = area / "noise"
    noise.write_text("not a key")
    port = ports.free(1)[0]
    yield {
        "wrong secret": (ceph_source(cluster, other), ["client.admin", "refused", "secret_file"]),
        "no key": (ceph_source(cluster, noise), ["does not hold a Ceph key", "auth print-key"]),
        "no file": (ceph_source(cluster, area / "nowhere"), ["cannot be read", "put the user's"]),
        "no monitor": (
            ceph_source(cluster, secret, monitors=[f"127.0.0.1:{port}"]),
            [f"127.0.0.1:{port}", "no monitor", "network"],
        ),
        "no path": (ceph_source(cluster, secret, path="/not/there"), ["/not/there", "not exist"]),
        "no snapshot": (ceph_source(cluster, secret), ["no snapshot 'none'", "make it"]),
        "no user": (ceph_source(cluster, secret, user="nobody"), ["client.nobody", "refused"]),
        "no directory": (
            {"kind": "dir", "path": str(area / "nowhere")},
            ["directory does not exist"],
        ),
        "empty directory": ({"kind": "dir", "path": str(area / "empty")}, ["it is empty", "mount"]),
    }


def test_bad_sources_are_reported_with_cause_and_remedy(
    area: Path, node: Agent, cases: dict[str, Any], source: Path
) -> None:
    (area / "empty").mkdir()
    node.cache["source_timeout"] = f"{waiting.limit(3.0):g}s"  # nine of them mount at once
    names = {}
    for number, (case, (settings, _)) in enumerate(cases.items()):
        names[case] = f"case{number}"
        freshness = "snapshot" if settings["kind"] == "cephfs" else "frozen"
        node.cache["datasets"].append(
            {"name": f"case{number}", "freshness": freshness, "source": settings}
        )
    node.add_dir("good", source)
    node.start()

    def why(name: str) -> str:
        return str(node.dataset(name)["why"])

    node.wait_state("good", "complete")  # the others do not keep it back
    for case, (_, words) in cases.items():
        name = names[case]
        node.wait_for(functools.partial(why, name), 60, f"{case} to be reported")
        shown = node.dataset(name)
        assert shown["state"] == "waiting", case
        assert "\n" not in shown["why"], case
        for word in words:
            assert word in shown["why"], (case, shown["why"])
        assert node.generations(name) == [], case
        done = node.cli("dataset", "warm", name, "--wait")
        assert done.returncode == 5, (case, done.stderr)
        assert [w for w in words if w not in done.stderr] == [], (case, done.stderr)
        assert not node.view(name).exists(), case
    ready = node.get("/readyz")  # the others are served: it is ready, and says what is not
    assert ready["ready"] and ready["degraded"]
    assert len([r for r in ready["reasons"] if "not published" in r]) == len(cases)
    said = node.said()
    for file in ("secret", "wrong"):
        assert (area / file).read_text() not in said


def test_source_that_appears_later_is_filled(area: Path, node: Agent) -> None:
    node.add_dir("a", area / "later")
    node.start()
    node.wait_for(lambda: "directory does not exist" in node.dataset("a")["why"], 30, "the cause")
    trees.plain(area / "later", 20)
    node.wait_state("a", "complete", seconds=60)
    trees.assert_equal(area / "later", node.view("a"))
