"""A dataset that goes through all its passes by chance, and what must hold where that is cut off.

Its source has two snapshots that share most of their files. ``Life`` has a real agent fill, evict,
update, scrub and withdraw; ``tests.faults.test_kills`` kills processes meanwhile and
``tests.faults.test_power_cut`` takes the power away. All that is by chance follows from one seed.

Damage for a withdrawal is a torn checksum: the bytes stay right, so readers may look at them.
"""

import collections
import contextlib
import os
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import xxhash

from cache.store import generations
from cache.store import tree as layer
from linux import mountinfo
from tests.cache import test_interrupted
from tests.testbed import leftovers, trees, waiting, whole_reader
from tests.testbed.agent import Agent, ApiError

NAME = "a"
FILES, DIRECTORIES = 240, 8
CHANGED = 4  # one file of so many has other bytes in the second snapshot
PACE = {"files_per_second": 150, "workers": 2}
SCRUB = {"every": "1s", "bytes_per_second": "2MiB"}
TORN = b"0" * 32
# For a pass to begin, stretched by waiting.limit: what came before may have left it nothing to do.
MEET_SECONDS = 1.5
INDEX_BYTES = 2**20  # an index takes up to so much more than it is said to
_KIND = re.compile(rb"cache\.fill\.(\w+)")
_KNOWN = {"extents", "generation.json", "links", "lock", "parts", "staging", "tree"}


def snapshots(top: Path) -> dict[str, Path]:
    """A directory with snapshots s1 and s2: what did not change is one inode in both, as in CephFS.
    A quarter of the files change, some come and some go."""
    one, two = (top / ".snap" / name for name in ("s1", "s2"))
    trees.plain(one, FILES, directories=DIRECTORIES, mean=6000)
    subprocess.run(["cp", "-al", str(one), str(two)], check=True, timeout=waiting.limit(60))
    for number, path in enumerate(sorted(p for p in two.rglob("*") if p.is_file())):
        if number % CHANGED == 0:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data[::-1] + b"2")
        elif number % 40 == 1:
            path.rename(path.with_name(f"moved-{path.name}"))
        elif number % 40 == 2:
            path.unlink()
    for each in (one, two):
        whole_reader.describe(each)
    return {"s1": one, "s2": two}


def _files(root: Path) -> dict[str, bytes]:
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            found[str(path.relative_to(root))] = path.read_bytes()
    return found


