"""A view against a plain copy on the same disk, while it fills and once it is complete."""

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import agent, harness, reader, trees
from tests.testbed import foreground, held, waiting
from tests.testbed.agent import Agent

SMALLEST, LARGEST, SKEW = 512, 128 * 1024, 1.75  # mean about 15 KiB
NAME = "bench"
REFRESH_SECONDS = 1.0
FILL_SECONDS = 180.0
READERS = 8


def settings(source: Path) -> dict[str, Any]:
    """Cache settings for one frozen directory."""
    return {
        "budget": "20GiB",
        "reserve": "1%",
        "refresh_interval": f"{REFRESH_SECONDS}s",
        "datasets": [
            {"name": NAME, "freshness": "frozen", "source": {"kind": "dir", "path": str(source)}}
        ],
    }


@dataclass(frozen=True)
class Sizes:
    files: int = 40_000
    pause_at: float = 0.85
    one_cold_reader: int = 12_000
    rclone: int = 6_000


def run(place: harness.Workplace) -> harness.Results:
    sizes = Sizes(200, 0.5, 100, 50) if place.tiny else Sizes()
    with place.room("view") as room:
        source, plain = room / "source", room / "plain" / "data"
        trees.make(source, sizes.files, SMALLEST, LARGEST, skew=SKEW)
        plain.parent.mkdir()
        subprocess.run(
            ["cp", "-a", str(source), str(plain)], check=True, timeout=waiting.limit(300)
        )
        nearly = int(sizes.pause_at * sizes.files)
        with agent.running(room / "agent", settings(source), hold_after=nearly) as nodeagent:
            bench = View(place, room, sizes, plain)
            yield from bench.filling(nodeagent)
            held.Fill(nodeagent).go_on()
            nodeagent.tell(NAME, "resume", {})
            nodeagent.wait_state(NAME, "complete", seconds=FILL_SECONDS)
            yield from bench.complete(nodeagent.view(NAME))


class View:
    """Views of one source against ``plain``, a copy of it."""

    def __init__(self, place: harness.Workplace, room: Path, sizes: Sizes, plain: Path) -> None:
        self._place = place
        self._room = room
        self._sizes = sizes
        self._plain = plain

    def _reader(self, name: str, files: list[bytes]) -> reader.Reader:
        size = sum((self._plain / file.decode()).stat().st_size for file in files)
        hot = self._place.size(reader.HOT_SECONDS, 0.05)
        return reader.Reader(self._room, name, files, size, hot)

    def _against(self, sides: Mapping[str, harness.Side], target: float) -> harness.Entry:
        ours, peer = self._place.in_turn(sides).values()
        return harness.at_least(ours, peer, target, "files/s")

    def _pause_nearly_full(self, nodeagent: Agent) -> None:
        """Pause the fill when most is stored; the view is the overlay then, and refreshed."""
        held.Fill(nodeagent).wait(FILL_SECONDS)
        nodeagent.wait_served(NAME, "overlay")
        nodeagent.tell(NAME, "pause", {})
        # What was staged is still committed, and a refresh follows: wait until neither changes.
        before: tuple[Any, ...] = ()
        for _ in range(20):
            shown = nodeagent.dataset(NAME)
            now = (shown["files"]["done"], shown["refreshes"], shown["state"])
            if now == before:
                break
            before = now
            time.sleep(3 * REFRESH_SECONDS)
        if shown["served_by"] != "overlay" or shown["state"] != "paused" or not shown["refreshes"]:
            raise RuntimeError(f"not a refreshed overlay of a paused fill: {shown}")
        harness.say(f"  {shown['files']['done']} stored, {shown['refreshes']} refreshes")

    def filling(self, nodeagent: Agent) -> harness.Results:
        self._pause_nearly_full(nodeagent)
        stored, _ = reader.files_below(nodeagent.tree(NAME))
        if not self._sizes.pause_at * self._sizes.files <= len(stored) < self._sizes.files:
            raise RuntimeError(f"{len(stored)} of {self._sizes.files} files are stored")
        read = self._reader("stored", stored)
        view = nodeagent.view(NAME)
        for name, side, target in (("cold", read.cold, 0.85), ("hot", read.hot, 0.6)):
            sides = {"overlay": side(view, READERS), "plain": side(self._plain, READERS)}
            yield f"overlay_{name}_8", self._against(sides, target)

    def complete(self, view: Path) -> harness.Results:
        files, _ = reader.files_below(self._plain)
        read = self._reader("all", files)
        fewer = self._reader("some", files[:: len(files) // self._sizes.one_cold_reader])
        for threads, cold in ((1, fewer), (READERS, read)):
            sides = {"view": cold.cold(view, threads), "plain": cold.cold(self._plain, threads)}
            yield f"view_cold_{threads}", self._against(sides, 0.95)
        for threads in (1, READERS):
            sides = {"view": read.hot(view, threads), "plain": read.hot(self._plain, threads)}
            yield f"view_hot_{threads}", self._against(sides, 0.95)
        yield from self._against_daemons(view, files, read)

    def _against_daemons(
        self, view: Path, files: list[bytes], read: reader.Reader
    ) -> harness.Results:
        """File systems by a process, over the same plain copy, everything in memory."""
        bind = self._room / "bindfs" / "data"
        bindfs = ["bindfs", "-f", "-r", "--multithreaded", str(self._plain), str(bind)]
        with foreground.mounted(bindfs, bind, bind.with_suffix(".log")):
            sides = {"view": read.hot(view, READERS), "bindfs": read.hot(bind, READERS)}
            yield "view_hot_vs_bindfs", self._against(sides, 4)
        fewer = self._reader("rclone", files[:: len(files) // self._sizes.rclone])
        mount = self._room / "rclone" / "data"
        command = [
            *("rclone", "mount", str(self._plain), str(mount), "--read-only"),
            *("--vfs-cache-mode", "full", "--cache-dir", str(self._room / "rclone-cache")),
            *("--dir-cache-time", "24h", "--attr-timeout", "1h", "--vfs-cache-max-age", "24h"),
            *("--log-level", "ERROR"),
        ]
        log, rclone = mount.with_suffix(".log"), str(self._room / "rclone.conf")
        with foreground.mounted(command, mount, log, RCLONE_CONFIG=rclone):
            sides = {"view": fewer.hot(view, READERS), "rclone": fewer.hot(mount, READERS)}
            yield "view_hot_vs_rclone", self._against(sides, 20)
