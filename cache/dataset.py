"""One dataset while the agent runs: facts in, decisions of ``cache.decide`` carried out."""

import asyncio
import dataclasses
import hashlib
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
from cache import decide, progress, store, view, work
from cache.settings import CacheSettings, DatasetSettings
from cache.sources import reach, registry
from linux import mountinfo

log = structlog.get_logger("dataset")

VIEW_SECONDS = 30.0  # a swap takes a millisecond; looking up a hanging source takes for ever
STORE_SECONDS = 60.0
LOOK_SECONDS = 30.0  # from one look at a source that answers to the next
RETRY_SECONDS = (5.0, 300.0)  # first and longest wait for one that does not, and for a failed pass
# A refresh takes 1.5 us per cached name: at most this share of the time goes into it.
REFRESH_SHARE = 0.05


def state_file(state_dir: Path, name: str) -> Path:
    """What is remembered of a dataset beside its store: whether it was removed, say."""
    return state_dir / "datasets" / f"{name}.json"


class Dataset:
    """Runs in one task (``follow``); the operations of the API wake it.

    Invariant: the view is only ever changed by this task, one change at a time.
    """

    def __init__(
        self,
        settings: DatasetSettings,
        cache: CacheSettings,
        state_dir: Path,
        woken: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.source: reach.Source = registry.make(settings, state_dir)
        self.view = f"{os.path.realpath(cache.views)}/{settings.name}/data"
        self._state = state_file(state_dir, settings.name)
        self._scratch = str(state_dir / "scratch")
        self._woken = woken  # tells the component that the queue of passes may have changed
        identity = json.dumps(self.source.identity, sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._store = os.path.realpath(cache.store)
        self.folder = f"{self._store}/{settings.name}/{settings.freshness}-{digest}"
        self.generation = store.Generation(settings.name, identity, created=time.time())
        self.stage = view.Stage.NONE
        self.reached: reach.Reached | None = None
        self.trouble: kit.errors.AgentError | None = None  # why it is not better than it is
        self.removed = False
        self.work = work.Work(self)
        self.notes: list[str] = []
        self._published_device = ""
        self._source_held = True  # an earlier agent may have left it mounted
        self._look_at = 0.0
        self._reach_failures = 0
        self._refresh_wanted = False
        self._refresh_at = 0.0
        self.refreshes = 0
        self._wake = asyncio.Event()
        self.lock = asyncio.Lock()  # around everything that changes view or generation

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def tree(self) -> str:
        return f"{self.folder}/tree"

    # --- start --------------------------------------------------------------------------------

    def adopt(self, fields: dict[str, Any] | None) -> None:
        """Take up what an earlier agent left: the generation, the view, what was asked for.

        ``fields``: what ``store.adopt`` found in our folder.
        """
        if fields is not None and fields.get("identity") == self.generation.identity:
            self.generation = store.generation_of(fields)
            self.work.show_totals()
        try:
            kept = json.loads(self._state.read_bytes())
        except (OSError, ValueError):
            kept = {}
        self.removed = bool(kept.get("removed"))
        self._published_device = str(kept.get("device", ""))
        self.stage = view.stage_of(self.view, self.tree, mountinfo.read())

    def _keep_state(self) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = {"removed": self.removed, "device": self._published_device}
        kit.files.save(self._state, json.dumps(kept).encode())

    async def change(self, **changes: Any) -> None:
        """Change generation.json, durably."""
        self.generation = dataclasses.replace(self.generation, **changes)
        fields = dataclasses.asdict(self.generation)
        await kit.child.call(store.save, self.folder, fields, deadline=STORE_SECONDS)

    def want_refresh(self) -> None:
        """Something was committed that running views do not see yet."""
        self._refresh_wanted = True

    def look_soon(self) -> None:
        """The source is under suspicion."""
        self._look_at = 0.0

    # --- the loop -----------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    async def follow(self) -> None:
        """For ever: decide, act, wait for something to happen."""
        while True:
            self._wake.clear()
            try:
                async with self.lock:
                    acted = await self._act(decide.next_action(self.facts()))
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                acted = False
                self._note_trouble(error)
            if not acted:
                try:
                    async with asyncio.timeout(self._patience()):
                        await self._wake.wait()
                except TimeoutError:
                    pass  # time for the next look

    def _patience(self) -> float:
        now = time.monotonic()
        due = [self._look_at, *([self._refresh_at] if self._refresh_wanted else [])]
        due.append(self.work.not_before)
        later = [at for at in due if at > now]
        return max(0.05, min(later, default=now + LOOK_SECONDS) - now)

    def facts(self) -> decide.Facts:
        now = time.monotonic()
        generation = self.generation
        wanted = self.settings.warm or generation.wanted
        # What failed may work later, and there may be room for what did not fit.
        unfinished = generation.state in ("new", "filling") or (
            generation.state == "partial" and (generation.failed > 0 or generation.left_files > 0)
        )
        return decide.Facts(
            stage=self.stage,
            complete=generation.state == "complete",
            skeleton=generation.skeleton,
            reached=self.reached is not None,
            reach_due=now >= self._look_at and not self.removed,
            moved=self.reached is not None and self.reached.device != self._published_device,
            pass_wanted=wanted
            and unfinished
            and not generation.held
            and not self.removed
            and now >= self.work.not_before,
            pass_there=self.work.queued or self.work.running is not None,
            refresh_due=self._refresh_wanted and now >= self._refresh_at,
            source_held=self._source_held,
            source_needed=self.work.verifying or self.work.running is not None,
        )

    async def _act(self, action: decide.Action) -> bool:
        if self.removed:
            return False
        match action:
            case decide.Action.NOTHING:
                return False
            case decide.Action.REACH:
                await self.reach()
            case decide.Action.PUBLISH_SOURCE:
                await self.publish(view.Stage.SOURCE)
            case decide.Action.PUBLISH_OVERLAY:
                await self.publish(view.Stage.OVERLAY)
            case decide.Action.PUBLISH_STORE:
                await self._publish_store()
            case decide.Action.QUEUE:
                self.work.queued = True
                self._woken()
            case decide.Action.REFRESH:
                await self.refresh()
            case decide.Action.RELEASE:
                self.reached = None
                self._source_held = False
                await self.source.release()
        return True

    def _note_trouble(self, error: Exception) -> None:
        if isinstance(error, RuntimeError):  # a child of ours was killed, by lack of memory say
            error = kit.errors.HostError(
                f"dataset {self.name}",
                f"a helper process failed ({str(error).splitlines()[-1]})",
                "see the kernel log; it is tried again",
            )
        elif isinstance(error, OSError):
            error = kit.errors.HostError(
                f"dataset {self.name}: view {self.view}",
                f"{error.strerror or error}",
                "see the kernel log; it is tried again",
            )
        assert isinstance(error, kit.errors.AgentError)
        if self.trouble is None or str(error) != str(self.trouble):
            log.warning("dataset is not served as it should be", dataset=self.name, why=str(error))
        self.trouble = error
        self._look_at = time.monotonic() + self.wait_after(self._reach_failures)
        self._reach_failures += 1

    def wait_after(self, failures: int) -> float:
        first, longest = RETRY_SECONDS
        return float(min(first * 2 ** min(failures, 10), longest) * random.uniform(0.8, 1.2))

    async def reach(self) -> None:
        """SourceError when it does not answer; what is published stays."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._source_held = True
        try:
            self.reached = await self.source.reach(self.cache.source_timeout)
        except kit.errors.SourceError:
            self.reached = None
            raise
        self._reach_failures = 0
        self.trouble = None
        if not self.generation.skeleton and self.work.running is None:
            shown = self.work.progress
            shown.files_total = self.reached.files or shown.files_total
            shown.bytes_total = self.reached.bytes or shown.bytes_total

    async def publish(self, stage: view.Stage) -> None:
        source = self.reached.root if self.reached else ""
        before = self.stage
        clean = await kit.child.call(
            view.publish, self.view, str(stage), source, self.tree, self._scratch,
            deadline=VIEW_SECONDS,
        )  # fmt: skip
        self.stage = stage
        self._refresh_wanted = False
        if self.reached is not None:
            self._published_device = self.reached.device
            self._keep_state()
        if not clean:
            self.notes = ["this kernel (before 6.5) keeps earlier mounts of the view below it"]
        log.info("view published", dataset=self.name, before=str(before), now=str(stage))

    async def _publish_store(self) -> None:
        """The store itself; where that is gone or unreadable, back to the source (OSError then)."""
        try:
            await self.publish(view.Stage.STORE)
        except OSError:
            if self.stage is not view.Stage.STORE:
                log.error("store of a complete dataset is unreadable", dataset=self.name)
                await self.change(state="filling", skeleton=False, why="the store lost its tree")
            raise

    async def refresh(self) -> None:
        self._refresh_wanted = False
        began = time.monotonic()
        await kit.child.call(view.refresh, self.view, deadline=VIEW_SECONDS)
        self.refreshes += 1
        took = time.monotonic() - began
        self._refresh_at = time.monotonic() + max(self.cache.refresh_interval, took / REFRESH_SHARE)

    # --- operations of the API ------------------------------------------------------------------

    async def warm(self) -> None:
        """Begin, go on, or try again what failed. Nothing to do for a complete one."""
        self.removed = False
        self._keep_state()
        self._look_at = 0.0
        self._reach_failures = 0
        self.work.forgive()
        async with self.lock:
            if self.generation.state != "complete":
                state = "filling" if self.generation.state == "partial" else self.generation.state
                await self.change(state=state, wanted=True, held="", why="")
        self.wake()

    async def pause(self) -> None:
        """Stop copying, and let other datasets go on; ``resume`` begins with the next file."""
        self._refuse_unless_filling("pause")
        await self._hold(held="paused")

    async def _hold(self, **changes: Any) -> None:
        async with self.lock:
            await self.change(**changes)
        self.work.queued = False
        if self.work.running is not None:
            await self.work.running.cancel()

    async def resume(self) -> None:
        if not self.generation.held:
            raise kit.errors.RefusedError(
                f"dataset {self.name}", "it is not paused", "nothing to do"
            )
        await self.warm()

    async def cancel(self) -> None:
        """Stop filling or verifying; what is in the store stays and serves."""
        if self.work.kind == "verify" and self.work.running is not None:
            await self.work.running.cancel()
            return
        self._refuse_unless_filling("cancel")
        await self._hold(held="cancelled", wanted=False)

    def _refuse_unless_filling(self, what: str) -> None:
        if self.generation.state in ("complete", "partial"):
            raise kit.errors.RefusedError(
                f"dataset {self.name}",
                f"it is {self.generation.state}, there is nothing to {what}",
                "see 'nodeagent dataset show'",
            )

    async def verify(self, *, source: bool) -> None:
        """Ask for a verify pass; its result shows in ``describe``."""
        if self.work.running is not None or (self.work.verifying and not self.work.verify_queued):
            kind = self.work.kind or "verify"
            raise kit.errors.RefusedError(
                f"dataset {self.name}", f"a {kind} pass is under way", "wait or cancel it"
            )
        if self.generation.state not in ("complete", "partial"):
            raise kit.errors.RefusedError(
                f"dataset {self.name}",
                f"it is {self.state()}, nothing is finished yet",
                "warm it first",
            )
        # Queued first: from here on a complete dataset does not let go of its source.
        before = self.work.verified
        self.work.verified = queued = {"state": "queued", "source": source}
        try:
            async with self.lock:
                if source and self.reached is None and not self.removed:
                    await self.reach()
        except BaseException:
            if self.work.verified is queued:  # not begun meanwhile
                self.work.verified = before
            self.wake()  # what was mounted by half is let go
            raise
        self._woken()

    async def remove(self) -> None:
        """Take the view down if nobody uses it, and what is stored. InUseError says who does."""
        async with self.lock:
            await kit.child.call(view.take_down, self.view, deadline=VIEW_SECONDS)
            self.stage = view.Stage.NONE
            self.removed = True
            self.work.queued = False
            self._keep_state()
        if self.work.running is not None:
            await self.work.running.cancel()
        async with self.lock:
            await self.source.release()
            self.reached = None
            await kit.child.call(store.discard, self._store, self.folder, deadline=STORE_SECONDS)
            self.generation = store.Generation(
                self.name, self.generation.identity, created=time.time()
            )
            self.work.progress = progress.Progress()
            self.trouble = None
        log.info("dataset removed", dataset=self.name)

    def hint(self, paths: list[str]) -> None:
        """Names that a job opened, relative to the dataset; a running fill fetches them sooner."""
        if self.work.running is not None and self.work.kind == "fill":
            self.work.running.tell({"do": "hints", "paths": paths})

    async def stop(self) -> None:
        """End our pass. The view stays."""
        if self.work.running is not None:
            await self.work.running.cancel()

    def used(self) -> int:
        """Bytes of the SSD that it takes."""
        return max(
            self.generation.used, self.work.progress.used if self.work.running is not None else 0
        )

    # --- for people -----------------------------------------------------------------------------

    def state(self) -> str:
        """One word; docs/cache.md lists them."""
        if self.removed:
            return "removed"
        if self.work.kind == "verify":
            return "verifying"
        if self.work.running is not None:
            return (
                "paused"
                if self.generation.held == "paused"
                else self.work.progress.phase or "queued"
            )
        if self.generation.held and self.generation.state != "complete":
            return self.generation.held
        if self.generation.state == "complete" and self.stage is not view.Stage.STORE:
            return "failed" if self.trouble is not None else "queued"
        if self.generation.state in ("complete", "partial"):
            return self.generation.state
        if self.reached is None:
            return "waiting"
        if self.work.queued:
            return "queued"
        return "failed" if self.generation.why else "cold"

    def why(self) -> str:
        """What keeps it from being better, one line."""
        if self.trouble is not None and self.state() != "complete":
            return str(self.trouble)
        return self.generation.why
