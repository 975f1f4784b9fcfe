"""One reader of the soak: reads datasets in one way, and compares every byte with the source's.

    python -m tests.deploy.field_readers KIND PLAN REPORT SEED

PLAN names the datasets: {name: {"root", "manifest", "files"}}. A manifest has of each path the
SHA-256 of all contents that it has or had, and the paths that may be missing. REPORT gets a line of
JSON for each error. REPORT.state says what was read so far, and what is being read since when.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.testbed import waiting

SAMPLE = 12  # files of one read
SLOW_SECONDS = 10.0
SMALL = 700  # files; what reads a whole dataset takes no larger one
MOST_EVENTS = 2000  # of one reader
USER = 1000  # of the kind "user"
RSYNC = os.environ.get("FIELD_RSYNC", "rsync")


class Wrong(Exception):
    """What was read is not what the source has or had. ``what``: one word for the table."""

    def __init__(self, what: str, path: str, text: str) -> None:
        super().__init__(text)
        self.what, self.path, self.text = what, path, text


class Dataset:
    def __init__(self, name: str, root: str, manifest: str) -> None:
        self.name, self.root, self._manifest = name, root, Path(manifest)
        self._read = 0
        self.files: dict[str, list[str]] = {}
        self.maybe: set[str] = set()
        self.links: set[str] = set()
        self.refresh()

    def refresh(self) -> bool:
        """Whether the manifest was written since it was read."""
        moment = self._manifest.stat().st_mtime_ns
        if moment == self._read:
            return False
        found = json.loads(self._manifest.read_text())
        self.files, self.maybe, self.links = (
            found["files"], set(found["maybe"]), set(found["links"])
        )  # fmt: skip
        self._read = moment
        return True

    def sample(self, generator: random.Random) -> list[str]:
        self.refresh()
        names = list(self.files)
        return generator.sample(names, min(SAMPLE, len(names)))

    def check(self, path: str, digest: str, size: int = -1) -> None:
        while digest not in self.files.get(path, ()):
            if not self.refresh():
                raise Wrong("wrong bytes", path, f"{size} bytes, SHA-256 {digest}")

    def check_names(self, found: Iterable[str]) -> None:
        seen = set(found)
        while True:
            all_names = set(self.files) | self.links
            strange, missing = seen - all_names, all_names - self.maybe - seen
            if not strange and not missing:
                return
            if not self.refresh():
                first = sorted(strange | missing)[0]
                text = f"{len(strange)} strange and {len(missing)} missing names"
                raise Wrong("wrong names", first, text)


def digest(data: bytes | memoryview | mmap.mmap) -> str:
    return hashlib.sha256(data).hexdigest()


# --- single files ----------------------------------------------------------------------------


def _plainly(path: str) -> str:
    with open(path, "rb") as stream:
        return digest(stream.read())


def _mapped(path: str) -> str:
    """In a child: a page that cannot be read is a signal."""
    out, into = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(into, _digest_of_mapping(path).encode())
        except OSError as error:
            os.write(into, f"errno {error.errno}".encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as stream:
        said = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise Wrong(signal.Signals(os.WTERMSIG(status)).name, path, "a mapped page was not read")
    if said.startswith("errno "):
        raise OSError(int(said.split()[1]), os.strerror(int(said.split()[1])), path)
    return said


def _digest_of_mapping(path: str) -> str:
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if not size:
            return digest(b"")
        with mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as pages:
            return digest(pages)


def _sent(path: str) -> str:
    with open(path, "rb") as stream:
        memory = os.memfd_create("sent")
        try:
            size, offset = os.fstat(stream.fileno()).st_size, 0
            while offset < size and (sent := os.sendfile(memory, stream.fileno(), offset, size)):
                offset += sent
            return digest(os.pread(memory, size, 0))
        finally:
            os.close(memory)


def _direct(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(descriptor).st_size
        with mmap.mmap(-1, max(size, 1) + mmap.PAGESIZE) as space:
            room = len(space) // mmap.PAGESIZE * mmap.PAGESIZE
            buffer = memoryview(space)[:room]
            try:
                count = os.preadv(descriptor, [buffer], 0)
                return digest(buffer[:count])
            finally:
                buffer.release()
    finally:
        os.close(descriptor)


def _locked(path: str) -> str:
    with open(path, "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        fcntl.flock(stream, fcntl.LOCK_EX)
        found = digest(stream.read())
        fcntl.flock(stream, fcntl.LOCK_UN)
        return found


# --- the kinds -------------------------------------------------------------------------------


class Reader:
    def __init__(self, kind: str, plan: dict[str, dict[str, str]], report: str, seed: str) -> None:
        self.kind = kind
        self.generator = random.Random(f"{kind} {seed}")
        self.datasets = [Dataset(n, e["root"], e["manifest"]) for n, e in sorted(plan.items())]
        self.report, self.state = Path(report), Path(f"{report}.state")
        self.work = Path(f"{report}.work")
        self.reads: dict[str, int] = {}
        self.errors: dict[str, int] = {}
        self.events = 0
        self.standing: Dataset | None = None
        self.step = "read"  # what of it failed
        self.about = ""  # the dataset that it is of

    def run(self, seconds: float) -> None:
        pause = KINDS[self.kind][1]
        time.sleep(self.generator.uniform(0, pause))
        while True:
            resting = self._resting()
            if self.standing and self.standing.name in resting:
                os.chdir("/")
                self.standing = None
            self.once(self.generator.choice([e for e in self.datasets if e.name not in resting]))
            time.sleep(self.generator.uniform(0.5, 1.5) * pause * seconds)

    def _resting(self) -> list[str]:
        """Datasets that nobody reads for a while: only these can be evicted."""
        with contextlib.suppress(FileNotFoundError):
            return (self.report.parent / "resting").read_text().split()
        return []

    def once(self, dataset: Dataset) -> None:
        began = time.time()
        self._say(dataset.name, began)
        what = path = text = ""
        self.step, self.about = "read", dataset.name
        try:
            KINDS[self.kind][0](self, dataset)
        except Wrong as error:
            what, path, text = error.what, error.path, error.text
        except OSError as error:
            what = errno.errorcode.get(error.errno or 0, "OSError")
            path, text = str(error.filename or ""), str(error)
        except Exception as error:
            what, text = type(error).__name__, str(error)[:300]
        seconds = time.time() - began
        if not what and seconds > SLOW_SECONDS:
            what, text = "slow", f"{seconds:.0f} s"
        self.reads[dataset.name] = self.reads.get(dataset.name, 0) + 1
        if what:
            self._tell(self.about, began, what, path, text)
        self._say("", time.time())

    def _tell(self, dataset: str, began: float, what: str, path: str, text: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1
        self.events += 1
        if self.events > MOST_EVENTS:
            return
        event = {
            "began": began, "at": time.time(), "reader": self.kind, "dataset": dataset,
            "step": self.step, "what": what, "path": path, "text": text[:500],
        }  # fmt: skip
        with self.report.open("a") as stream:
            stream.write(json.dumps(event) + "\n")

    def _say(self, dataset: str, since: float) -> None:
        new = Path(f"{self.state}.new")
        said = {"reads": self.reads, "errors": self.errors, "now": dataset, "since": since}
        new.write_text(json.dumps(said))
        new.rename(self.state)


def _each(read: Callable[[str], str]) -> Callable[[Reader, Dataset], None]:
    def run(reader: Reader, dataset: Dataset) -> None:
        for path in dataset.sample(reader.generator):
            try:
                dataset.check(path, read(f"{dataset.root}/{path}"))
            except FileNotFoundError:
                dataset.refresh()
                if path not in dataset.maybe:
                    raise

    return run


def _walk(reader: Reader, dataset: Dataset, *, ordered: bool) -> None:
    def raised(error: OSError) -> None:
        raise error

    dataset.refresh()
    found = []
    for folder, folders, files in os.walk(dataset.root, onerror=raised):
        if ordered:
            folders.sort()
            files.sort()
        below = os.path.relpath(folder, dataset.root)
        found += [os.path.normpath(os.path.join(below, file)) for file in files]
        found += [
            os.path.normpath(os.path.join(below, each))
            for each in folders
            if os.path.islink(os.path.join(folder, each))
        ]
    dataset.check_names(found)
    _each(_plainly)(reader, dataset)


def _sorted_walk(reader: Reader, dataset: Dataset) -> None:
    _walk(reader, dataset, ordered=True)


def _unsorted_walk(reader: Reader, dataset: Dataset) -> None:
    _walk(reader, dataset, ordered=False)


def _stand(reader: Reader, dataset: Dataset) -> None:
    """A working directory in the view, for some rounds."""
    if reader.standing is None or reader.generator.random() < 0.05:
        reader.step = "chdir"
        os.chdir(dataset.root)
        reader.standing = dataset
    stood = reader.standing
    reader.about = stood.name
    try:
        reader.step = "relative open"
        for path in stood.sample(reader.generator):
            try:
                stood.check(path, _plainly(path))
            except FileNotFoundError:
                stood.refresh()
                if path not in stood.maybe:
                    raise
        reader.step = "getcwd"
        os.getcwd()
    except Exception:
        os.chdir("/")
        reader.standing = None
        raise


def _digests(root: str, names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, _plainly(f"{root}/{name}")) for name in names]


def _spawned(reader: Reader, dataset: Dataset) -> None:
    """As a DataLoader with two workers that are spawned."""
    names = [each for each in dataset.sample(reader.generator) if each not in dataset.maybe]
    if importlib.util.find_spec("torch"):
        _torch(dataset, names)
        return
    parts = (names[::2], names[1::2])
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        for found in pool.map(_digests, (dataset.root,) * 2, parts):
            for path, said in found:
                dataset.check(path, said)


def _torch(dataset: Dataset, names: list[str]) -> None:
    from torch.utils import data  # type: ignore[import-not-found]

    paths = [f"{dataset.root}/{name}" for name in names]
    loader = data.DataLoader(paths, batch_size=None, num_workers=2, collate_fn=_plainly,
                             multiprocessing_context="spawn")  # fmt: skip
    for path, said in zip(names, loader, strict=True):
        dataset.check(path, said)


def _command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, timeout=waiting.limit(600))  # fmt: skip
    if done.returncode:
        last = done.stderr.strip().splitlines()[-6:]
        raise Wrong(f"{Path(words[0]).name} {done.returncode}", "", "; ".join(last))
    return done.stdout


def _rsync(reader: Reader, dataset: Dataset) -> None:
    dataset.refresh()
    copy = reader.work / dataset.name
    copy.mkdir(parents=True, exist_ok=True)
    _command(RSYNC, "-aH", "--delete", f"{dataset.root}/", f"{copy}/")
    found = [
        os.path.relpath(os.path.join(folder, name), copy)
        for folder, folders, files in os.walk(copy)
        for name in (*files, *(e for e in folders if os.path.islink(os.path.join(folder, e))))
    ]
    dataset.check_names(found)
    for path in found:
        if not (copy / path).is_symlink():
            dataset.check(path, _plainly(str(copy / path)))


def _git(reader: Reader, dataset: Dataset) -> None:
    git = ("git", "-c", f"safe.directory={dataset.root}", "--no-optional-locks", "-C", dataset.root)
    said = _command(*git, "-c", "core.fsmonitor=false", "status", "--porcelain")
    if said:
        raise Wrong("git sees a change", said.split("\n")[0], said[:300])
    if reader.generator.random() < 0.2:
        _command(*git, "fsck", "--no-dangling", "--no-progress")


def _tar(reader: Reader, dataset: Dataset) -> None:
    dataset.refresh()
    with subprocess.Popen(
        ["tar", "-C", dataset.root, "-cf", "-", "."],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    ) as tar:  # fmt: skip
        assert tar.stdout is not None and tar.stderr is not None
        found, first = {}, ""
        with tarfile.open(fileobj=tar.stdout, mode="r|") as archive:
            for member in archive:
                path = os.path.normpath(member.name)
                if member.isreg():
                    stream = archive.extractfile(member)
                    found[path] = digest(stream.read() if stream else b"")
                elif member.islnk():
                    found[path] = found[os.path.normpath(member.linkname)]
                elif member.issym():
                    found[path] = ""
        while tar.stdout.read(65536):
            pass
        first = tar.stderr.read().decode(errors="replace")
        if tar.wait():
            raise Wrong(f"tar {tar.returncode}", "", "; ".join(first.splitlines()[:4]))
    dataset.check_names(found)
    for path, said in found.items():
        if said:
            dataset.check(path, said)


# Of each kind: what it does, and the seconds between two reads.
KINDS: dict[str, tuple[Callable[[Reader, Dataset], None], float]] = {
    "mmap": (_each(_mapped), 1.5),
    "sendfile": (_each(_sent), 1.5),
    "direct": (_each(_direct), 1.5),
    "flock": (_each(_locked), 1.5),
    "walk": (_unsorted_walk, 4.0),
    "walk sorted": (_sorted_walk, 4.0),
    "getcwd": (_stand, 2.0),
    "spawn": (_spawned, 20.0),
    "rsync": (_rsync, 12.0),
    "git": (_git, 8.0),
    "tar": (_tar, 8.0),
    "user": (_each(_plainly), 1.5),
}
WHOLE = {"rsync", "tar"}  # they read small datasets only


def main() -> None:
    kind, plan, report, seed = sys.argv[1:5]
    if kind == "user":
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
    Reader(kind, json.loads(Path(plan).read_text()), report, seed).run(1.0)


if __name__ == "__main__":
    main()
