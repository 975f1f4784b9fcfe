"""The verify pass: reads the tree against its checksums and replaces bad files.

A replacement is copied from the source, staged, made durable and renamed over the bad file. The
name never disappears, so this is safe even under a bind mount of the store. A bad file that cannot
be replaced goes on the quarantine list; the agent publishes the overlay and has it withdrawn
(``cache.fill.withdraw``).

A directory that cannot be read, or that lacks names, is bad as well: its parent's mark goes,
readers get the source's entries, and the next fill lists it again. An index that was lost is made
again from the tree on the way.

A scrub is a verify that begins where the one before was cut short (``cache.fill.verify``). What it
found bad is replaced or on the quarantine list before the cursor passes it.

This is the coordinator's part; ``cache.fill.verify_worker`` reads.
"""

import json
import os
import sqlite3
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cache.fill import coordinator, opened, protocol
from cache.fill.agent import Ended
from cache.fill.coordinator import Staged
from cache.fill.opened import OpenGeneration
from cache.fill.protocol import Copy
from cache.fill.worker_pool import Assignment
from cache.store import generations, index, large, manifest, tree
from cache.store.tree import Entry

# How far the scrub of a generation has come is kept in its index, so that both are lost together.
# All directories up to ``after`` were read, and of the one that follows (``directory``) the names
# up to ``name``, in order. The numbers of directories are those of this index.

_TABLE = "CREATE TABLE IF NOT EXISTS scrub (id INTEGER PRIMARY KEY, cursor TEXT NOT NULL)"


@dataclass(frozen=True)
class Cursor:
    round: str = ""  # what the round is for; another one begins at the start
    after: int = 0
    directory: int = 0
    name: str = ""
    checked_files: int = 0
    checked_bytes: int = 0
    bad: int = 0
    replaced: int = 0


def load_cursor(db: sqlite3.Connection, wanted: str) -> Cursor:
    """Of the round ``wanted``, or a new one."""
    db.execute(_TABLE)
    row = db.execute("SELECT cursor FROM scrub").fetchone()
    try:
        found = Cursor(**json.loads(row[0])) if row is not None else Cursor()
    except (ValueError, TypeError):  # of another version
        found = Cursor()
    return found if found.round == wanted else Cursor(round=wanted)


def save_cursor(db: sqlite3.Connection, cursor: Cursor) -> None:
    text = json.dumps(asdict(cursor))  # escapes lone surrogates, which sqlite refuses
    db.execute("INSERT OR REPLACE INTO scrub VALUES (1, ?)", (text,))


def forget_cursor(db: sqlite3.Connection) -> None:
    """The round is over. An index that was made again in this round has no cursor yet."""
    db.execute(_TABLE)
    db.execute("DELETE FROM scrub")


# An index that was lost is made again from the tree, while a verify reads it.
#
# What a scan knew of a directory, its names, can only be taken from what is there now. So the names
# are compared with the source's where it answers, and the totals with those that generation.json
# has kept: an index that was made again never hides a loss.
#
# The root is marked as sealed last. Until then the index counts as lost, and a verify that was cut
# short begins again.


def _is_lost(run: OpenGeneration) -> bool:
    """Whether the index lacks what a complete generation has."""
    if run.index.totals().directories == 0:
        return True
    kept = generations.load(str(run.generation)) or {}
    whole = run.index.directory(index.ROOT).state == index.SEALED
    return kept.get("state") == "complete" and not whole


class Relisting:
    """Only directories with a mark count as listed: others may lack files, and the next fill lists
    them."""

    def __init__(self, run: OpenGeneration) -> None:
        self._run = run
        self._index = run.index
        self._kept = generations.load(str(run.generation)) or {}
        self._complete = self._kept.get("state") == "complete"
        self._files = 0
        run.note("the index was lost; it is made again from the tree")
        with tree.opened_root(run.generation / "tree") as root:
            self._index.add_root(tree.entry_of("", os.fstat(root)))

    def take(self, number: int, found: protocol.Relisted) -> str:
        """What is wrong with the directory, '' for a good one."""
        self._files += found.files
        root = number == index.ROOT
        with self._index.transaction():
            self._index.add_directories(number, found.folders)
            if not found.opaque and not (root and self._complete):
                return "has lost its mark in the store" if self._complete else ""
            self._index.restart_listing(number)
            self._index.listed(
                number, entries=found.entries, files=found.files, size=found.bytes,
                stored=(found.files, found.bytes, found.allocated), skipped=0,
            )  # fmt: skip
            if not root:
                self._index.sealed(number)
        return ""

    def finish(self) -> None:
        """Everything was read: the index counts as whole from now on."""
        if self._complete:
            with self._index.transaction():
                self._index.sealed(index.ROOT)
            self._run.totals = self._index.totals()

    def lost(self) -> int:
        """Files that were stored and that the tree lacks; which ones is not known."""
        return max(0, int(self._kept.get("done_files", 0)) - self._files) if self._complete else 0


