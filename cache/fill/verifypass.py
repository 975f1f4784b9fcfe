"""A pass that reads the store against its checksums, and replaces what is bad.

A replacement is copied from the source, staged, made durable and renamed over the bad file: no
moment without the name, even under a bind of the store. What cannot be replaced is reported; the
agent puts the overlay in place and has it withdrawn (the second task of this module).
"""

import os
import time
from collections import deque
from typing import Any

from cache.fill import batch, engine, index, link, tree, unreplaced
from cache.fill.engine import End
from cache.fill.entry import Entry

# Jobs read the same SSD: two readers find bad blocks in good time and leave it to them.
STORE_WORKERS = 2
AHEAD = 64
MOST_NOTES = 100  # bad files named in the log
BAD = "its copy in the store was bad and could not be replaced"


class VerifyPass(engine.Engine):
    """Shares the workers, the index and the commits with a fill."""

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.after = 0
        self.directories: list[int] = []
        self.bad: list[tuple[int, Entry]] = []
        self.repairs: dict[str, list[Entry]] = {}
        self.checked = [0, 0]
        self.found = 0
        self.uncompared = 0  # good, but the source's file could not be read
        self.replaced = 0
        self.unreplaced: list[list[Any]] = []
        self.stopped = False
        self.whole = False  # every directory was looked at

    def _limits(self, limits: dict[str, Any]) -> None:
        if not self.task["against_source"]:  # limits are for reading from sources
            limits = {**limits, "workers": STORE_WORKERS, "bytes_per_second": 0,
                      "files_per_second": 0}  # fmt: skip
        super()._limits(limits)

    def _next_job(self) -> dict[str, Any] | None:
        if self.cancelled:
            return None
        return self._repair_job() or self._verify_job()

    def _verify_job(self) -> dict[str, Any] | None:
        if not self.directories:
            self.directories = self.index.sealed_directories(self.after, AHEAD)
            if not self.directories:
                return None
        number = self.directories.pop(0)
        self.after = max(self.after, number)
        directory = self.index.directory(number)
        return {
            "do": "verify",
            "entries": directory.entries if directory.state == index.SEALED else None,
            "directory": number,
            "path": self.index.path(number),
            "source": self.task["against_source"],
        }

    def _repair_job(self) -> dict[str, Any] | None:
        if not self.bad:
            return None
        number, item = self.bad.pop()
        folder = f"b{time.monotonic_ns()}"
        self.repairs[folder] = [item]
        return {
            "do": "copy",
            "chunk": folder,
            "path": self.index.path(number),
            "entries": [item],
            "location": None,
            "hinted": False,
            "_directory": number,
            "_allocated": item.allocated,
            "_inodes": 1,
        }

    def _copied(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        repaired = batch.Staged(None, answer["chunk"], job["_directory"], failed=answer["failed"])
        for name in [entry[0] for entry in answer["failed"]] + answer["left"]:
            self.unreplaced.append([job["path"], name])
        self.replaced += answer["staged"][0]
        self.batch.add(repaired)

    def _verified(self, answer: dict[str, Any]) -> None:
        self.checked[0] += answer["checked"][0]
        self.checked[1] += answer["checked"][1]
        self.stopped = self.stopped or answer["stopped"]
        path = self.index.path(answer["directory"])
        for name, why in answer["named"][: max(0, MOST_NOTES - self.uncompared)]:
            self.link.say("note", text=f"not compared {'/'.join([*path, name])!r}: {why}")
        self.uncompared += answer["uncompared"]
        for fields, fault in answer["bad"]:
            item = Entry(*fields)
            self.found += 1
            if self.found <= MOST_NOTES:
                name = "/".join([*path, item.name])
                self.link.say("note", text=f"bad file {name!r}: {fault}")
            if self.task["reachable"]:
                self.bad.append((answer["directory"], item))
            else:
                self.unreplaced.append([path, item.name])

    def _take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        if answer["did"] == "verify":
            self._verified(answer)
        else:
            self._copied(job, answer)

    def _lost(self, job: dict[str, Any] | None) -> None:
        if job is not None and job["do"] == "verify":
            self.directories.insert(0, job["directory"])
        elif job is not None and job["do"] == "copy":
            self.bad += [(job["_directory"], item) for item in self.repairs[job["chunk"]]]
            super()._lost(job)
        else:
            super()._lost(job)

    def _end_if_done(self) -> None:
        if self.cancelled:
            raise End("cancelled")
        if self.bad or self.index.sealed_directories(self.after, 1):
            return
        self.whole = True
        why = f"{self.uncompared} files could not be compared" if self.uncompared else ""
        raise End("bad" if self.unreplaced else "good", why)

    def _last_words(self) -> dict[str, Any]:
        return {
            "checked_files": self.checked[0],
            "checked_bytes": self.checked[1],
            "bad": self.found,
            "not_compared": self.uncompared,
            "replaced": self.replaced,
            "unreplaced": self._keep_unreplaced(),
        }

    def _rescan(self, number: int) -> None:
        path = self.index.path(number)
        if path:  # the whole directory is missing in the tree
            self.unreplaced.append([path[:-1], path[-1]])

    def _keep_unreplaced(self) -> int:
        """Written beside the index: millions of paths are no line for a pipe. Their number."""
        if not self.whole:  # what was not looked at again is as bad as it was
            known = {(tuple(path), name) for path, name in self.unreplaced}
            self.unreplaced += [
                [path, name]
                for path, name in unreplaced.read(self.generation)
                if (tuple(path), name) not in known
            ]
        unreplaced.keep(self.generation, self.unreplaced)
        return len(self.unreplaced)

    def _phase(self) -> str:
        return "verifying"

    def _counts(self) -> dict[str, int]:
        return {
            "files_total": self.totals.done_files,
            "bytes_total": self.totals.done_bytes,
            "files_done": self.checked[0],
            "bytes_done": self.checked[1],
            "failed": self.found,
        }


class WithdrawPass(engine.Engine):
    """Takes the marks off the directories above bad files, then the files out of the tree.

    Two passes, for the overlay is published in between: without a file below its mark, or below a
    directory that was looked up with it, readers would get ENOENT. It goes by the list, not by the
    index, and may be killed anywhere: done again it does what is left.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__(task)
        self.withdrawn = 0
        self.waiting = deque(unreplaced.by_directory(unreplaced.read(self.generation)))

    def _next_job(self) -> dict[str, Any] | None:
        if self.cancelled or not self.waiting or self.crew.busy("unseal", "prune"):
            return None
        path, names = self.waiting.popleft()
        number = self.index.find(path)
        if self.task["withdraw"] == "files":
            return {"do": "prune", "directory": number, "path": path, "names": names}
        if number is not None:
            with self.index.transaction():
                self.index.unseal(number)
                for name in names:  # known to be incomplete, whatever becomes of this pass
                    self.index.fail(number, name, BAD, lasting=True)
                self.index.count_failure(number)
        above = [path[:length] for length in range(len(path), 0, -1)]
        return {"do": "unseal", "path": path, "names": names, "paths": above}

    def _end_if_done(self) -> None:
        if self.cancelled:
            raise End("cancelled")
        if not self.waiting:
            if self.task["withdraw"] == "files":
                unreplaced.keep(self.generation, [])
            raise End("withdrawn")

    def _last_words(self) -> dict[str, Any]:
        return {"withdrawn": self.withdrawn}

    def _lost(self, job: dict[str, Any] | None) -> None:
        if job is not None and job["do"] in ("unseal", "prune"):
            self.waiting.appendleft((job["path"], job["names"]))
        else:
            super()._lost(job)

    def _take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """The marks are off, or the files are gone; the next job follows."""
        if job["do"] == "prune":
            self.withdrawn += len(job["names"])
            if job["directory"] is not None:
                with self.index.transaction():
                    self.index.restart_listing(job["directory"])

    def _phase(self) -> str:
        return "withdrawing"

    def _counts(self) -> dict[str, int]:
        done = self.withdrawn
        return {"files_total": done + len(self.waiting), "bytes_total": 0, "files_done": done,
                "bytes_done": 0, "failed": 0}  # fmt: skip


def start(task: dict[str, Any]) -> engine.Engine:
    """A pass ready to run. The tree keeps its dress: nothing of it changes but bad files."""
    os.close(tree.open_source(task["source"], task["stamp"]))  # before anything is reckoned bad
    if "withdraw" in task:
        return WithdrawPass(task)
    made = VerifyPass(task)
    if made.index.totals().directories == 0:
        raise OSError(2, "the index of this generation is lost; warm it again to rebuild it")
    return made


def main() -> None:
    """``python -m cache.fill.verifypass``: the task is the first line of standard input."""
    link.serve(start)


if __name__ == "__main__":
    main()
