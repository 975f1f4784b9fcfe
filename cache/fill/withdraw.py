"""The withdraw pass: takes the bad files of the quarantine list out of the tree.

Two passes, because the agent publishes the overlay between them. The first removes the opaque marks
above each bad file, the second deletes the files. A file that is deleted below a mark, or below a
directory that readers looked up with its mark, would be ENOENT for them instead of the source's
file. Without a source, ENOENT is what they are to get: then one pass deletes the files, and both
others come when it answers.

The passes follow the list, not the index, and may be killed anywhere: done again they do what is
left.
"""

import os

from cache.fill import commit, opened, protocol
from cache.fill.agent import Ended
from cache.store import generations, large, tree
from cache.store.manifest import Counts

BAD = "its copy in the store was bad and could not be replaced"


class Withdraw:
    """One part, in one process: deleting takes no workers."""

    def __init__(self, task: protocol.WithdrawTask) -> None:
        """OSError when the source is not there."""
        os.close(tree.open_source(task.source, task.stamp))
        self._hides = task.part == "hide"
        self._deletes = self._hides or task.part == "files"
        self._run = opened.OpenGeneration(task)
        self._index = self._run.index
        self._run.agent.phase = "withdrawing"
        self._top = tree.open_root(self._run.generation)
        self._withdrawn = 0

    def run(self) -> protocol.End:
        result, why = "withdrawn", ""
        listed = generations.read_quarantined(self._run.generation)
        waiting = list(generations.by_directory(listed))
        try:
            with tree.opened(self._top, ["tree"]) as root:
                for at, (path, names) in enumerate(waiting):
                    self._obey(len(waiting) - at)
                    if self._deletes:
                        self._delete(root, path, names)
                    else:
                        self._unmark(root, path, names)
            if self._deletes and not self._hides:
                generations.write_quarantined(self._run.generation, [])
        except Ended as ended:
            result, why = ended.result, ended.why
        except OSError as error:
            result, why = "failed", error.strerror or str(error)
        finally:
            self._index.close()
        return protocol.End(result, why, withdrawn=self._withdrawn)

    def _unmark(self, root: int, path: list[str], names: list[str]) -> None:
        """OSError when a mark stays: a file deleted below it would be ENOENT for readers."""
        number = self._index.find(path)
        if number is not None:
            with self._index.transaction():
                self._index.unseal(number)
                for name in names:  # the directory is incomplete even if this pass is killed
                    self._index.fail(number, name, BAD, lasting=True)
                self._index.count_failure(number)
        commit.unmark(root, path)

    def _delete(self, root: int, path: list[str], names: list[str]) -> None:
        number = self._index.find(path)
        try:
            with tree.opened(root, path) as directory:
                mtime_ns = os.fstat(directory).st_mtime_ns
                if number is not None:  # what was lost may have changed the directory's time
                    mtime_ns = self._index.directory(number).attributes.mtime_ns
                for name in names:
                    large.forget(self._top, directory, name)
                    tree.remove(directory, name)
                os.utime(directory, ns=(mtime_ns, mtime_ns))
        except (FileNotFoundError, NotADirectoryError):
            pass  # it went with one above
        self._withdrawn += len(names)
        if number is not None and not self._hides:
            with self._index.transaction():
                self._index.restart_listing(number)

    def _obey(self, left: int) -> None:
        run = self._run
        if not run.agent.heed():
            return
        counts = Counts(
            self._withdrawn + left, done_files=self._withdrawn, skipped=run.totals.skipped
        )
        run.agent.report(counts, run.used(), sealed=run.totals.sealed)


def main() -> None:
    opened.serve(protocol.WithdrawTask, lambda task: Withdraw(task).run())
