"""The engine of a pass: a process of its own with workers, an index and a line to the agent.

It may be killed at any point: what is in the tree stays right, and the next pass goes on from
there.
"""

import errno
import os
import time
from pathlib import Path
from typing import Any

import kit.files
from cache.fill import batch, control, crew, index, link, space, tree
from cache.fill.entry import Entry

PROGRESS_SECONDS = 0.5
LOCK_SECONDS = 10.0
# Jobs without which a pass cannot go on.
ESSENTIAL = ("commit", "finish", "start")


class End(Exception):
    """The pass is over: ``result`` is complete, partial, cancelled or failed."""

    def __init__(self, result: str, why: str = "") -> None:
        super().__init__(why)
        self.result = result
        self.why = why


class Engine:
    """What every pass does: workers, commits, room, and the line to the agent.

    A pass is a subclass that says what is to do next (``_next_job``), takes the answers, and knows
    when it is over (``_end_if_done``).
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.generation = Path(task["generation"])
        # The pass of an agent that was killed may need a moment to end.
        self._lock = kit.files.lock(self.generation / "lock", LOCK_SECONDS)
        self.resumed = self._prepare()
        if not self.resumed:
            index.Index.discard(self.generation / index.NAME)  # it is about another tree
        self.index = index.Index.open(self.generation / index.NAME)
        self.page = control.Control.create()
        self.workers = 1
        self.crew = crew.Crew(
            self.page,
            {
                "source": task["source"],
                "stamp": task["stamp"],
                "generation": str(self.generation),
                "immutable": task["immutable"],
                "native": task["native"],
            },
        )
        self.batch = batch.Batch()
        self.link = link.Link()
        self.cancelled = False
        self.totals = self.index.totals()
        # While a directory is listed anew the totals lack what the tree has of it. Until all is
        # listed: what was known to be taken before, and what has been added since.
        self.before = 0
        self.added = 0
        self.commits = 0
        self._told = 0.0

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
        try:
            while True:
                self._step()
        except End as end:
            self._progress(force=True)
            self.link.say("end", result=end.result, why=end.why, **self._last_words())
        finally:
            self.crew.stop()
            self.index.close()

    def _step(self) -> None:
        self._dispatch()
        for member, message in self.crew.wait(min(0.2, self.batch.patience())):
            if member is None:
                self._hear()
            elif message is None:
                self._lost(member.job)
            else:
                self._answer(member, message)
        self._progress()

    def _dispatch(self) -> None:
        self._commit_if_due()
        for member in self.crew.idle():
            job = self._next_job()
            if job is None:
                break
            self.crew.give(member, job)
        if not self.crew.busy() and not self.batch.all():
            self._end_if_done()

    # --- what a pass adds ------------------------------------------------------------------

    def _next_job(self) -> dict[str, Any] | None:
        """A job for an idle worker."""
        raise NotImplementedError

    def _end_if_done(self) -> None:
        """Called when nothing is under way and nothing is staged; raises End."""
        raise NotImplementedError

    def _seals(self) -> list[int]:
        """Directories that are complete but for their mark."""
        return []

    def _take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """The answer to one of the pass's own jobs."""
        raise NotImplementedError

    def _take_part(self, answer: dict[str, Any]) -> None:
        """A part of an answer; the job goes on."""
        raise NotImplementedError

    def _rescan(self, number: int) -> None:
        """A directory has not what the index says."""
        raise NotImplementedError

    def _heard(self, command: dict[str, Any]) -> None:
        """A command that only some passes know."""

    def _no_room(self) -> None:
        """The disk was full before we thought so."""
        raise End("failed", "the disk is full")

    def _last_words(self) -> dict[str, Any]:
        """What the end event carries beside the result."""
        raise NotImplementedError

    def _phase(self) -> str:
        raise NotImplementedError

    def _counts(self) -> dict[str, int]:
        """Files and bytes, total and done, and failed ones, for the progress event."""
        raise NotImplementedError

    # --- commit and seal --------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        committer = self.crew.committer
        if committer is None:
            return
        copying = bool(self.crew.busy("copy", "hint"))
        due = self.batch.due(more_is_coming=copying)
        if not due and (self.batch.waiting or copying or self.crew.busy("scan")):
            return
        seal = [] if self.cancelled else self._seals()
        if not due and not seal:
            return
        committing = self.batch.begin_commit()
        directories = [self.index.directory(number) for number in seal]
        self.crew.give(
            committer,
            {
                "do": "commit",
                "chunks": [
                    {
                        "chunk": staged.folder,
                        "directory": staged.directory,
                        "path": self.index.path(staged.directory),
                        "links": staged.links,
                        "mtime_ns": Entry(
                            *self.index.directory(staged.directory).attributes
                        ).mtime_ns,
                    }
                    for staged in committing
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

    def _committed(self, answer: dict[str, Any]) -> None:
        kept = [s for s in self.batch.committing if s.directory not in answer["lost"]]
        with self.index.transaction():
            for staged in kept:
                self.index.brought_ahead(staged.directory, staged.ahead)
            for staged in kept:  # only now: a chunk counts what was brought ahead of it
                if staged.chunk is None:
                    continue
                for name, why, lasting in staged.failed:
                    self.index.fail(staged.directory, name, why, lasting=lasting)
                self.index.committed(
                    staged.chunk, staged.files, staged.bytes, staged.allocated, len(staged.failed),
                    [entry for entry in staged.chunk.entries if entry.name in staged.left],
                )  # fmt: skip
            for number in answer["sealed"]:
                self.index.sealed(number)
            for number in {*answer["missing"], *answer["lost"]}:
                self._rescan(number)
        if self.batch.committing or answer["sealed"]:
            self.commits += 1
        self.batch.end_commit()
        self.totals = self.index.totals()
        self.added += sum(staged.allocated for staged in kept)

    # --- answers ----------------------------------------------------------------------------

    def _answer(self, member: crew.Member, answer: dict[str, Any]) -> None:
        if answer["did"] == "entries":
            self._take_part(answer)
            return
        job, member.job = member.job, None
        assert job is not None
        match answer["did"]:
            case "start":
                pass
            case "commit":
                self._committed(answer)
            case "nothing":
                self._failed(job, answer)
            case _:
                self._take(job, answer)

    def _failed(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """A whole job came to nothing."""
        if answer.get("cancelled"):
            self._forget(job)
        elif answer["errno"] in (errno.ENOSPC, errno.EDQUOT) and job["do"] not in ESSENTIAL:
            self._forget(job)
            self._no_room()
        else:
            raise End("failed", f"{job['do']}: {answer['error']}")

    def _lost(self, job: dict[str, Any] | None) -> None:
        """A worker died with a job; the job is done again by another."""
        if job is None or job["do"] == "start":
            return
        if job["do"] in ESSENTIAL:
            raise End("failed", "the committing worker ended unexpectedly")
        self._forget(job)

    def _forget(self, job: dict[str, Any]) -> None:
        """Nothing of the job is kept."""
        if "chunk" in job:
            directory = os.open(self.generation / "staging", os.O_RDONLY | os.O_DIRECTORY)
            try:
                tree.remove(directory, str(job["chunk"]))
            finally:
                os.close(directory)

    # --- space ------------------------------------------------------------------------------

    def _room(self, *, inodes: int) -> space.Room:
        jobs = self.crew.busy("copy", "hint")
        staged = self.batch.all()
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
            for suffix in ("", "-wal", "-shm")
            if (file := self.generation / (index.NAME + suffix)).exists()
        )
        known = self.totals.allocated + self.totals.directories * 4096 + of_index
        return max(known, self.before + self.added)

    def _list_anew(self, number: int) -> None:
        """A directory's figures go until it is listed; what it takes is still reckoned with."""
        self.before, self.added = self._used(), 0
        self.index.restart_listing(number)

    # --- the agent --------------------------------------------------------------------------

    def _hear(self) -> None:
        """Commands of the agent. Its end is ours: nobody would hear us."""
        commands = self.link.hear()
        if commands is None:
            self.crew.unwatch(0)
            raise End("cancelled", "the agent has gone")
        for command in commands:
            match command["do"]:
                case "limits":
                    self._limits(command)
                case "cancel":
                    self.cancelled = True
                    self.page.cancel()
                case _:
                    self._heard(command)

    def _limits(self, limits: dict[str, Any]) -> None:
        # Native workers have many reads in flight each; more of them would only contend.
        most = (os.cpu_count() or 1) + 1 if self.task["native"] else control.MOST_WORKERS
        self.workers = min(int(limits["workers"]), most)
        share = max(1, self.workers)
        self.page.set_limits(limits["bytes_per_second"] / share, limits["files_per_second"] / share)
        self.task["space"] = limits["space"]
        if self.crew.members:
            self.crew.resize(self.workers)

    def _progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told < PROGRESS_SECONDS:
            return
        self._told = now
        copied_files, copied_bytes = self.page.counted()
        self.link.say(
            "progress",
            phase=self._phase(),
            **self._counts(),
            skipped=self.totals.skipped,
            directories=self.totals.directories,
            directories_sealed=self.totals.sealed,
            copied_files=copied_files,
            copied_bytes=copied_bytes,
            beats=self.page.beats(),
            commits=self.commits,
            used=self._used(),
            syncing=bool(self.crew.busy("commit", "finish")),
        )