AHEAD = 64
MOST_NOTES = 100  # bad files that the log names
PART_SECONDS = 20.0  # of a directory, before its job is over
CURSOR_SECONDS = 5.0  # between two saves of the cursor
AFRESH = "suspect"  # rounds of this name follow trouble of the disk


class VerifyPass(coordinator.Pass):
    phase: protocol.Phase = "verifying"

    def __init__(self, run: coordinator.Coordinator, task: protocol.VerifyTask) -> None:
        self.run = run
        self.index = run.index
        self.task = task
        self.after = 0  # the last directory that was given to a worker
        self.directories: list[int] = []
        self.bad: list[tuple[int, Entry]] = []  # to be replaced
        self.found = protocol.VerifyEnd()
        self.unreplaced: list[tuple[list[str], str]] = []
        self.listed: set[tuple[tuple[str, ...], str]] = set()  # what is in ``unreplaced``
        self.also: list[list[tuple[list[str], str]]] = [[] for _ in task.also]  # not listed yet
        self.whole = False  # every directory was read
        self.known: dict[tuple[str, ...], list[str]] = {}  # what was bad before, by directory
        if task.scrub:
            self.known = generations.grouped(generations.read_quarantined(run.generation))
        self.relisting = Relisting(run) if _is_lost(run) else None
        self.reading: dict[int, str] = {}  # directories under way: names up to this one are read
        self.parts: list[int] = []  # those of them that go on
        self.cached = 0
        self._saved = time.monotonic()
        self._listed = 0  # how many of ``unreplaced`` are on the list already
        self._resumed = self._resume()

    def _resume(self) -> bool:
        """Continue the round of the task, if it was begun."""
        if not self.task.scrub or self.relisting is not None:
            return False
        with self.index.transaction() as db:
            kept = load_cursor(db, self.task.scrub)
        self.after = kept.after
        if kept.directory:
            self.parts.append(kept.directory)
            self.reading[kept.directory] = kept.name
            self.after = kept.directory
        found = self.found
        found.checked_files, found.checked_bytes = kept.checked_files, kept.checked_bytes
        found.bad, found.replaced = kept.bad, kept.replaced
        return kept != Cursor(round=kept.round)

    def _keep_cursor(self, *, at_once: bool = False) -> None:
        """Note what is bad, and how far a scrub is; bad files must be replaced or listed before."""
        now = time.monotonic()
        due = at_once or now - self._saved >= CURSOR_SECONDS
        if due and not self.task.scrub and len(self.unreplaced) > self._listed:
            generations.add_quarantined(self.run.generation, self.unreplaced[self._listed :])
            self._saved, self._listed = now, len(self.unreplaced)
        pending = self.bad or self.run.pool.assigned(Copy) or self.run.batch.all()
        if not self.task.scrub or self.relisting is not None or not due or pending:
            return
        self._saved = now
        self._tell_others()
        if self.unreplaced:
            self.quarantine()
        first = min(self.reading, default=0)
        found = self.found
        kept = Cursor(
            self.task.scrub, first - 1 if first else self.after, first, self.reading.get(first, ""),
            found.checked_files, found.checked_bytes, found.bad, found.replaced,
        )  # fmt: skip
        with self.index.transaction() as db:
            save_cursor(db, kept)

    def next_assignment(self) -> Assignment | None:
        if self.run.page.cancelled:
            return None
        return self._replace() or self._verify()

    def _verify(self) -> Assignment | None:
        if self.parts:
            number = self.parts.pop(0)
        else:
            if not self.directories:
                self.directories = self._following(AHEAD)
                if not self.directories:
                    return None
            number = self.directories.pop(0)
            self.after = max(self.after, number)
        after = self.reading.setdefault(number, "")
        directory = self.index.directory(number)
        sealed = directory.state == index.SEALED
        job = protocol.Verify(
            directory=number,
            path=self.index.path(number),
            entries=directory.entries if sealed else None,
            against_source=self.task.against_source,
            reachable=self.task.reachable,
            relist=self.relisting is not None and not sealed,
            after=after,
            patience=PART_SECONDS if self.task.scrub and self.relisting is None else 0.0,
            afresh=self.task.scrub.startswith(AFRESH),
            ahead=self.task.ahead,
            also=self.task.also,
        )
        return Assignment(job, directory=number)

    def _following(self, limit: int) -> list[int]:
        """Directories that were not given to a worker yet."""
        whole = self.relisting is None
        return self.index.known_directories(self.after, limit, listed=whole)

    def _replace(self) -> Assignment | None:
        if not self.bad:
            return None
        number, item = self.bad.pop()
        job = Copy(folder=f"b{time.monotonic_ns()}", path=self.index.path(number), entries=[item])
        return Assignment(job, directory=number, allocated=item.allocated, inodes=1)

    def take(self, assignment: Assignment, answer: protocol.Answer) -> None:
        match assignment.job, answer:
            case protocol.Verify() as job, protocol.Verified():
                self._verified(job, answer)
            case Copy() as job, protocol.Copied():
                for name in [failure.name for failure in answer.failed] + answer.left:
                    self._quarantine(job.path, name)
                self.found.replaced += answer.files
                if answer.files:
                    kept = coordinator.kept_of(job, answer)
                    renew(self.index, assignment.directory, kept, immutable=self.task.immutable)
                staged = Staged(job.folder, assignment.directory, failed=answer.failed)
                self.run.batch.add(staged)
            case _:
                raise Ended("failed", f"unexpected answer {type(answer).__name__}")

    def _verified(self, job: protocol.Verify, answer: protocol.Verified) -> None:
        found = self.found
        found.checked_files += answer.checked_files
        found.checked_bytes += answer.checked_bytes
        found.shared_files += answer.shared_files
        for at, name in answer.also:
            self.also[at].append((job.path, name))
        if answer.cached and not self.cached:
            why = "the store's file system refuses direct reads"
            self.run.note(f"files are read through the page cache: {why}")
        self.cached += answer.cached
        for name, why in answer.named[: max(0, MOST_NOTES - found.not_compared)]:
            self.run.note(f"not compared {'/'.join([*job.path, name])!r}: {why}")
        found.not_compared += answer.uncompared
        known = self.known.get(tuple(job.path), [])
        if known and answer.fault and not answer.unreadable:
            for name in known:  # some of them were taken out, so there are fewer
                self._quarantine(job.path, name)
        elif answer.fault:
            self._bad_directory(job.path, answer.fault, whole=answer.unreadable)
        if answer.listed is not None and self.relisting is not None:
            fault = self.relisting.take(job.directory, answer.listed)
            if fault:
                self._bad_directory(job.path, fault, whole=False)
        for name, count in answer.repaired:
            found.bad += 1
            found.replaced += 1
            where = "/".join([*job.path, name])
            self.run.note(f"bad file {where!r}: {count} extents were fetched again")
        for item, fault in answer.bad:
            found.bad += 1
            if found.bad <= MOST_NOTES:
                self.run.note(f"bad file {'/'.join([*job.path, item.name])!r}: {fault}")
            # A large file is withdrawn: a fill copies it in extents, and may be killed meanwhile.
            if self.task.reachable and not item.is_directory and not large.is_large(item):
                self.bad.append((job.directory, item))
            else:
                self._quarantine(job.path, item.name)
        if answer.left_after is not None:
            self.reading[job.directory] = answer.left_after
            self.parts.append(job.directory)
        else:
            del self.reading[job.directory]
            self._count_folders(job, answer)
        self._keep_cursor()

    def _count_folders(self, job: protocol.Verify, answer: protocol.Verified) -> None:
        """A directory that the index lost would never be read."""
        if job.entries is None or job.relist or answer.fault:
            return
        with self.index.transaction() as db:
            query = "SELECT count(*) FROM directories WHERE parent = ?"
            known = int(db.execute(query, (job.directory,)).fetchone()[0])
        if answer.folders > known:
            fault = f"has {answer.folders} subdirectories, the index knows {known}"
            self._bad_directory(job.path, fault, whole=False)

    def _bad_directory(self, path: list[str], fault: str, *, whole: bool) -> None:
        """``whole``: nothing of it can be read; else its mark goes and its files stay."""
        if whole and not path:
            raise Ended("failed", f"the root of the tree {fault}")
        known = len(self.unreplaced)
        if whole:
            self._quarantine(path[:-1], path[-1])
        else:
            self._quarantine(path, "")
        if len(self.unreplaced) > known:  # its parent has not told already
            self.found.bad += 1
        if self.found.bad <= MOST_NOTES:
            self.run.note(f"bad directory {'/'.join(path)!r}: {fault}")

    def _quarantine(self, path: list[str], name: str) -> None:
        key = (tuple(path), name)
        if key not in self.listed:
            self.listed.add(key)
            self.unreplaced.append((path, name))

    def failed(self, assignment: Assignment, failure: protocol.NotDone) -> None:
        raise coordinator.failed_by(assignment, failure)

    def forget(self, assignment: Assignment) -> None:
        match assignment.job:
            case protocol.Verify() as job:
                self.parts.insert(0, job.directory)
            case Copy() as job:
                self.bad += [(assignment.directory, item) for item in job.entries]
                self.run.discard_staged(job.folder)

    def incomplete(self, directory: int) -> None:
        path = self.index.path(directory)
        if path:  # the whole directory is missing in the tree
            self._quarantine(path[:-1], path[-1])

    def end_if_done(self) -> None:
        if self.run.page.cancelled:
            raise Ended("cancelled")
        if self.bad or self.parts or self.directories or self._following(1):
            return
        if self.task.against_source:  # what was compared with is still there
            os.close(tree.open_source(self.task.source, self.task.stamp))
        self.whole = not self._resumed
        left = self.found.not_compared
        why = f"{left} files could not be compared" if left else ""
        if self.relisting is not None:
            self.relisting.finish()
            lost = self.relisting.lost() - self.found.bad
            if lost > 0:
                self.found.bad += lost
                # Every directory may lack files: the next fill compares all with the source.
                for number in self.index.every_directory():
                    self._quarantine(self.index.path(number), "")
                raise Ended("bad", f"{lost} stored files are lost; which ones, the lost index knew")
        raise Ended("bad" if self.unreplaced else "good", why)

    def counts(self) -> manifest.Counts:
        total, found = self.run.totals, self.found
        return manifest.Counts(
            *(total.done_files, total.done_bytes, found.checked_files, found.checked_bytes),
            *(found.bad, total.skipped),
        )

    def end(self, ended: Ended) -> protocol.End:
        for number, item in self.bad:  # known to be bad, and not replaced any more
            self._quarantine(self.index.path(number), item.name)
        self.bad.clear()
        self._tell_others()
        self.found.unreplaced = self.quarantine()
        if self.task.scrub and ended.result in ("good", "bad"):
            with self.index.transaction() as db:
                forget_cursor(db)
        elif ended.result == "cancelled":
            self._keep_cursor(at_once=True)
        return protocol.End(ended.result, ended.why, verify=self.found)

    def _tell_others(self) -> None:
        """Have what is bad in other generations too on their own lists."""
        for folder, files in zip(self.task.also, self.also, strict=True):
            if files:
                generations.add_quarantined(Path(folder), files)
                self.found.also[folder] = self.found.also.get(folder, 0) + len(files)
                files.clear()

    def quarantine(self) -> int:
        """Save the list of bad files, which may be millions; how many there are."""
        if not self.whole:  # earlier entries that were not read again are still bad
            self.listed |= {(tuple(path), name) for path, name in self.unreplaced}
            for path, name in generations.read_quarantined(self.run.generation):
                self._quarantine(path, name)
        generations.write_quarantined(self.run.generation, self.unreplaced)
        return len(self.unreplaced)


