"""The datasets of the soak: their trees on the node, what readers may find there, two servers."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testbed import blockdev, kubernetes, leftovers, waiting

REPO = Path(__file__).parents[2]
TOP = "mnt"  # below the node's root
MEAN = 5000  # bytes of a file
GROUP, USER = 4000, 1000


@dataclass
class Source:
    """``settings``: of the dataset, beside name and source. ``place``: as this machine sees it.

    ``kept``: of each path the SHA-256 of all that it has or had.
    """

    name: str
    place: Path
    manifest: Path
    settings: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)
    links: list[str] = field(default_factory=list)
    maybe: set[str] = field(default_factory=set)
    made: int = 0

    def say(self) -> None:
        """Tell the readers."""
        new = self.manifest.with_suffix(".new")
        said = {"files": self.kept, "links": self.links, "maybe": sorted(self.maybe)}
        new.write_text(json.dumps(said))
        new.rename(self.manifest)

    def fill(self, files: int, directories: int, seed: str) -> None:
        """Random files, and a file SUMS in each directory and at the top."""
        generator = random.Random(seed)
        sums: dict[str, list[str]] = {"": []}
        for number in range(files):
            folder = f"d{number % directories}" if directories else ""
            path = os.path.normpath(f"{folder}/f{number:05}").lstrip("/")
            said = self.put(path, generator.randbytes(generator.randrange(1, 2 * MEAN)))
            sums[""].append(f"{said}  {path}\n")
            if folder:
                sums.setdefault(folder, []).append(f"{said}  {Path(path).name}\n")
        for folder, lines in sums.items():
            path = f"{folder}/SUMS" if folder else "SUMS"
            self.put(path, "".join(lines).encode())

    def put(self, path: str, data: bytes) -> str:
        """Write a file and rename it to its place. ``say`` tells the readers of it."""
        said = hashlib.sha256(data).hexdigest()
        target = self.place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # Once there are readers, not beside it: a listing would have it.
        beside = target.with_name(f".{target.name}.new")
        new = self.place.parent / f".{self.name}.new" if self.made else beside
        new.write_bytes(data)
        new.rename(target)
        self.kept.setdefault(path, []).append(said)
        return said

    def change(self, generator: random.Random) -> str:
        """Change, add and delete some files. ``say`` tells the readers first."""
        names = [n for n in self.kept if not n.endswith("SUMS") and (self.place / n).exists()]
        changed, gone = generator.sample(names, 8), generator.sample(names, 4)
        self.made += 1
        added = [f"d{n}/added-{self.made}-{n}" for n in range(4)]
        data = {path: generator.randbytes(generator.randrange(1, 2 * MEAN)) for path in
                (*changed, *added)}  # fmt: skip
        for path, content in data.items():
            self.kept.setdefault(path, []).append(hashlib.sha256(content).hexdigest())
        self.maybe |= {*added, *gone}
        self.say()
        for path, content in data.items():
            self.kept[path].pop()
            self.put(path, content)
        for path in gone:
            (self.place / path).unlink(missing_ok=True)
        return f"{len(changed)} changed, {len(added)} added, {len(gone)} deleted"


# Name: files, directories. What they are for stands in _make.
PLAIN = {
    "plain-a": (300, 4), "plain-b": (300, 4), "plain-c": (400, 8), "plain-d": (500, 8),
    "plain-e": (400, 4), "plain-f": (300, 2), "plain-g": (800, 16), "plain-h": (2000, 0),
    "plain-i": (1200, 40), "plain-j": (300, 3),
}  # fmt: skip
BUDGETED = {"partial-a": (600, 12, "1600KiB")}
CHANGING = {"change-a": (300, 6), "change-b": (500, 10), "change-c": (400, 4)}


class Sources:
    """All of them. ``hung``: the disk of ``hung-a``. ``server``: of ``stopped-a``."""

    def __init__(self, kube: kubernetes.Kubernetes, folder: Path, stack: contextlib.ExitStack):
        self.kube, self.folder, self.stack = kube, folder, stack
        self.all: dict[str, Source] = {}
        folder.mkdir(parents=True)
        folder.chmod(0o755)
        self.hung: blockdev.FaultyDisk
        self.squash = folder / "squash"
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def _source(self, name: str, **settings: Any) -> Source:
        place = self.kube.root / TOP / name
        place.mkdir(parents=True, exist_ok=True)
        made = Source(name, place, self.folder / f"{name}.json", settings)
        self.all[name] = made
        return made

    def make(self) -> None:
        for name, (files, directories) in (PLAIN | CHANGING).items():
            self._source(name).fill(files, directories, name)
        for name, (files, directories, budget) in BUDGETED.items():
            self._source(name, budget=budget).fill(files, directories, name)
        self._git()
        self._links()
        self._sparse()
        self._group()
        self._hung()
        self._served("stopped-a", 300)
        self._served("squash-a", 300, budget="900KiB", access={"mode": "0755"})
        for each in self.all.values():
            each.say()

    def _git(self) -> None:
        """A work tree; what git keeps is a part of the dataset, too."""
        made = self._source("git-a")
        made.fill(250, 5, "git-a")
        git = ("git", "-C", f"/{TOP}/{made.name}", "-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "all")):
            self.kube.on_node(*git, *words)
        for folder, _, files in os.walk(made.place / ".git"):
            for file in files:
                path = Path(folder, file)
                said = hashlib.sha256(path.read_bytes()).hexdigest()
                made.kept[str(path.relative_to(made.place))] = [said]

    def _links(self) -> None:
        made = self._source("links-a")
        made.fill(300, 3, "links-a")
        for number in range(0, 60, 3):
            path = f"d0/f{number:05}"
            os.link(made.place / path, made.place / f"d1/hard{number}")
            made.kept[f"d1/hard{number}"] = list(made.kept[path])
            os.symlink(f"../{path}", made.place / f"d2/soft{number}")
            made.links.append(f"d2/soft{number}")
        os.symlink("d0", made.place / "folder")
        made.links.append("folder")

    def _sparse(self) -> None:
        made = self._source("sparse-a")
        made.fill(200, 2, "sparse-a")
        for number in range(3):
            path = made.place / f"hole{number}"
            with path.open("wb") as stream:
                stream.seek((number + 1) * 2**20)
                stream.write(b"island")
                stream.truncate((number + 2) * 2**20 + 17)
            made.kept[path.name] = [hashlib.sha256(path.read_bytes()).hexdigest()]

    def _group(self) -> None:
        """Files of a group: for pods without root."""
        made = self._source("group-a")
        made.fill(300, 3, "group-a")
        for path in made.kept:
            os.chown(made.place / path, 0, GROUP)
            (made.place / path).chmod(0o640)

    def _hung(self) -> None:
        """Above its budget; its disk can hang and fail."""
        disk = blockdev.faulty_disk(self.folder / "disk", 64 * blockdev.MiB)
        self.hung = self.stack.enter_context(disk)
        blockdev.run("mkfs.ext4", "-q", self.hung.device)
        made = self._source("hung-a", budget="900KiB")
        place = str(Path("/", TOP, made.name))
        self.kube.on_node("mount", self.hung.device, place)
        made.fill(400, 8, "hung-a")
        shutil.rmtree(made.place / "lost+found")
        self.kube.on_node("umount", place)
        self.kube.on_node("mount", "-o", "ro", self.hung.device, place)

    def _served(self, name: str, files: int, **settings: Any) -> None:
        """By a FUSE server, as NFS is by one. Every fourth file is its user's own."""
        below = self.kube.root / TOP / "below" / name
        made = self._source(name, **settings)
        shown, made.place = made.place, below
        made.fill(files, 6, name)
        for number, path in enumerate(made.kept):
            os.chown(below / path, USER, USER)
            (below / path).chmod(0o600 if number % 4 == 0 and name == "squash-a" else 0o644)
        made.place = shown
        self.serve(name)

    def serve(self, name: str) -> None:
        control = self.squash if name == "squash-a" else self.folder / "never"
        words = (f"/{TOP}/{name}", f"/{TOP}/below/{name}", str(control))
        self.servers[name] = process = subprocess.Popen(
            ["nsenter", "-t", str(self.kube.pid), "-m",
             sys.executable, "-m", "tests.testbed.squashfs", *words],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=REPO,
            env={**os.environ, leftovers.MARK: str(self.folder), "PYTHONPATH": str(REPO)},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    def settings(self) -> list[dict[str, Any]]:
        """Of all datasets."""
        return [
            {"name": name, "freshness": "frozen",
             "source": {"kind": "dir", "path": f"/{TOP}/{name}"}, **each.settings}
            for name, each in self.all.items()
        ]  # fmt: skip

    # --- their faults ------------------------------------------------------------------------

    def forget_pages(self) -> None:
        """Of the disk that hangs: what is in the page cache is read from there."""
        for path in self.all["hung-a"].kept:
            with (self.all["hung-a"].place / path).open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def disk_fault(self, **how: Any) -> Iterator[None]:
        self.forget_pages()
        self.hung.fault({"offset": 0, "length": self.hung.size, **how})
        try:
            yield
        finally:
            self.hung.clear()

    @contextlib.contextmanager
    def stopped(self, *names: str) -> Iterator[None]:
        for name in names:
            self.servers[name].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for name in names:
                self.servers[name].send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def dead(self, name: str) -> Iterator[None]:
        self._end(name)
        try:
            yield
        finally:
            self.kube.on_node("umount", "-l", f"/{TOP}/{name}")
            self.serve(name)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        self.squash.touch()
        try:
            yield
        finally:
            self.squash.unlink()

    def _end(self, name: str) -> None:
        process = self.servers.pop(name)
        process.kill()
        process.communicate(timeout=waiting.limit(30))

    def end(self) -> None:
        self.hung.clear()
        for name in list(self.servers):
            with contextlib.suppress(Exception):
                self.kube.on_node("umount", "-l", f"/{TOP}/{name}", check=False)
            self._end(name)
        with contextlib.suppress(Exception):
            self.kube.on_node("umount", "-l", f"/{TOP}/hung-a", check=False)
