"""The coordinator's part of a published manifest (``cache.store.published``).

A worker reads the file first; then directories are taken from it instead of being listed at the
source. Whatever is wrong with it is said once, and directories are listed from then on. So is a
directory in which something failed: what the manifest said of it was not so.
"""

import errno

from cache.fill import coordinator, protocol
from cache.fill.protocol import Fetch as Fetch
from cache.fill.protocol import Fetched as Fetched
from cache.fill.worker_pool import Assignment
from cache.store import published
from ceph import native

MOST_TRIES = 2  # workers that may die of it


class Published:
    """Of one pass. Part of its one thread."""

    def __init__(self, run: coordinator.Coordinator, task: protocol.FillTask) -> None:
        self._run = run
        self._manifest = task.manifest
        self._tries = 0
        self.waits = False  # it is being read: no directory is listed meanwhile
        self.ready = False
        self.used: int  # SSD bytes that it takes until the pass ends
        self.end()
        if task.native is not None and not native.available():
            self.refuse("this host lacks Ceph's bindings", "install python3-rados, libcephfs2")

    def assignment(self) -> Assignment | None:
        """To read the file, before the first directory is listed."""
        if self._manifest is None or self.ready or self.waits or self._tries >= MOST_TRIES:
            return None
        self._tries += 1
        self.waits = True
        # The other half is for what is copied meanwhile.
        allowance = self._run.room(inodes=1).bytes // 2
        job = Fetch(manifest=self._manifest, allowance=allowance)
        return Assignment(job, allocated=allowance, inodes=1)

    def fetched(self, answer: Fetched) -> None:
        self.waits = False
        if answer.why:
            self.refuse(answer.why, answer.remedy)
            return
        self.ready, self.used = True, answer.bytes
        self._run.note(f"{answer.directories} directories are taken from {self._manifest}")

    def forget(self, job: protocol.Job) -> None:
        """The job was cancelled or its worker died."""
        if isinstance(job, Fetch):
            self.waits = False

    def gave_up(self, job: protocol.Job) -> None:
        """The worker of the job hung and was killed."""
        if isinstance(job, Fetch):
            self.refuse(coordinator.HANGS, "see 'ceph health detail'")

    def refuse(self, why: str, remedy: str = "publish it again") -> None:
        """It is not used any more."""
        if self._manifest is not None:
            text = f"the manifest {self._manifest} is not used: {why}"
            self._run.note(f"{text}; directories are listed instead. Remedy: {remedy}")
        self._manifest, self.waits, self.ready = None, False, False

    def doubt(self, directory: int) -> None:
        """Something of what is listed there could not be copied, or the directory itself is not so.

        Whether that is the manifest's fault is not known, so it tells nothing more.
        """
        if self.ready:
            where = "/".join(self._run.index.path(directory)) or "its root"
            self.refuse(f"something in {where!r} is not as it says, or cannot be read")

    def concerns(self, job: protocol.Job, failure: protocol.NotDone) -> bool:
        """Whether a failed job was about it; then it is not used any more."""
        broken = isinstance(job, protocol.Scan) and job.published and failure.errno == errno.EBADMSG
        if broken or isinstance(job, Fetch):
            self.refuse(failure.error)
        return broken or isinstance(job, Fetch)

    def end(self) -> None:
        self.used = 0
        (self._run.generation / published.HELD).unlink(missing_ok=True)