def renew(of: index.Index, directory: int, items: list[manifest.Item], *, immutable: bool) -> None:
    """Have the manifest tell of these files of a directory what was copied of them again.

    What their listing told stays where it is of the version that was copied, as in an immutable
    source: they were looked up by their status, which tells less.
    """
    new = {item.entry.name: item for item in items if item.state is manifest.State.STORED}

    def renewed(old: manifest.Item) -> manifest.Item:
        now = new.get(old.entry.name)
        if now is None or old.state is not manifest.State.STORED or not old.entry.is_file:
            return old
        same = immutable or _version(old.entry) == _version(now.entry)
        return manifest.Item(old.entry if same else now.entry, old.state, now.checksum)

    with of.transaction() as db:
        query = "SELECT id FROM manifest WHERE directory = ?"
        for (number,) in db.execute(query, (directory,)).fetchall():
            part = of.part(number)
            try:
                known = manifest.unpack(part[1]) if part is not None else []
            except ValueError:
                continue  # a damaged part, or a newer agent's
            if any(item.entry.name in new for item in known):
                packed = manifest.pack([renewed(item) for item in known])
                db.execute("UPDATE manifest SET entries = ? WHERE id = ?", (packed, number))


def _version(entry: Entry) -> tuple[int, ...]:
    return stat.S_IFMT(entry.mode), entry.size, entry.mtime_ns, entry.ctime_ns


def begin(task: protocol.VerifyTask) -> tuple[coordinator.Coordinator, VerifyPass]:
    """A pass that is ready to run. OSError when the source is not there."""
    os.close(tree.open_source(task.source, task.stamp))  # before any file is judged bad
    run = coordinator.Coordinator(task)
    return run, VerifyPass(run, task)


def main() -> None:
    opened.serve(protocol.VerifyTask, lambda task: coordinator.Coordinator.run(*begin(task)))
