"""Warming from a CephFS snapshot against other ways of getting the same files from the same mount.

Every side of every round begins alike: all caches of this machine dropped, and a ceph-fuse mount
made anew with the agent's own (tuned) configuration, in which nothing was looked up yet. Ours makes
that mount itself, within its time, and ends when everything is durable, sealed and served; the
peers' time ends with their last write, whether or not it has reached the disk. Every program's time
begins with its start.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench import agent, harness, reader, trees
from tests.testbed import ceph, foreground, waiting
from tests.testbed.agent import Agent, ApiError

SMALLEST, LARGEST = 4096, 128 * 1024
NAME = "ceph"
SNAPSHOT = "v1"
READERS = 8
FILL_SECONDS = 180.0
PEER_SECONDS = 180


def run(place: harness.Workplace) -> harness.Results:
    with place.room("fill") as room, ceph.running(room / "ceph") as cluster:
        with cluster.mounted(room / "writer") as writer:
            number = place.size(20_000, 100)
            size = trees.make(writer / "data", number, SMALLEST, LARGEST, threads=8)
            cluster.wait_until_not_recent()
            (writer / "data" / ".snap" / SNAPSHOT).mkdir()
        secret = room / "secret"
        secret.write_text(cluster.secret())
        settings = {
            "budget": "20GiB",
            "reserve": "1%",
            "datasets": [
                {
                    "name": NAME,
                    "freshness": "snapshot",
                    "warm": False,
                    "source": {
                        "kind": "cephfs",
                        "monitors": [cluster.monitor],
                        "path": "/data",
                        "snapshot": SNAPSHOT,
                        "user": "admin",
                        "secret_file": str(secret),
                        "client": "fuse",
                    },
                }
            ],
        }
        with agent.running(room / "agent", settings) as nodeagent:
            yield from _measure(place, Sides(place, room, nodeagent, number, size))


class Sides:
    """Each side from the same state to the same files, in files per second."""

    def __init__(
        self, place: harness.Workplace, room: Path, nodeagent: Agent, number: int, size: int
    ) -> None:
        self._room = room
        self._agent = nodeagent
        nodeagent.wait_served(NAME, "source")
        # The agent's configuration of its mount, for the peers: it goes when the mount goes.
        made = nodeagent.state / "sources" / NAME
        self._conf = room / "peers.conf"
        text = (made / "ceph.conf").read_text().replace(str(made), str(room))
        self._conf.write_text(text)
        shutil.copy(made / "keyring", room / "keyring")
        nodeagent.tell(NAME, "warm", {})
        nodeagent.wait_state(NAME, "complete", seconds=FILL_SECONDS)
        self.view = nodeagent.view(NAME)
        files, found = reader.files_below(self.view)
        if (len(files), found) != (number, size):
            raise RuntimeError(f"the view has {len(files)} files of {found} bytes")
        hot = place.size(reader.HOT_SECONDS, 0.05)
        self.read = reader.Reader(room, "ceph", files, size, hot)
        self._files, self._size = number, size

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """A new mount like the agent's; yields the snapshot."""
        target = self._room / "peer"
        command = [
            *("ceph-fuse", "-f", "-c", str(self._conf), "-n", "client.admin", str(target)),
            *("--client_mountpoint=/data", "--client_fs=cephfs", "-o", "ro"),
        ]
        with foreground.mounted(command, target, target.with_suffix(".log")):
            yield target / ".snap" / SNAPSHOT

    def ours(self) -> float:
        with contextlib.suppress(ApiError):  # removed already
            self._agent.remove(NAME)
        trash = self._agent.folder / "store" / ".trash"
        # The last round's files are unlinked in the background: no part of this round's work.
        waiting.until(lambda: not any(trash.iterdir()), FILL_SECONDS, "an empty trash")
        harness.drop_caches()
        began = time.time()
        self._agent.tell(NAME, "warm", {})
        shown = self._agent.wait_state(NAME, "complete", seconds=FILL_SECONDS)
        if shown["files"]["done"] != self._files or shown["bytes"]["done"] != self._size:
            raise RuntimeError(f"complete with {shown['files']} {shown['bytes']}")
        return self._files / float(shown["completed"] - began)

    def _copying(self, *command: str) -> float:
        target = self._room / "copy"
        with self.mounted() as source:
            harness.drop_caches()
            began = time.monotonic()
            words = [word.format(source=source, target=target) for word in command]
            environment = {
                "RCLONE_CONFIG": str(self._room / "rclone.conf"),
                "PATH": "/usr/bin:/bin",
            }
            subprocess.run(words, check=True, timeout=PEER_SECONDS, env=environment)
            seconds = time.monotonic() - began
        files, size = reader.files_below(target)
        shutil.rmtree(target)
        if (len(files), size) != (self._files, self._size):
            raise RuntimeError(f"{command[0]} copied {len(files)} files of {size} bytes")
        return self._files / seconds

    def cp(self) -> float:
        return self._copying("cp", "-a", "{source}", "{target}")

    def rclone(self) -> float:
        return self._copying("rclone", "-q", "copy", "--transfers", "32", "{source}", "{target}")

    def reading(self) -> float:
        """Through the mount, by eight threads that know the names."""
        with self.mounted() as source:
            return self.read.cold(source, READERS)()

    def objects(self) -> float:
        """By our own quickest way, without storing anything."""
        harness.drop_caches()
        root = f"/data/.snap/{SNAPSHOT}"
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.objects", str(self._conf), root],
            check=True, capture_output=True, text=True, timeout=PEER_SECONDS, cwd=harness.ROOT,
        )  # fmt: skip
        seconds = time.monotonic() - began
        result = json.loads(done.stdout)
        if (result["files"], result["bytes"]) != (self._files, self._size):
            raise RuntimeError(f"reading objects gave {result}")
        return self._files / seconds


def _measure(place: harness.Workplace, sides: Sides) -> harness.Results:
    names = {
        "ours": sides.ours,
        "cp": sides.cp,
        "rclone": sides.rclone,
        "read": sides.reading,
        "objects": sides.objects,
    }
    rates = place.in_turn(names)
    for name, target in (("cp", 3.0), ("rclone", 1.5), ("read", 0.8), ("objects", 0.8)):
        yield f"fill_vs_{name}", harness.at_least(rates["ours"], rates[name], target, "files/s")
    with sides.mounted() as source:
        hot = {
            "view": sides.read.hot(sides.view, READERS),
            "mount": sides.read.hot(source, READERS),
        }
        view, mount = place.in_turn(hot).values()
        yield "view_hot_vs_cephfuse", harness.at_least(view, mount, 10, "files/s")