class Life:
    """``missed``: how often each pass was not seen after it was asked for. ``looked_at``: files of
    which ``wrong`` read the bytes."""

    def __init__(self, area: Path, node: Agent, seed: int) -> None:
        self.random = random.Random(seed)
        self.area, self.node = area, node
        self.snapshots = snapshots(area / "source")
        self.wanted = "s1"
        self.missed: collections.Counter[str] = collections.Counter()
        self.looked_at = 0
        self._truth = {name: _files(path) for name, path in self.snapshots.items()}
        self._acts: dict[str, Callable[[], str]] = {
            "fill": self._fill, "evict": self._evict, "update": self._update,
            "scrub": self._scrub, "withdraw": self._withdraw,
        }  # fmt: skip
        self._left: list[str] = []
        node.cache.update(fill=dict(PACE), scrub=dict(SCRUB))
        node.add_dir(NAME, self.snapshots["s1"], freshness="snapshot", earlier=0)

    @property
    def stamps(self) -> set[str]:
        """What whole readers call the snapshots."""
        manifests = [path / "manifest.json" for path in self.snapshots.values()]
        return {xxhash.xxh3_64_hexdigest(each.read_bytes()) for each in manifests}

    # --- what is asked for

    def next(self) -> str:
        """What to ask for now: each as often as the others, in an order by chance."""
        if not self._left:
            self._left = self.random.sample(sorted(self._acts), len(self._acts))
        return self._left.pop()

    def begin(self, act: str) -> bool:
        """Have the agent do that; whether it was seen at it.

        What came before may not be over, or may have left nothing to do: then it is not.
        """
        kind = self._acts[act]()
        if self._until(lambda: kind in self.running().values()):
            return True
        self.missed[act] += 1
        return False

    def _until(self, true: Callable[[], bool]) -> bool:
        """Whether it came to that in a short time."""
        with contextlib.suppress(AssertionError):
            waiting.until(true, MEET_SECONDS, pause=0.05)
            return True
        return False

    def running(self) -> dict[int, str]:
        """Passes under way: process and kind; a coordinator's workers too."""
        found = {}
        for pid in self.node.passes():
            with contextlib.suppress(OSError):
                if kind := _KIND.search(Path(f"/proc/{pid}/cmdline").read_bytes()):
                    found[pid] = kind[1].decode()
        return found

    def _state(self) -> str:
        with contextlib.suppress(ApiError):  # the room begins anew
            return str(self.node.dataset(NAME)["state"])
        return ""

    def _tell(self, verb: str, body: object = None) -> bool:
        """Whether the agent took it: it refuses what does not fit to what it is at."""
        with contextlib.suppress(ApiError):
            self.node.tell(NAME, verb, body)
            return True
        return False

    def _keep(self, part: float) -> None:
        self.node.cache["datasets"][0]["budget_inodes"] = int(part * FILES) + DIRECTORIES + 20
        self.node.write()

    def _lift(self) -> None:
        """All is to be there again."""
        self._keep(9)
        self._tell("warm")

    def _fill(self) -> str:
        self._evict()  # where nothing is missing there is nothing to fill
        self._until(lambda: self._state() == "partial")
        self._lift()
        return "fill"

    def _evict(self) -> str:
        self._keep(self.random.uniform(0.2, 0.7))
        return "evict"

    def _update(self) -> str:
        self._keep(9)
        other = "s2" if self.wanted == "s1" else "s1"
        if self._tell("update", {"snapshot": other}):
            self.wanted = other
        return "fill"

    def _scrub(self) -> str:
        return "verify"  # the next one begins a second after the last one

    def _withdraw(self) -> str:
        """What a scrub finds bad in a complete dataset, whose source is not mounted, is withdrawn.
        A verify that was asked for would mount it."""
        self._lift()
        self._until(self._rests)
        for generation in self.node.generations(NAME):
            stored: list[Path] = []
            with contextlib.suppress(FileNotFoundError):  # the one before goes at this moment
                stored += [p for p in (generation / "tree").rglob("*") if p.is_file()]
            for path in self.random.sample(stored, min(len(stored), 4)):
                with contextlib.suppress(OSError):  # evicted meanwhile
                    os.setxattr(path, layer.CHECKSUM, TORN, os.XATTR_REPLACE)
        return "withdraw"

    # --- what must hold

    def wrong(self) -> list[str]:
        """What the store has that its snapshot has not: bytes, names, checksums, and marks over
        directories that lack names. Nothing may be mounted over it, or run."""
        found = []
        for generation in self.node.generations(NAME):
            root = generation / "tree"
            fields = generations.load(str(generation)) or {}
            source = self.snapshots[fields["snapshot"]] if "snapshot" in fields else None
            if source is None or not root.exists():  # nothing of it is ever used
                continue
            truth = self._truth[fields["snapshot"]]
            for path in root.rglob("*"):
                name = str(path.relative_to(root))
                marks = os.listxattr(path)
                if path.is_file():
                    self.looked_at += 1
                    data = path.read_bytes()
                    kept = os.getxattr(path, layer.CHECKSUM) if layer.CHECKSUM in marks else b""
                    if data != truth.get(name):
                        found.append(f"{generation.name}/{name}: {len(data)} wrong bytes")
                    if kept not in (TORN, xxhash.xxh3_128_hexdigest(data).encode()):
                        found.append(f"{generation.name}/{name}: checksum {kept!r}")
                elif layer.OPAQUE in marks and not _same_names(path, source / name):
                    found.append(f"{generation.name}/{name}: its mark hides names")
        return found

    def shown(self) -> str:
        """The snapshot that the view is equal to; '' when to none. A switch may come meanwhile."""
        for _ in range(3):
            there = trees.records(self.node.view(NAME))
            for name, path in self.snapshots.items():
                if not trees.differences(trees.records(path), there):
                    return name
        return ""

    def rest(self) -> None:
        """Let everything come to its end, and check that it is as if nothing had happened."""
        node = self.node
        node.cache.update(fill={}, scrub={"every": "365d"})
        self._lift()
        node.wait_for(self._rests, 90, f"{self.wanted} to be complete")
        trees.assert_equal(self.snapshots[self.wanted], node.view(NAME))
        waiting.until(
            lambda: not self.litter(), 30, "the last litter to go", detail=self.litter, pause=0.2
        )
        assert not (wrong := self.wrong()), wrong
        trees.assert_equal(self.snapshots[self.wanted], node.tree(NAME))

    def go_on(self) -> None:
        """After ``rest``: as before."""
        self.node.cache.update(fill=dict(PACE), scrub=dict(SCRUB))
        self.node.write()

    def _rests(self) -> bool:
        try:
            shown = self.node.dataset(NAME)
        except ApiError:  # the room begins anew
            return False
        if shown["state"] in ("failed", "partial") and not self.running():
            self._tell("warm")  # rather than wait for the next try
        there = (shown["state"], shown["served_by"], shown["snapshot"], shown["update"])
        verify = shown["verify"] and shown["verify"]["state"] in ("queued", "running")
        verify = verify or shown["scrub"]["state"] == "running"
        return there == ("complete", "store", self.wanted, None) and not verify

    def litter(self) -> list[str]:
        """What is left over where one complete generation is served and nothing is under way."""
        try:
            return self._litter()
        except OSError as error:  # something goes at this moment
            return [repr(error)]

    def _litter(self) -> list[str]:
        node = self.node
        shown = node.dataset(NAME)
        current = shown["generation"]
        folder, views = node.store / NAME / current, node.views / NAME
        found = [f"pass {each}" for each in self.running().values()]
        found += _beyond(os.listdir(node.store), {"nodeagent.json", ".trash", NAME}, "store")
        found += _beyond(os.listdir(node.store / ".trash"), set(), "trash")
        found += _beyond(os.listdir(node.store / NAME), {current}, "generations")
        kept = [name for name in os.listdir(folder) if not name.startswith("index.sqlite")]
        found += _beyond(kept, _KNOWN, "generation")
        for name in ("staging", "links", "parts", "extents"):
            there = os.listdir(folder / name) if (folder / name).exists() else []
            found += _beyond(there, set(), name)
        found += _beyond(os.listdir(views), {"data", "by-id"}, "views")
        found += _beyond(os.listdir(views / "by-id"), {current}, "by-id")
        mounts = [m.target for m in mountinfo.read() if m.target.startswith(f"{node.folder}/")]
        known = {str(node.views), str(views / "data"), str(views / "by-id" / current)}
        found += _beyond(mounts, known, "mounts")
        found += [
            f"mounted {mounts.count(m)} times: {m}" for m in set(mounts) if mounts.count(m) > 1
        ]
        found += _loops(node.folder)
        found += [
            f"a file of {node.state}: {path.name}"
            for path in node.state.rglob("*")
            if path.name.startswith(".") or path.suffix in (".new", ".tmp")
        ]
        found += [f"process {pid}" for pid in _strays(node)]
        files = sum(path.is_file() for path in (folder / "tree").rglob("*"))
        if files != shown["files"]["done"]:
            found.append(f"{files} files, the index knows {shown['files']['done']}")
        allocated, counted = trees.allocated(node.store), shown["store_bytes"]
        if not counted - INDEX_BYTES <= allocated <= counted + INDEX_BYTES // 4:
            found.append(f"{allocated} bytes are taken, {counted} are known")
        return found


def _same_names(one: Path, two: Path) -> bool:
    return sorted(os.listdir(one)) == sorted(os.listdir(two))


def _beyond(found: list[str], known: set[str], where: str) -> list[str]:
    return [f"{where}: {name}" for name in sorted(set(found) - known)]


def _strays(node: Agent) -> list[int]:
    """Processes of this agent, or of one before it, that it is not above."""
    mark = f"{leftovers.MARK}={node.folder}".encode()
    found = []
    for pid in leftovers.processes(node.folder):
        with contextlib.suppress(OSError):
            above = pid
            while above > 1 and above != node.pid:
                above = test_interrupted.parent(above)
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if above != node.pid and mark in words:
                found.append(pid)
    return found


def _loops(folder: Path) -> list[str]:
    found = []
    for block in Path("/sys/block").glob("loop*"):
        with contextlib.suppress(OSError):
            backing = (block / "loop" / "backing_file").read_text().strip()
            if backing.startswith(f"{folder}/"):
                found.append(f"{block.name} over {backing}")
    return found
