"""The passes of one dataset: what they are told, what they say, how they end."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import structlog

import kit.child
import kit.errors
from cache import passes, progress, view
from cache.fill import unreplaced
from linux import mountinfo

if TYPE_CHECKING:
    from cache.dataset import Dataset

log = structlog.get_logger("pass")

# Entries that could not be copied are tried again by themselves after so long.
PARTIAL_SECONDS = 900.0
LOOK_SECONDS = 30.0  # one look at the store
NOT_WITHDRAWN = "bad files could not be withdrawn"


class Work:
    """At most one pass at a time. Its outcome is written down before ``running`` is None again."""

    def __init__(self, dataset: "Dataset") -> None:
        self._dataset = dataset
        self.queued = False
        self.running: passes.Pass | None = None
        self.kind = ""  # fill, verify or withdraw
        self.progress = progress.Progress()
        self.verified: dict[str, Any] = {}  # state and result of the last verify
        self.not_before = 0.0  # monotonic time of the next try after a failed pass
        self._failures = 0

    @property
    def wants_turn(self) -> bool:
        return self.queued or self.verify_queued

    @property
    def verify_queued(self) -> bool:
        return self.verified.get("state") == "queued"

    @property
    def verifying(self) -> bool:
        """From when it is asked for until its result is written down, withdrawal included."""
        return self.verified.get("state") in ("queued", "running")

    def forgive(self) -> None:
        """Somebody asked for it: earlier failures delay nothing."""
        self.not_before = 0.0
        self._failures = 0

    def limits(self, others: int) -> dict[str, Any]:
        """The command that tells a pass how much it may do. ``others``: bytes of other datasets."""
        fill = self._dataset.cache.fill
        return {
            "do": "limits",
            "workers": fill.workers,
            "bytes_per_second": fill.bytes_per_second,
            "files_per_second": fill.files_per_second,
            "space": {
                "reserve": self._dataset.cache.reserve,
                "budget": self._dataset.cache.budget,
                "others": others,
            },
        }

    async def run_fill(self, others: int) -> None:
        """One fill, to its end. Called by the component when it is this dataset's turn."""
        async with self._dataset.lock:
            # It stays queued until it runs: in between, another pass would be asked for, and the
            # end of this one would not be the end.
            reached = self._dataset.reached
            held = self._dataset.generation.held or self._dataset.removed
            if reached is None or held or not self.queued:
                self.queued = False
                return  # held, removed or lost its source since it was queued
            if not await self._withdrawn_before(others):
                self.queued = False
                return
            await self._dataset.change(state="filling", why="", left_files=0, left_bytes=0)
        task = {
            "dataset": self._dataset.name,
            "generation": self._dataset.folder,
            "source": reached.root,
            "stamp": reached.stamp,
            "immutable": self._dataset.source.immutable,
            "native": reached.native,
            "mounted": _mounted_below(reached.root),
            "used": self._dataset.generation.used,
            **self.limits(others),
        }
        end = await self._run("fill", "cache.fill.fillpass", task)
        try:
            await self._fill_ended(end)
        finally:
            self._rest()  # only now: the outcome is written down, nothing asks for another pass
            self._dataset.wake()

    async def _run(self, kind: str, module: str, task: dict[str, Any]) -> dict[str, Any]:
        self.kind = kind
        self.progress.restart()
        self.running = passes.Pass(module, task, self._heard)
        if kind == "fill":
            self.queued = False
        log.info("pass started", dataset=self._dataset.name, kind=kind)
        try:
            await self.running.start()
            assert self.running.ended is not None
            if kind == "fill" and (self._dataset.generation.held or self._dataset.removed):
                await self.running.cancel()  # held before there was a process to tell
            return await self.running.ended
        except BaseException:
            self._rest()
            raise

    def _rest(self) -> None:
        self.running = None
        self.kind = ""

    def _heard(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "progress":
                if self.progress.take(event):
                    self._dataset.want_refresh()
                    self._dataset.wake()
                if not self.progress.estimated or self._dataset.reached is None:
                    return
                self.progress.files_total = max(
                    self.progress.files_total, self._dataset.reached.files or 0
                )
                self.progress.bytes_total = max(
                    self.progress.bytes_total, self._dataset.reached.bytes or 0
                )
            case "skeleton":
                self.progress.estimated = False
                if not self._dataset.generation.skeleton:
                    # Durable with the next save; until then a restart scans again.
                    self._dataset.generation = dataclasses.replace(
                        self._dataset.generation, skeleton=True
                    )
                self._dataset.wake()
            case "note":
                log.info("pass says", dataset=self._dataset.name, text=event["text"])

    async def _fill_ended(self, end: dict[str, Any]) -> None:
        result, why = end["result"], end["why"]
        log.info("pass ended", dataset=self._dataset.name, result=result, why=why)
        changes: dict[str, Any] = {"why": why}
        if "used" in end:
            changes |= {
                "used": end["used"],
                "left_files": end["left_files"],
                "left_bytes": end["left_bytes"],
                "files": self.progress.files_total,
                "bytes": self.progress.bytes_total,
                "done_files": self.progress.files_done,
                "done_bytes": self.progress.bytes_done,
                "failed": self.progress.failed,
                "skipped": self.progress.skipped,
            }
        if result == "complete":
            changes |= {"state": "complete", "completed": time.time(), "wanted": False}
        elif result == "partial":
            changes |= {"state": "partial", "wanted": False}
            self.not_before = time.monotonic() + PARTIAL_SECONDS
        if result in ("complete", "partial"):
            self._failures = 0
        elif result == "failed":
            wait = self._dataset.wait_after(self._failures)
            self.not_before = time.monotonic() + wait
            self._failures += 1
            self._dataset.look_soon()  # the source is the first suspect
        async with self._dataset.lock:
            await self._dataset.change(**changes)
            self._dataset.want_refresh()

    async def run_verify(self, others: int) -> None:
        """One verify pass to its end; bad files are replaced, or withdrawn."""
        against_source = bool(self.verified["source"])
        # From here to the pass there is no gap in which the source could be let go.
        self.verified = {"state": "running", "source": against_source}
        why = ""
        async with self._dataset.lock:  # the source is mounted and let go by one at a time
            if self._dataset.removed:
                why = "the dataset was removed"
            elif self._dataset.reached is None:
                try:
                    await self._dataset.reach()
                except kit.errors.SourceError as error:
                    self._dataset.trouble = error  # bad files are found but not replaced
                    why = str(error) if against_source else ""
        if why:  # the store against itself would be no comparison
            self.verified = {"state": "failed", "source": against_source, "why": why}
            self._dataset.wake()
            return
        task = {
            "dataset": self._dataset.name,
            "generation": self._dataset.folder,
            "source": self._dataset.reached.root if self._dataset.reached else self._dataset.tree,
            "stamp": self._dataset.reached.stamp if self._dataset.reached else "",
            "reachable": self._dataset.reached is not None,
            "against_source": against_source,
            "immutable": self._dataset.source.immutable,
            "native": None,
            "mounted": [],
            **self.limits(others),
        }
        end = await self._run("verify", "cache.fill.verifypass", task)
        self._rest()
        result = {"source": against_source, "state": end["result"], "why": end["why"]}
        result |= {
            k: end.get(k, 0) for k in ("checked_files", "checked_bytes", "bad", "not_compared")
        }
        result |= {"replaced": end.get("replaced", 0), "withdrawn": 0}
        if left := end.get("unreplaced", 0):
            result |= await self._withdraw(left, others)
        self.verified = {**result, "at": time.time()}  # only now it has ended
        log.info("verify ended", dataset=self._dataset.name, **self.verified)
        self.show_totals()
        self._dataset.want_refresh()
        self._dataset.wake()

    def verify_failed(self, why: str) -> None:
        """One that was under way will not end by itself any more."""
        if self.verified.get("state") == "running":
            self.verified = {"state": "failed", "why": why}

    async def _withdrawn_before(self, others: int) -> bool:
        """Finish what an agent that was killed, or a pass that failed, left of a withdrawal.

        A fill would take the bad files for good ones. False when they are still there; it is tried
        again. The lock is held.
        """
        folder = self._dataset.folder
        if not await kit.child.call(unreplaced.waiting, folder, deadline=LOOK_SECONDS):
            return True
        log.info("bad files of an earlier verify are withdrawn first", dataset=self._dataset.name)
        _, why = await self._take_out(others)
        if why:
            await self._dataset.change(state="partial", why=f"{NOT_WITHDRAWN}: {why}")
            self._try_withdrawing_again()
        return not why

    async def _withdraw(self, bad: int, others: int) -> dict[str, Any]:
        """Take bad files out of the store so that readers get the source's; the rest stays."""
        async with self._dataset.lock:
            if self._dataset.reached is None:
                return {"why": "bad files stay until the source answers: it has the only copy"}
            # Before anything else: an agent that is killed from here on knows that it must go on.
            await self._dataset.change(
                state="partial",
                failed=bad,
                why=f"{bad} bad files could not be replaced",
            )
            withdrawn, why = await self._take_out(others)
            if why:
                await self._dataset.change(why=f"{NOT_WITHDRAWN}: {why}")
                self._try_withdrawing_again()
                return {"withdrawn": withdrawn, "why": f"{NOT_WITHDRAWN}: {why}"}
            self.not_before = time.monotonic() + PARTIAL_SECONDS
            return {"withdrawn": withdrawn}

    def _try_withdrawing_again(self) -> None:
        self.not_before = time.monotonic() + self._dataset.wait_after(self._failures)
        self._failures += 1

    async def _take_out(self, others: int) -> tuple[int, str]:
        """Both passes of a withdrawal: how many files went, and why not all did ('' if all).

        Nothing is unlinked unless every mark above it is off and the view knows it.
        """
        end = await self._withdraw_pass("marks", others)
        if end["result"] != "withdrawn":
            return 0, end["why"] or end["result"]
        shows_store = self._dataset.stage in (view.Stage.OVERLAY, view.Stage.STORE)
        if shows_store:
            # Never unlink under a bind of the store: first the overlay, which falls through. One
            # that is there already may have looked the directories up with their marks.
            await self._dataset.publish(view.Stage.OVERLAY)
        end = await self._withdraw_pass("files", others)
        if shows_store:
            await self._dataset.refresh()
        why = "" if end["result"] == "withdrawn" else end["why"] or end["result"]
        return end.get("withdrawn", 0), why

    async def _withdraw_pass(self, what: str, others: int) -> dict[str, Any]:
        assert self._dataset.reached is not None
        task = {
            "dataset": self._dataset.name,
            "generation": self._dataset.folder,
            "source": self._dataset.reached.root,
            "stamp": self._dataset.reached.stamp,
            "withdraw": what,
            "immutable": self._dataset.source.immutable,
            "native": None,
            "mounted": [],
            **self.limits(others),
        }
        try:
            return await self._run("withdraw", "cache.fill.verifypass", task)
        finally:
            self._rest()

    def show_totals(self) -> None:
        """Figures of generation.json, while no pass gives fresher ones."""
        kept, shown = self._dataset.generation, self.progress
        shown.files_total, shown.bytes_total = kept.files, kept.bytes
        shown.files_done, shown.bytes_done = kept.done_files, kept.done_bytes
        shown.failed, shown.skipped, shown.used = kept.failed, kept.skipped, kept.used
        shown.estimated = not kept.skeleton


def _mounted_below(root: str) -> list[str]:
    """Mount points inside the source, relative: what lies on them is not part of the dataset."""
    return [
        mount.target[len(root) + 1 :]
        for mount in mountinfo.read()
        if mount.target.startswith(root + "/")
    ]
