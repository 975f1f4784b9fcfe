"""One pass: from a source to a complete generation, as far as it goes.

A process of its own. It owns the index and the workers, hears the agent on standard input and
speaks on standard output, in JSON lines. It may be killed at any point: what is in the tree stays
right, and the next pass goes on from there.
"""

import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache.fill import control, crew, entry, index, native, space, tree
from cache.fill.entry import Entry

# A batch is committed when it has this much, or is this old. One syncfs costs 5-100 ms.
BATCH_FILES = 4096
BATCH_BYTES = 256 * 1024 * 1024
BATCH_SECONDS = 1.0
SEALS_IN_A_BATCH = 2048
PROGRESS_SECONDS = 0.5
MOST_RESCANS = 2
RESCAN_SECONDS = 1.0
HINTS_IN_FLIGHT = 4
INDEX_NAME = "index.sqlite"


@dataclass
class Staged:
    """Copied, not yet committed."""

    chunk: index.Chunk | None  # None: a hint, which counts nowhere
    folder: str
    directory: int
    files: int = 0
    bytes: int = 0
    allocated: int = 0
    failed: list[list[Any]] = field(default_factory=list)
    links: list[list[str]] = field(default_factory=list)
    left: set[str] = field(default_factory=set)


class End(Exception):
    """The pass is over: ``result`` is complete, partial, cancelled or failed."""

    def __init__(self, result: str, why: str = "") -> None:
        super().__init__(why)
        self.result = result
        self.why = why


