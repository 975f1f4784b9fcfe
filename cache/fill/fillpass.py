"""One pass: from a source to a complete generation, as far as it goes.

Directories are listed first (the skeleton; the overlay can be published then), copying begins with
the first listing, and a directory is sealed when all below it is.
"""

import errno
import os
import time
from typing import Any

from cache.fill import batch, engine, entry, hintqueue, index, link, native, tree, unreplaced
from cache.fill.engine import End
from cache.fill.entry import Entry

SEALS_IN_A_BATCH = 2048
RECHECKS_IN_A_JOB = 256
MOST_RESCANS = 2
RESCAN_SECONDS = 1.0
HINTS_IN_FLIGHT = 4
# Bytes of the SSD for one hint. A file larger than this is not worth an own turn: its directory
# is preferred, and it comes with its chunk.
HINT_BYTES = 64 * 1024 * 1024


class FillPass(engine.Engine):
    """Scan, copy, seal; ends complete, or partial with the reason."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.mounted: dict[tuple[str, ...], list[str]] = {}
        for path in task["mounted"]:
            parts = tuple(path.split("/"))
            self.mounted.setdefault(parts[:-1], []).append(parts[-1])
        self.scanning: set[int] = set()
        self.copying: set[int] = set()
        self.chunks: list[int] = []  # ids to copy next, from the index
        self.full = False  # no room for more files
        self.cramped = False  # no room even for directories
        self.skeleton = False  # every directory is in the tree
        self.hints = hintqueue.HintQueue()
        self.hinted = self.index.any_ahead()
        self._no_rescan_before = 0.0
        # The index of an earlier pass may be ahead of the tree (power cut): before such a
        # generation is called complete, what it claims is looked for. Behind this directory:
        self._rechecked_to = 0 if self.resumed else None
        if self.resumed:
            # The index may be new, or a pass was killed while it listed directories anew.
            self.before = max(self._used(), int(task["used"]))
        with self.index.transaction():
            # Somebody asked again: what failed before gets new chances.
            self.index.reset_rescans()
            for number in self.index.failing():
                self._list_anew(number)

    def _next_job(self) -> dict[str, Any] | None:
        if self.cancelled:
            return None
        return self._hint_job() or self._scan_job() or self._copy_job()

    # --- scan -----------------------------------------------------------------------------

    def _scan_job(self) -> dict[str, Any] | None:
        if self.skeleton or self.cramped:
            return None
        # One whose listing is begun again waits until its chunks under way are committed.
        # A hint too: what the tree has is counted by the listing, or ahead of its chunk, not both.
        taken = self.scanning | {job["_directory"] for job in self.crew.busy("copy", "hint")}
        taken |= {staged.directory for staged in self.batch.all()}
        waiting = [n for n in self.index.found(len(taken) + 1) if n not in taken]
        if not waiting:
            if not self.scanning and not self.index.found(1):
                self._skeleton_stands()
            return None
        room = self._room(inodes=1).holds(4096, 1)
        if not room:
            if self._may_take_less():
                return None
            if not self.resumed:
                self.cramped = True
                return None
        # Without room, one that was listed before can be listed anew: it has its directories.
        self.page.set_cramped(not room)
        number = waiting[0]
        path = self.index.path(number)
        with self.index.transaction():
            self._list_anew(number)
        self.chunks = []
        self.scanning.add(number)
        return {
            "do": "scan",
            "directory": number,
            "path": path,
            "mounted": self.mounted.get(tuple(path), []),
            "again": self.resumed,  # what the tree has already is looked for and counted
            "extras": self.resumed
            and (not self.task["immutable"] or self.index.directory(number).rescans > 0),
        }

    def _skeleton_stands(self) -> None:
        self.skeleton = True
        self.totals = self.index.totals()
        self.before = self.added = 0  # the totals have all again
        self.link.say("skeleton")

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
        if answer["made"]:
            self.added += answer["made"]
            if not self._room(inodes=1).holds(4096, 1):
                self.page.set_cramped(True)

    def _scanned(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        number = answer["directory"]
        self.scanning.discard(number)
        with self.index.transaction():
            if self.resumed:
                self.index.drop_vanished(number, set(answer["names"]))
            if job["again"]:
                self.index.none_ahead(number)
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
            taken = self.copying | {s.chunk.id for s in self.batch.all() if s.chunk}
            ahead = self.index.next_chunks(len(taken) + 64)
            self.chunks = [number for number in ahead if number not in taken]
        if not self.chunks:
            return None
        chunk = self.index.chunk(self.chunks[0])
        if chunk is None:  # its directory is being listed anew
            self.chunks = []
            return None
        costs = self._costs(chunk)
        items = self._that_fit(chunk, costs)
        # While directories are listed, what is used may be reckoned too high as well.
        listing = not self.skeleton and not self.cramped
        if len(items) < len(chunk.entries) and (listing or self._may_take_less()):
            return None
        self.chunks.pop(0)
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
            "_allocated": sum(costs[: len(items)]),
            "_inodes": len(items),
        }

    def _costs(self, chunk: index.Chunk) -> list[int]:
        """Bytes that each of its entries will at most take beyond what is counted already."""
        ahead = self.index.ahead(chunk.directory) if self.hinted else {}
        return [max(0, item.allocated - ahead.get(item.name, 0)) for item in chunk.entries]

    def _may_take_less(self) -> bool:
        """Whether something is under way: reckoned high, and twice once it is on the disk."""
        return bool(self.crew.busy("copy", "hint") or self.batch.all())

    def _that_fit(self, chunk: index.Chunk, costs: list[int]) -> list[Entry]:
        room = self._room(inodes=len(chunk.entries))
        if room.holds(sum(costs), len(chunk.entries)):
            return chunk.entries
        taken: list[Entry] = []
        size = 0
        for item, cost in zip(chunk.entries, costs, strict=True):
            if not room.holds(size + cost, len(taken) + 1):
                break
            size += cost
            taken.append(item)
        return taken

    def _copied(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        chunk: index.Chunk = job["_chunk"]
        self.copying.discard(chunk.id)
        given = {item.name for item in job["entries"]}
        left = {item.name for item in chunk.entries} - given | set(answer["left"])
        if answer["stopped"] == "full":
            self.full = True
        files, size, allocated = answer["staged"]
        self.batch.add(
            batch.Staged(
                chunk, str(chunk.id), chunk.directory, files, size, allocated,
                answer["failed"], answer["links"], left,
            )
        )  # fmt: skip

    # --- seal -------------------------------------------------------------------------------

    def _seals(self) -> list[int]:
        return self.index.sealable(SEALS_IN_A_BATCH)

    # --- the end ----------------------------------------------------------------------------

    def _end_if_done(self) -> None:
        """Called when nothing is under way and nothing is staged."""
        if self.cancelled:
            raise End("cancelled")
        if not self.skeleton and not self.cramped:
            return
        if not self.full and not self.cramped:
            if self.index.next_chunks(1) or self.index.sealable(1):
                return
            if self.index.directory(index.ROOT).state == index.SEALED:
                self._recheck() if self._rechecked_to is not None else self._finish()
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
        """List a directory and its parent again: what failed may have changed or gone.

        A bounded number of times in a pass; then it is a failure like any other.
        """
        directory = self.index.directory(number)
        self.chunks = []
        if directory.rescans >= MOST_RESCANS:
            self.index.fail(
                number, ".", "it differs from the source after several tries", lasting=True
            )
            self.index.count_failure(number)
            return
        self.index.count_rescan(number)
        for each in (number, directory.parent):
            if each is not None and each not in self.scanning:
                self._list_anew(each)
        self.skeleton = False
        self.resumed = True

    def _recheck(self) -> None:
        assert self._rechecked_to is not None
        committer = self.crew.committer
        if committer is None:
            return
        numbers = self.index.sealed_directories(self._rechecked_to, RECHECKS_IN_A_JOB)
        if not numbers:
            self._rechecked_to = None
            return
        found = [self.index.directory(number) for number in numbers]
        listed = [[d.id, self.index.path(d.id), d.entries] for d in found]
        self.crew.give(committer, {"do": "recheck", "directories": listed, "_last": numbers[-1]})

    def _rechecked(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        self._rechecked_to = job["_last"]
        with self.index.transaction():
            for number in answer["missing"]:
                self.index.unseal(number)
                self._rescan(number)

    def _finish(self) -> None:
        committer = self.crew.committer
        if committer is not None:
            self.crew.give(committer, {"do": "finish"})

    # --- answers ----------------------------------------------------------------------------

    def _take_part(self, answer: dict[str, Any]) -> None:
        self._scanned_part(answer)

    def _take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        match answer["did"]:
            case "scan":
                self._scanned(job, answer)
            case "copy":
                self._copied(job, answer)
            case "hint":
                self._hinted(job, answer["staged"])
            case "recheck":
                self._rechecked(job, answer)
            case "finish":
                self.totals = self.index.totals()
                raise End("complete")

    def _failed(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        no_room = answer.get("errno") in (errno.ENOSPC, errno.EDQUOT)
        gone = answer.get("errno") in tree.SOURCE_GONE and job["do"] != "hint"
        if answer.get("cancelled") or gone or job["do"] in engine.ESSENTIAL:
            super()._failed(job, answer)
        elif no_room:
            self._forget(job)
            if job["do"] == "scan":
                # Told by us to stop: once what is under way is counted there may be room again.
                self.cramped = not (self.page.cramped and self._may_take_less())
            else:
                self.full = True
        elif job["do"] == "scan":
            self._scan_failed(job, str(answer["error"]))
        else:
            # Its directory cannot be opened any more. A hint is only a hint; else look again.
            self._forget(job)
            if job["do"] == "copy":
                with self.index.transaction():
                    self._rescan(job["_directory"])

    def _scan_failed(self, job: dict[str, Any], why: str) -> None:
        self._forget(job)
        number = job["directory"]
        with self.index.transaction():
            self._list_anew(number)
            self.index.fail(number, ".", f"cannot be listed: {why}", lasting=False)
            self.index.listed(number, entries=0, files=0, size=0, stored=(0, 0, 0), skipped=0)
            parent = self.index.directory(number).parent
            if parent is not None and parent not in self.scanning and self._may_rescan(number):
                self._list_anew(parent)  # it may have gone from there
                self.skeleton = False
        if number == index.ROOT:
            raise End("failed", f"the root of the source cannot be listed: {why}")

    def _may_rescan(self, number: int) -> bool:
        return self.index.directory(number).rescans < MOST_RESCANS

    def _no_room(self) -> None:
        self.full = True

    def _forget(self, job: dict[str, Any]) -> None:
        super()._forget(job)
        if job["do"] == "scan":
            self.scanning.discard(job["directory"])
            self.resumed = True
            self.chunks = []  # its chunks will be others
        if job["do"] == "copy":
            self.copying.discard(job["chunk"])

    # --- hints ------------------------------------------------------------------------------

    def _hint_job(self) -> dict[str, Any] | None:
        if self.full or len(self.crew.busy("hint")) >= HINTS_IN_FLIGHT:
            return None
        hint = self.hints.next(self.index)
        if hint is None:
            return None
        number, path, names = hint
        with self.index.transaction():
            self.index.prefer(number, 1)
        self.chunks = []
        if number in self.scanning and self.resumed:
            return None  # see _scan_job; what is left of it is preferred at least
        room = self._room(inodes=0)
        allowance = min(room.bytes, HINT_BYTES)
        if not allowance or not room.holds(allowance, len(names)):
            return None
        self.hinted = True
        folder = f"h{time.monotonic_ns()}"
        return {
            "do": "hint",
            "path": path,
            "names": names,
            "chunk": folder,
            "allowance": allowance,
            "_directory": number,
            "_allocated": allowance,
            "_inodes": len(names),
        }

    def _hinted(self, job: dict[str, Any], taken: dict[str, int]) -> None:
        size = sum(taken.values())
        self.batch.add(
            batch.Staged(None, job["chunk"], job["_directory"], len(taken), size, size, ahead=taken)
        )

    # --- what it says ---------------------------------------------------------------------

    def _heard(self, command: dict[str, Any]) -> None:
        if command["do"] == "hints":
            self.hints.take(command["paths"])

    def _last_words(self) -> dict[str, Any]:
        files, size = self.index.left()
        return {"used": self._used(), "left_files": files, "left_bytes": size, "full": self.full}

    def _phase(self) -> str:
        return "filling" if self.skeleton else "scanning"

    def _counts(self) -> dict[str, int]:
        if not self.skeleton:
            self.totals = self.index.totals()
        totals = self.totals
        return {
            "files_total": totals.files,
            "bytes_total": totals.bytes,
            "files_done": totals.done_files,
            "bytes_done": totals.done_bytes,
            "failed": totals.failed,
        }


def start(task: dict[str, Any]) -> FillPass:
    """A pass ready to run: the root of the tree dressed as the source's.

    OSError when the source is not there, ESHUTDOWN when another one is, EBUSY when there are bad
    files in the tree: they look like good ones and would be sealed.
    """
    if unreplaced.waiting(task["generation"]):
        raise OSError(errno.EBUSY, "bad files that a verify found are to be withdrawn first")
    source = tree.open_source(task["source"], task["stamp"])
    try:
        root = entry.of("", os.fstat(source))
        if task["native"] is not None and not native.available():
            task["native"] = None
        made = FillPass(task)
        made.index.add_root(root)
        top = tree.open_root(str(made.generation / "tree"))
        try:
            tree.dress_directory(top, root, source)
        finally:
            os.close(top)
    finally:
        os.close(source)
    return made


def main() -> None:
    """``python -m cache.fill.fillpass``: the task is the first line of standard input."""
    link.serve(start)


if __name__ == "__main__":
    main()
