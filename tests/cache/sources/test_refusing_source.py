"""A source that takes root for nobody, as NFS does with root_squash."""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache.test_access import reads
from tests.testbed import waiting
from tests.testbed.agent import Agent

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

OWNER = 1000


class Server:
    def __init__(self, area: Path) -> None:
        self.below, self.shown = area / "below", area / "shown"
        self._squash = area / "squash"
        for folder in (self.below, self.shown):
            folder.mkdir()
        for number in range(20):
            path = self.below / f"{'private' if number % 4 == 0 else 'public'}-{number}"
            path.write_bytes(b"%d" % number * 1000)
            os.chown(path, OWNER, OWNER)
            path.chmod(0o600 if path.name.startswith("private") else 0o644)
        self.squash(on=True)

    def squash(self, *, on: bool) -> None:
        self._squash.touch() if on else self._squash.unlink(missing_ok=True)

    def start(self) -> subprocess.Popen[bytes]:
        words = map(str, (self.shown, self.below, self._squash))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.testbed.squashfs", *words],
            cwd=Path(__file__).parents[3], stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process


@pytest.fixture
def server(area: Path) -> Iterator[Server]:
    closed = [str(p) for p in (area, *area.parents) if not p.stat().st_mode & stat.S_IXOTH]
    assert closed == [], "put the clone where other users may pass"
    made = Server(area)
    process = made.start()
    try:
        yield made
    finally:
        subprocess.run(["umount", "-l", str(made.shown)], check=False, timeout=waiting.limit(30))
        process.kill()
        process.communicate(timeout=waiting.limit(30))


def told(node: Agent) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        found = [each for each in node.findings() if each["rule"] == "dataset-source-refuses"]
        return found[0] if found else None

    found: dict[str, Any] = node.wait_for(there, 60, "the finding")
    return found


def test_jobs_lose_no_file_of_a_source_that_refuses_root(node: Agent, server: Server) -> None:
    assert not reads(server.shown / "private-0", 0), "this server takes root for nobody"
    private = node.view("a") / "private-0"
    node.add_dir("a", server.shown, warm=False, access={"mode": "0755"})
    node.start()
    node.wait_served("a", "source")
    assert reads(private, OWNER)
    node.tell("a", "warm")
    until = time.monotonic() + 60
    while not any(each["rule"] == "dataset-source-refuses" for each in node.findings()):
        assert reads(private, OWNER)
        assert time.monotonic() < until, node.said()[-2000:]
    finding = told(node)
    assert "private-0' (Permission denied)" in finding["message"]
    assert "no_root_squash" in finding["advice"]
    shown = node.dataset("a")
    assert (shown["served_by"], shown["state"]) == ("source", "failed"), shown
    assert "refuses root" in shown["why"]
    assert node.said().count('"view published"') == 1, "no overlay was shown"
    assert not reads(private, OWNER + 1)
    # A restart does not forget it, and once root may read all it is cached.
    node.kill()
    node.start()
    told(node)
    node.wait_served("a", "source")
    server.squash(on=False)
    node.tell("a", "warm")
    node.wait_state("a", "complete")
    assert reads(private, OWNER)
    assert not reads(private, OWNER + 1)
    node.wait_for(lambda: node.findings() == [], 30, "the finding to go")


def test_overlay_gives_way_when_root_is_refused_later(node: Agent, server: Server) -> None:
    server.squash(on=False)
    (server.below / "large").write_bytes(os.urandom(2**20))
    os.chown(server.below / "large", OWNER, OWNER)
    (server.below / "large").chmod(0o600)
    node.add_dir("a", server.shown, budget="500KiB")
    node.start()
    node.wait_state("a", "partial")
    assert node.dataset("a")["served_by"] == "overlay"
    server.squash(on=True)
    node.tell("a", "warm")
    told(node)
    node.wait_served("a", "source")
    for name in ("private-0", "large", "public-1"):
        assert reads(node.view("a") / name, OWNER), name


def test_what_a_server_decides_by_itself_is_told(node: Agent, server: Server) -> None:
    server.squash(on=False)
    node.add_dir("a", server.shown)
    node.start()
    node.wait_state("a", "complete")

    def rules() -> list[tuple[str, str]]:
        return [(each["rule"], each["severity"]) for each in node.findings()]

    node.wait_for(lambda: rules() == [("dataset-source-rights", "info")], 30, "the finding")
    node.cache["datasets"][0]["access"] = {"mode": "0750", "group": OWNER}
    node.write()
    node.wait_for(lambda: node.findings() == [], 30, "the finding to go")
