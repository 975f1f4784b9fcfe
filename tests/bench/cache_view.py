"""A view against a plain copy on the same disk, while it fills and once it is complete."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench import agent, harness, reader, trees
from tests.testbed import waiting
from tests.testbed.agent import Agent

FILES = 40_000
SMALLEST, LARGEST, SKEW = 512, 128 * 1024, 1.75  # mean about 15 KiB
NAME = "bench"
# Slow enough that a batch of a second is a small part, so that there is time to pause.
SLOW_FILES_PER_SECOND = 2500
PAUSE_AT = 0.85
REFRESH_SECONDS = 1.0
FILL_SECONDS = 180.0
FEWER_FILES = 12_000  # for one cold reader
RCLONE_FILES = 6_000
READERS = 8


def settings(source: Path, **fill: int) -> dict[str, Any]:
    """Cache settings for one frozen directory."""
    return {
        "budget": "20GiB",
        "reserve": "1%",
        "refresh_interval": f"{REFRESH_SECONDS}s",
        "fill": fill,
        "datasets": [
            {"name": NAME, "freshness": "frozen", "source": {"kind": "dir", "path": str(source)}}
        ],
    }


def run(place: harness.Workplace) -> harness.Results:
    with place.room("view") as room:
        source, plain = room / "source", room / "plain" / "data"
        trees.make(source, FILES, SMALLEST, LARGEST, skew=SKEW)
        plain.parent.mkdir()
        subprocess.run(["cp", "-a", str(source), str(plain)], check=True, timeout=300)
        slow = settings(source, files_per_second=SLOW_FILES_PER_SECOND)
        with agent.running(room / "agent", slow) as nodeagent:
            yield from _filling(room, nodeagent, plain)
            nodeagent.tell(NAME, "resume", {})
            nodeagent.wait_state(NAME, "complete", seconds=FILL_SECONDS)
            yield from _complete(room, nodeagent.view(NAME), plain)


def _paused_nearly_full(nodeagent: Agent) -> None:
    """Pause the fill when most is stored; the view is the overlay then, and refreshed."""

    def nearly() -> bool:
        files = nodeagent.dataset(NAME)["files"]
        return bool(files["total"] == FILES and files["done"] >= PAUSE_AT * FILES)

    waiting.until(nearly, FILL_SECONDS, "a fill that is nearly done")
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
    harness.say(f"  {shown['files']['done']} of {FILES} stored, {shown['refreshes']} refreshes")


def _filling(room: Path, nodeagent: Agent, plain: Path) -> harness.Results:
    _paused_nearly_full(nodeagent)
    stored, size = reader.files_below(nodeagent.tree(NAME))
    if not PAUSE_AT * FILES <= len(stored) < FILES:
        raise RuntimeError(f"{len(stored)} of {FILES} files are stored: not nearly full")
    read = reader.Reader(room, "stored", stored, size)
    view = nodeagent.view(NAME)
    for name, side, target in (("cold", read.cold, 0.85), ("hot", read.hot, 0.6)):
        sides = {"overlay": side(view, READERS), "plain": side(plain, READERS)}
        yield f"overlay_{name}_8", _against(sides, target)


def _complete(room: Path, view: Path, plain: Path) -> harness.Results:
    files, size = reader.files_below(plain)
    read = reader.Reader(room, "all", files, size)
    some = files[:: len(files) // FEWER_FILES]
    fewer = reader.Reader(room, "some", some, _bytes(plain, some))
    for threads, cold in ((1, fewer), (READERS, read)):
        sides = {"view": cold.cold(view, threads), "plain": cold.cold(plain, threads)}
        yield f"view_cold_{threads}", _against(sides, 0.95)
    for threads in (1, READERS):
        sides = {"view": read.hot(view, threads), "plain": read.hot(plain, threads)}
        yield f"view_hot_{threads}", _against(sides, 0.95)
    yield from _against_daemons(room, read, files, view, plain)


def _against_daemons(
    room: Path, read: reader.Reader, files: list[bytes], view: Path, plain: Path
) -> harness.Results:
    """File systems by a process, over the same plain copy, everything in memory."""
    bind = room / "bindfs" / "data"
    bindfs = ["bindfs", "-f", "-r", "--multithreaded", str(plain), str(bind)]
    with harness.served(bindfs, bind):
        sides = {"view": read.hot(view, READERS), "bindfs": read.hot(bind, READERS)}
        yield "view_hot_vs_bindfs", _against(sides, 4)
    some = files[:: len(files) // RCLONE_FILES]
    fewer = reader.Reader(room, "rclone", some, _bytes(plain, some))
    mount = room / "rclone" / "data"
    command = [
        *("rclone", "mount", str(plain), str(mount), "--read-only", "--vfs-cache-mode", "full"),
        *("--cache-dir", str(room / "rclone-cache"), "--dir-cache-time", "24h"),
        *("--attr-timeout", "1h", "--vfs-cache-max-age", "24h", "--log-level", "ERROR"),
    ]
    with harness.served(command, mount, RCLONE_CONFIG=str(room / "rclone.conf")):
        sides = {"view": fewer.hot(view, READERS), "rclone": fewer.hot(mount, READERS)}
        yield "view_hot_vs_rclone", _against(sides, 20)


def _against(sides: Mapping[str, harness.Side], target: float) -> harness.Entry:
    ours, peer = harness.in_turn(sides).values()
    return harness.at_least(ours, peer, target, "files/s")


def _bytes(root: Path, files: list[bytes]) -> int:
    return sum((root / file.decode()).stat().st_size for file in files)