class FillPass:
    """The state of one pass; ``run`` drives it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.generation = Path(task["generation"])
        self.resumed = self._prepare()
        self.index = index.Index.open(self.generation / INDEX_NAME)
        self.page = control.Control.create()
        self.workers = 1
        self.crew = crew.Crew(
            self.page,
            {
                "source": task["source"],
                "generation": str(self.generation),
                "immutable": task["immutable"],
                "native": task["native"],
            },
        )
        self.mounted: dict[tuple[str, ...], list[str]] = {}
        for path in task["mounted"]:
            parts = tuple(path.split("/"))
            self.mounted.setdefault(parts[:-1], []).append(parts[-1])
        self.scanning: set[int] = set()
        self.copying: set[int] = set()
        self.staged: list[Staged] = []
        self.staged_since = 0.0
        self.committing: list[Staged] = []
        self.full = False  # no room for more files
        self.cramped = False  # no room even for directories
        self.skeleton = False
        self.cancelled = False
        self.hints: list[tuple[list[str], list[str]]] = []
        self.hinted = False
        self.chunks: list[int] = []  # ids to copy next, from the index
        self.totals = self.index.totals()
        self.commits = 0
        self._input = b""
        self._told = 0.0
        self._no_rescan_before = 0.0

    def _prepare(self) -> bool:
        """The folders of the generation; what an earlier pass left in staging goes.

        Returns whether there may be something in the tree.
        """
        directory = os.open(self.generation, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            tree.remove(directory, "staging")
            for name in ("staging", "links"):
                (self.generation / name).mkdir(mode=0o700, exist_ok=True)
            (self.generation / "tree").mkdir(mode=0o700, exist_ok=True)
        finally:
            os.close(directory)
        with os.scandir(self.generation / "tree") as found:
            return any(True for _ in found)

    # --- the loop -------------------------------------------------------------------------

    def run(self) -> None:
        """Until the end; says it on standard output."""
        self._limits(self.task)
        self.crew.resize(self.workers)
        self.crew.watch(0)
        os.set_blocking(0, False)
        try:
            while True:
                self._step()
        except End as end:
            self._progress(force=True)
            self._say("end", result=end.result, why=end.why, **self._space())
        finally:
            self.crew.stop()
            self.index.close()

    def _step(self) -> None:
        self._dispatch()
        for member, message in self.crew.wait(self._patience()):
            if member is None:
                self._hear()
            elif message is None:
                self._lost(member.job)
            else:
                self._answer(member, message)
        self._progress()

    def _patience(self) -> float:
        if self.staged:
            return max(0.01, min(0.2, BATCH_SECONDS - (time.monotonic() - self.staged_since)))
        return 0.2

    def _dispatch(self) -> None:
        self._commit_if_due()
        for member in self.crew.idle():
            job = self._next_job()
            if job is None:
                break
            self.crew.give(member, job)
        if not self.crew.busy() and not self.staged:
            self._end_if_done()

    def _next_job(self) -> dict[str, Any] | None:
        if self.cancelled or self.page.paused:
            return None
        return self._hint_job() or self._scan_job() or self._copy_job()

    # --- scan -----------------------------------------------------------------------------

    def _scan_job(self) -> dict[str, Any] | None:
        if self.skeleton:
            return None
        # One whose listing is begun again waits until its chunks under way are committed.
        taken = self.scanning | {job["_directory"] for job in self.crew.busy("copy")}
        taken |= {staged.directory for staged in self._all_staged()}
        waiting = [n for n in self.index.found(len(taken) + 1) if n not in taken]
        if not waiting:
            if not self.scanning and not self.index.found(1):
                self._skeleton_stands()
            return None
        if not self._room(inodes=1).holds(4096, 1):
            self.cramped = True
            return None
        number = waiting[0]
        path = self.index.path(number)
        with self.index.transaction():
            self.index.restart_listing(number)
        self.scanning.add(number)
        return {
            "do": "scan",
            "directory": number,
            "path": path,
            "mounted": self.mounted.get(tuple(path), []),
            "again": self.resumed,
        }

    def _skeleton_stands(self) -> None:
        self.skeleton = True
        self.totals = self.index.totals()
        self._say("skeleton")

    def _scanned_part(self, answer: dict[str, Any]) -> None:
        number = answer["directory"]
        with self.index.transaction():
            if answer.get("location"):
                self.index.locate(number, answer["location"])
            if answer["folders"]:
                self.index.add_directories(number, [Entry(*e) for e in answer["folders"]])
            if answer["chunk"]:
                self.index.add_chunk(number, [Entry(*e) for e in answer["chunk"]])
            for name, why, lasting in answer["failed"]:
                self.index.fail(number, name, why, lasting=lasting)

    def _scanned(self, answer: dict[str, Any]) -> None:
        number = answer["directory"]
        self.scanning.discard(number)
        with self.index.transaction():
            if self.resumed:
                self.index.drop_vanished(number, set(answer["names"]))
            self.index.listed(
                number,
                entries=answer["entries"],
                files=answer["files"],
                size=answer["bytes"],
                stored=tuple(answer["stored"]),
                skipped=answer["skipped"],
            )

    # --- copy -----------------------------------------------------------------------------

    def _copy_job(self) -> dict[str, Any] | None:
        if self.full:
            return None
        if not self.chunks:
            taken = self.copying | {s.chunk.id for s in self._all_staged() if s.chunk}
            ahead = self.index.next_chunks(len(taken) + 64)
            self.chunks = [number for number in ahead if number not in taken]
        if not self.chunks:
            return None
        chunk = self.index.chunk(self.chunks.pop(0))
        items = self._that_fit(chunk)
        if not items:
            self.full = True
            return None
        self.copying.add(chunk.id)
        return {
            "do": "copy",
            "chunk": chunk.id,
            "path": self.index.path(chunk.directory),
            "entries": items,
            "location": self.index.location(chunk.directory),
            "hinted": self.hinted,
            "_chunk": chunk,
            "_directory": chunk.directory,
            "_allocated": sum(item.allocated for item in items),
            "_inodes": len(items),
        }

    def _that_fit(self, chunk: index.Chunk) -> list[Entry]:
        room = self._room(inodes=len(chunk.entries))
        if room.holds(chunk.allocated, len(chunk.entries)):
            return chunk.entries
        taken: list[Entry] = []
        size = 0
        for item in chunk.entries:
            if not room.holds(size + item.allocated, len(taken) + 1):
                break
            size += item.allocated
            taken.append(item)
        return taken

    def _all_staged(self) -> list[Staged]:
        return self.staged + self.committing

    def _copied(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        chunk: index.Chunk = job["_chunk"]
        self.copying.discard(chunk.id)
        given = {item.name for item in job["entries"]}
        left = {item.name for item in chunk.entries} - given | set(answer["left"])
        if answer["stopped"] == "full":
            self.full = True
        files, size, allocated = answer["staged"]
        self._stage(
            Staged(
                chunk, str(chunk.id), chunk.directory, files, size, allocated,
                answer["failed"], answer["links"], left,
            )
        )  # fmt: skip

    def _stage(self, staged: Staged) -> None:
        if not self.staged:
            self.staged_since = time.monotonic()
        self.staged.append(staged)

    # --- commit and seal --------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        committer = self.crew.committer
        if committer is None:
            return
        due = bool(self.staged) and (
            sum(s.files for s in self.staged) >= BATCH_FILES
            or sum(s.bytes for s in self.staged) >= BATCH_BYTES
            or time.monotonic() - self.staged_since >= BATCH_SECONDS
            or not self.crew.busy("copy", "hint")
        )
        if not due and (self.staged or self.crew.busy("scan", "copy", "hint")):
            return
        seal = [] if self.cancelled else self._seals()
        if not due and not seal:
            return
        self.committing, self.staged = self.staged, []
        directories = [self.index.directory(number) for number in seal]
        self.crew.give(
            committer,
            {
                "do": "commit",
                "chunks": [
                    {
                        "chunk": staged.folder,
                        "path": self.index.path(staged.directory),
                        "links": staged.links,
                        "mtime_ns": Entry(
                            *self.index.directory(staged.directory).attributes
                        ).mtime_ns,
                    }
                    for staged in self.committing
                ],
                "seal": [
                    {
                        "directory": directory.id,
                        "path": self.index.path(directory.id),
                        "entries": directory.entries,
                        "as": directory.attributes,
                    }
                    for directory in directories
                ],
            },
        )

    def _seals(self) -> list[int]:
        """Directories that are complete but for their mark."""
        return self.index.sealable(SEALS_IN_A_BATCH)

    def _committed(self, answer: dict[str, Any]) -> None:
        with self.index.transaction():
            for staged in self.committing:
                if staged.chunk is None:
                    continue
                if staged.left:
                    keep = [e for e in staged.chunk.entries if e.name not in staged.left]
                    self.index.split(staged.chunk, keep)
                for name, why, lasting in staged.failed:
                    self.index.fail(staged.directory, name, why, lasting=lasting)
                self.index.committed(
                    staged.chunk, staged.files, staged.bytes, staged.allocated, len(staged.failed)
                )
            for number in answer["sealed"]:
                self.index.sealed(number)
            for number in answer["missing"]:
                self._rescan(number)
        if self.committing or answer["sealed"]:
            self.commits += 1
        self.committing = []
        self.totals = self.index.totals()

    # --- the end ----------------------------------------------------------------------------

    def _end_if_done(self) -> None:
        """Called when nothing is under way and nothing is staged."""
        if self.cancelled:
            raise End("cancelled")
        if self.page.paused:
            return
        if not self.skeleton and not self.cramped:
            return
        if not self.full and not self.cramped:
            if self.index.next_chunks(1) or self.index.sealable(1):
                return
            if self.index.directory(index.ROOT).state == index.SEALED:
                self._finish()
                return
            if self._rescan_what_failed():
                return
        self.totals = self.index.totals()
        if self.full or self.cramped:
            files, size = self.index.left()
            raise End("partial", f"no room: {files} files, {size} bytes stay out")
        raise End("partial", f"{self.totals.failed} entries could not be copied")

    def _rescan_what_failed(self) -> bool:
        """Whether there is something left to try once more, after a short wait."""
        again = self.index.retriable(MOST_RESCANS)
        if not again:
            return False
        if self._no_rescan_before == 0.0:
            self._no_rescan_before = time.monotonic() + RESCAN_SECONDS
        elif time.monotonic() >= self._no_rescan_before:
            self._no_rescan_before = 0.0
            with self.index.transaction():
                for number in again:
                    self._rescan(number)
        return True

    def _rescan(self, number: int) -> None:
        """List a directory again: what failed may have changed or gone."""
        self.index.count_rescan(number)
        self.index.restart_listing(number)
        self.skeleton = False
        self.resumed = True
        self.chunks = []

    def _finish(self) -> None:
        committer = self.crew.committer
        if committer is not None:
            self.crew.give(committer, {"do": "finish"})

    # --- answers ----------------------------------------------------------------------------

    def _answer(self, member: crew.Member, answer: dict[str, Any]) -> None:
        if answer["did"] == "entries":
            self._scanned_part(answer)
            return
        job, member.job = member.job, None
        assert job is not None
        match answer["did"]:
            case "start" | "unseal" | "prune":
                pass
            case "scan":
                self._scanned(answer)
            case "copy":
                self._copied(job, answer)
            case "hint":
                self._stage(Staged(None, answer["chunk"], job["_directory"]))
            case "commit":
                self._committed(answer)
            case "finish":
                self.totals = self.index.totals()
                raise End("complete")
            case "nothing":
                self._failed(job, answer)

    def _failed(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """A whole job came to nothing."""
        if answer.get("cancelled"):
            self._forget(job)
            return
        why = str(answer["error"])
        if answer["errno"] in (28, 122):
            self._forget(job)
            self.full = True
        elif job["do"] == "scan":
            self._forget(job)
            with self.index.transaction():
                number = job["directory"]
                self.index.restart_listing(number)
                self.index.fail(number, ".", f"cannot be listed: {why}", lasting=False)
                self.index.listed(number, entries=0, files=0, size=0, stored=(0, 0, 0), skipped=0)
            if number == index.ROOT:
                raise End("failed", f"the root of the source cannot be listed: {why}")
        else:
            raise End("failed", f"{job['do']}: {why}")

    def _lost(self, job: dict[str, Any] | None) -> None:
        """A worker died with a job; the job is done again by another."""
        if job is None or job["do"] == "start":
            return
        if job["do"] in ("commit", "finish"):
            raise End("failed", "the committing worker ended unexpectedly")
        self._forget(job)

    def _forget(self, job: dict[str, Any]) -> None:
        if job["do"] == "scan":
            self.scanning.discard(job["directory"])
            self.resumed = True
        if job["do"] in ("copy", "hint"):
            self.copying.discard(job["chunk"])
            directory = os.open(self.generation / "staging", os.O_RDONLY | os.O_DIRECTORY)
            try:
                tree.remove(directory, str(job["chunk"]))
            finally:
                os.close(directory)

    # --- hints ------------------------------------------------------------------------------

    def _hint_job(self) -> dict[str, Any] | None:
        if not self.hints or self.full or len(self.crew.busy("hint")) >= HINTS_IN_FLIGHT:
            return None
        path, names = self.hints.pop()  # the latest says most about what comes next
        number = self.index.find(path)
        if number is None:
            return None
        with self.index.transaction():
            self.index.prefer(number, 1)
        if self.index.directory(number).state == index.SEALED:
            return None
        self.chunks = []
        self.hinted = True
        folder = f"h{time.monotonic_ns()}"
        return {
            "do": "hint",
            "path": path,
            "names": names,
            "chunk": folder,
            "_directory": number,
            "_allocated": 0,
            "_inodes": len(names),
        }

    # --- space ------------------------------------------------------------------------------

    def _room(self, *, inodes: int) -> space.Room:
        jobs = self.crew.busy("copy", "hint")
        staged = self._all_staged()
        pending = space.Room(
            sum(job["_allocated"] for job in jobs) + sum(s.allocated for s in staged),
            sum(job["_inodes"] for job in jobs) + inodes,
        )
        limits = self.task["space"]
        return space.room(
            os.statvfs(self.generation),
            reserve=limits["reserve"],
            budget=limits["budget"],
            used=limits["others"] + self._used(),
            pending=pending,
        )

    def _used(self) -> int:
        """Bytes of the SSD that this generation takes, its directories and index included."""
        of_index = sum(
            file.stat().st_size
            for suffix in ("", "-wal")
            if (file := self.generation / (INDEX_NAME + suffix)).exists()
        )
        return self.totals.allocated + self.totals.directories * 4096 + of_index

    def _space(self) -> dict[str, Any]:
        files, size = self.index.left()
        return {"used": self._used(), "left_files": files, "left_bytes": size, "full": self.full}

    # --- the agent --------------------------------------------------------------------------

    def _hear(self) -> None:
        """Commands of the agent. Its end is ours: nobody would hear us."""
        try:
            data = os.read(0, 65536)
        except BlockingIOError:
            return
        if not data:
            self.crew.unwatch(0)
            raise End("cancelled", "the agent has gone")
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            match command["do"]:
                case "limits":
                    self._limits(command)
                case "pause":
                    self.page.set_pause(True)
                case "resume":
                    self.page.set_pause(False)
                case "cancel":
                    self.cancelled = True
                    self.page.cancel()
                case "hints":
                    self._take_hints(command["paths"])

    def _limits(self, limits: dict[str, Any]) -> None:
        # Native workers have many reads in flight each; more of them would only contend.
        most = (os.cpu_count() or 1) + 1 if self.task["native"] else control.MOST_WORKERS
        self.workers = min(int(limits["workers"]), most)
        share = max(1, self.workers)
        self.page.set_limits(limits["bytes_per_second"] / share, limits["files_per_second"] / share)
        self.task["space"] = limits["space"]
        if self.crew.members:
            self.crew.resize(self.workers)

    def _take_hints(self, paths: list[str]) -> None:
        by_directory: dict[str, list[str]] = {}
        for path in paths:
            directory, _, name = path.rpartition("/")
            by_directory.setdefault(directory, []).append(name)
        for directory, names in by_directory.items():
            self.hints.append((directory.split("/") if directory else [], names[:64]))
        del self.hints[:-256]

    def _progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told < PROGRESS_SECONDS:
            return
        self._told = now
        if not self.skeleton:
            self.totals = self.index.totals()
        copied_files, copied_bytes = self.page.counted()
        totals = self.totals
        self._say(
            "progress",
            phase=self._phase(),
            files_total=totals.files,
            bytes_total=totals.bytes,
            files_done=totals.done_files,
            bytes_done=totals.done_bytes,
            failed=totals.failed,
            skipped=totals.skipped,
            directories=totals.directories,
            directories_sealed=totals.sealed,
            copied_files=copied_files,
            copied_bytes=copied_bytes,
            commits=self.commits,
            used=self._used(),
        )

    def _phase(self) -> str:
        if self.page.paused:
            return "paused"
        return "filling" if self.skeleton else "scanning"

    def _say(self, event: str, **facts: Any) -> None:
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()


def root_entry(source: str) -> Entry:
    """The root of the source as a directory entry. OSError when it is not there."""
    descriptor = tree.open_root(source)
    try:
        return entry.of("", os.fstat(descriptor))
    finally:
        os.close(descriptor)


def start(task: dict[str, Any]) -> FillPass:
    """A pass ready to run: the root of the tree dressed as the source's."""
    root = root_entry(task["source"])
    if not stat.S_ISDIR(root.mode):
        raise NotADirectoryError(20, "the source is not a directory")
    if task["native"] is not None and not native.available():
        task["native"] = None
    made = FillPass(task)
    made.index.add_root(root)
    source, top = tree.open_root(task["source"]), tree.open_root(str(made.generation / "tree"))
    try:
        tree.dress_directory(top, root, source)
    finally:
        os.close(source)
        os.close(top)
    return made


def serve(begin: Callable[[dict[str, Any]], FillPass]) -> None:
    """Read the task, run the pass that ``begin`` makes of it, say why when it cannot begin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent cancels or kills
    os.umask(0)
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    try:
        begin(json.loads(line)).run()
    except BrokenPipeError:
        pass  # the agent has gone
    except (OSError, crew.CrewError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        sys.stdout.write(json.dumps({"event": "end", "result": "failed", "why": why}) + "\n")


def main() -> None:
    """``python -m cache.fill.fillpass``: the task is the first line of standard input."""
    serve(start)


if __name__ == "__main__":
    main()
