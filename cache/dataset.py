"""A dataset: what is known about it, and what its view needs next.

``Dataset.follow`` is a loop: collect the facts, let ``next_action`` choose, do that one action, and
wait for an event when there is none. So a restarted agent, a lost source and an operator's request
all take the same path. Jobs (``cache.jobs``) copy and read files; this module asks for them.

Invariants: everything that changes the view or generation.json holds ``lock``. The store itself is
published only when it is complete, for it has no source to fall back to. An overlay is published
only when every directory of the source is in the tree: a directory that a reader looked up earlier
would show the source only. Nothing here takes a view away; it changes what serves it.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

import structlog

import kit.child
import kit.errors
import kit.files
import kit.formats
import kit.line_worker
from cache import view
from cache.settings import CacheSettings, DatasetSettings
from cache.sources import base, kinds
from cache.store import generations, index
from cache.view import Stage
from linux import mountinfo

log = structlog.get_logger("dataset")

VIEW_SECONDS = 30.0  # a swap takes a millisecond, but looking up a hanging source never ends
STORE_SECONDS = 60.0
LOOK_SECONDS = 30.0  # between two checks of a source that answers
STATE_FORMAT = 1  # of the state file
RETRY_SECONDS = (5.0, 300.0)  # first and longest pause after a failure
# A refresh takes 1.5 us per cached name. At most this share of the time is spent on it.
REFRESH_SHARE = 0.05


# --- what to do next


class Action(Enum):
    NOTHING = auto()
    REACH = auto()  # mount the source if the agent mounts it, and check that it answers
    PUBLISH_SOURCE = auto()
    PUBLISH_OVERLAY = auto()
    PUBLISH_STORE = auto()
    QUEUE = auto()  # ask for a fill
    REFRESH = auto()
    RELEASE = auto()  # unmount the source


@dataclass(frozen=True)
class Facts:
    stage: Stage
    complete: bool
    skeleton: bool
    reached: bool  # the source answered the last check
    reach_due: bool
    moved: bool  # the view shows another mount of the source than the one that answers
    fill_wanted: bool
    job_there: bool  # queued or running
    refresh_due: bool
    source_needed: bool  # a job needs it
    source_held: bool  # the agent may have mounted something of it


def next_action(facts: Facts) -> Action:
    """The most urgent action. Pure; asked again after each action."""
    if facts.complete:
        if facts.stage is not Stage.STORE:
            return Action.PUBLISH_STORE
        # A mounted source costs memory (the cache of ceph-fuse) and keeps devices busy.
        release = facts.source_held and not facts.source_needed
        return Action.RELEASE if release else Action.NOTHING
    if not facts.reached:
        return Action.REACH if facts.reach_due else Action.NOTHING
    if facts.stage is Stage.OVERLAY or facts.skeleton:
        if facts.stage is not Stage.OVERLAY or facts.moved:
            return Action.PUBLISH_OVERLAY
    elif facts.stage is not Stage.SOURCE or facts.moved:
        return Action.PUBLISH_SOURCE
    if facts.fill_wanted and not facts.job_there:
        return Action.QUEUE
    if facts.refresh_due and facts.stage is Stage.OVERLAY:
        return Action.REFRESH
    return Action.REACH if facts.reach_due else Action.NOTHING


# --- what is known


@dataclass(frozen=True)
class Figures(index.Counts):
    """How much there is and how much is stored. From the running job, else as last known."""

    used: int = 0  # SSD bytes
    estimated: bool = True  # files and bytes are not counted yet

    def at_least(self, reached: base.Reached) -> "Figures":
        """With what the source counts where it has more."""
        files, size = max(self.files, reached.files or 0), max(self.bytes, reached.bytes or 0)
        return dataclasses.replace(self, files=files, bytes=size)


@dataclass(frozen=True)
class Verification:
    """The last verify. ``state``: '', queued, running, good, bad, cancelled or failed."""

    state: str = ""
    source: bool = False  # compares with the source too
    why: str = ""
    result: dict[str, int] | None = None  # named as in the API
    at: float = 0.0  # Unix time of its end

    @property
    def queued(self) -> bool:
        return self.state == "queued"

    @property
    def pending(self) -> bool:
        """From the request until the result is known, including the withdrawal of bad files."""
        return self.state in ("queued", "running")


class Job(Protocol):
    """The running job of a dataset (``cache.jobs``)."""

    kind: str  # fill, verify or withdraw
    phase: str

    def rates(self) -> tuple[float, float]:
        """Files and bytes per second."""

    def eta(self) -> float | None:
        """Seconds left, None when they cannot be estimated."""

    async def hint(self, paths: list[str]) -> None:
        """Paths that a reader opened, relative to the dataset."""

    async def cancel(self) -> None:
        """Ends it after a last commit; kills it when it takes too long."""


def state_file(state_dir: Path, name: str) -> Path:
    """What is remembered beside the store, for example that the dataset was removed."""
    return state_dir / "datasets" / f"{name}.json"


class Dataset:
    """One dataset of the settings while the agent runs."""

    def __init__(
        self,
        settings: DatasetSettings,
        cache: CacheSettings,
        state_dir: Path,
        job_queued: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.cache = cache
        self.source: base.Source = kinds.source_of(settings, state_dir)
        self.view = f"{os.path.realpath(cache.views)}/{settings.name}/data"
        self._state = state_file(state_dir, settings.name)
        self._scratch = str(state_dir / "scratch")
        self._job_queued = job_queued  # wakes the scheduler
        identity = json.dumps(self.source.identity, sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self._store = os.path.realpath(cache.store)
        self.folder = f"{self._store}/{settings.name}/{settings.freshness}-{digest}"
        self.generation = generations.new(settings.name, identity)
        self.stage = Stage.NONE
        self.reached: base.Reached | None = None
        self.trouble: kit.errors.AgentError | None = None  # of the last action that failed
        self.no_store: kit.errors.AgentError | None = None  # why nothing can be stored
        self.newer: kit.errors.HostError | None = None  # a newer agent's files: all is left alone
        self.removed = False
        self.notes: list[str] = []
        self.refreshes = 0
        self.figures = Figures()
        # Jobs: what is asked for, what runs, and when a fill may be asked for again.
        self.fill_queued = False
        self.verification = Verification()
        self.job: Job | None = None
        self.fill_backoff = kit.line_worker.Backoff(*RETRY_SECONDS)
        self._no_fill_before = 0.0
        self._reach_backoff = kit.line_worker.Backoff(*RETRY_SECONDS)
        self._reach_at = 0.0
        self._refresh_wanted = False
        self._refresh_at = 0.0
        self._published_device = ""
        self._source_held = True  # an earlier agent may have left it mounted
        self._wake = asyncio.Event()
        self.lock = asyncio.Lock()

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def tree(self) -> str:
        return f"{self.folder}/tree"

    # --- start

    def adopt(self, fields: dict[str, Any] | None) -> None:
        """Continue what an earlier agent left. ``fields``: of generation.json, if there is one.

        What a newer agent left stays as it is: the view, the store and the files.
        """
        self.stage = view.stage_of(self.view, self.tree, mountinfo.read())
        try:
            if fields is not None:
                found = generations.generation_of(fields)
                if found.identity == self.generation.identity:
                    self.generation = found
                    self.show_kept_figures()
            kept = self._kept_state()
        except kit.errors.HostError as error:
            self.newer = self.trouble = error
            used = int((fields or {}).get("used", 0))
            self.generation = dataclasses.replace(self.generation, state="new", used=used)
            log.error("dataset of a newer agent is left alone", dataset=self.name, why=str(error))
            return
        self.removed = bool(kept.get("removed"))
        self._published_device = str(kept.get("device", ""))

    def _kept_state(self) -> dict[str, Any]:
        """HostError when a newer agent wrote it."""
        try:
            kept = dict(json.loads(self._state.read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}
        kit.formats.check(str(self._state), kept, STATE_FORMAT)
        return kept

    def _save_state(self) -> None:
        self._refuse_newer()
        self._state.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        kept = {"removed": self.removed, "device": self._published_device}
        kit.files.save(self._state, json.dumps({kit.formats.KEY: STATE_FORMAT, **kept}).encode())

    def _refuse_newer(self) -> None:
        if self.newer is not None:
            raise self.newer

    async def change(self, **changes: Any) -> None:
        """Change generation.json durably."""
        if self.no_store is not None:
            raise self.no_store
        self._refuse_newer()
        self.generation = dataclasses.replace(self.generation, **changes)
        fields = dataclasses.asdict(self.generation)
        await kit.child.call(generations.save, self.folder, fields, deadline=STORE_SECONDS)

    def show_kept_figures(self) -> None:
        """Show the figures of generation.json, while no job reports newer ones."""
        now = self.generation
        self.figures = Figures(**now.counts(), used=now.used, estimated=not now.skeleton)

    # --- the loop

    def wake(self) -> None:
        self._wake.set()

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        while True:
            self._wake.clear()
            try:
                async with self.lock:
                    acted = await self._act(next_action(self.facts()))
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                acted = False
                self._note_trouble(error)
            if not acted:
                with contextlib.suppress(TimeoutError):  # something is due
                    async with asyncio.timeout(self._patience()):
                        await self._wake.wait()

    def _patience(self) -> float:
        now = time.monotonic()
        refresh_at = self._refresh_at if self._refresh_wanted else 0.0
        due = (self._reach_at, self._no_fill_before, refresh_at)
        later = [at for at in due if at > now]
        return max(0.05, min(later, default=now + LOOK_SECONDS) - now)

    def facts(self) -> Facts:
        now = time.monotonic()
        generation = self.generation
        wanted = self.settings.warm or generation.wanted
        # What failed may succeed later, and there may be room for what did not fit.
        unfinished = generation.state in ("new", "filling") or (
            generation.state == "partial" and (generation.failed > 0 or generation.left_files > 0)
        )
        return Facts(
            stage=self.stage,
            complete=generation.state == "complete",
            skeleton=generation.skeleton,
            reached=self.reached is not None,
            reach_due=now >= self._reach_at and not self.removed,
            moved=self.reached is not None and self.reached.device != self._published_device,
            fill_wanted=wanted
            and unfinished
            and not generation.held
            and not self.removed
            and now >= self._no_fill_before,
            job_there=self.fill_queued or self.job is not None,
            refresh_due=self._refresh_wanted and now >= self._refresh_at,
            source_held=self._source_held,
            source_needed=self.verification.pending or self.job is not None,
        )

    async def _act(self, action: Action) -> bool:
        if action is Action.NOTHING or self.removed or self.newer is not None:
            return False
        match action:
            case Action.REACH:
                await self.reach()
            case Action.PUBLISH_SOURCE:
                await self.publish(Stage.SOURCE)
            case Action.PUBLISH_OVERLAY:
                await self.publish(Stage.OVERLAY)
            case Action.PUBLISH_STORE:
                await self._publish_store()
            case Action.QUEUE:
                self.fill_queued = True
                self._job_queued()
            case Action.REFRESH:
                await self.refresh()
            case Action.RELEASE:
                self.reached = None
                self._source_held = False
                await self.source.release()
        return True

    def _note_trouble(self, error: Exception) -> None:
        again = "see the kernel log; it is tried again"
        if isinstance(error, RuntimeError):  # a child process died, for lack of memory perhaps
            why = f"a helper process failed ({str(error).splitlines()[-1]})"
            error = kit.errors.HostError(f"dataset {self.name}", why, again)
        elif isinstance(error, OSError):
            thing = f"dataset {self.name}: view {self.view}"
            error = kit.errors.HostError(thing, f"{error.strerror or error}", again)
        assert isinstance(error, kit.errors.AgentError)
        if self.trouble is None or str(error) != str(self.trouble):
            log.warning("dataset is not served as it should be", dataset=self.name, why=str(error))
        self.trouble = error
        self._reach_at = time.monotonic() + self._reach_backoff.next()

    # --- what jobs use too; the caller has the lock

    async def reach(self) -> None:
        """Reach the source. SourceError when it does not answer; the view stays as it is."""
        self._reach_at = time.monotonic() + LOOK_SECONDS
        self._source_held = True
        try:
            self.reached = await self.source.reach(self.cache.source_timeout)
        except kit.errors.SourceError:
            self.reached = None
            raise
        self._reach_backoff.reset()
        self.trouble = None
        if not self.generation.skeleton and self.job is None:
            self.figures = self.figures.at_least(self.reached)

    async def publish(self, stage: Stage) -> None:
        """Have ``stage`` serve the view. OSError."""
        source = self.reached.root if self.reached else ""
        clean = await kit.child.call(
            view.publish, self.view, str(stage), source, self.tree, self._scratch,
            deadline=VIEW_SECONDS,
        )  # fmt: skip
        log.info("view published", dataset=self.name, before=str(self.stage), now=str(stage))
        self.stage = stage
        self._refresh_wanted = False
        if self.reached is not None:
            self._published_device = self.reached.device
            self._save_state()
        if not clean:
            self.notes = ["this kernel (before 6.5) keeps earlier mounts of the view below it"]

    async def _publish_store(self) -> None:
        """Publish the store; when its tree cannot be opened, fill again from the source."""
        try:
            await self.publish(Stage.STORE)
        except OSError:
            if self.stage is not Stage.STORE:
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

    def want_refresh(self) -> None:
        """Something was committed that running views do not see yet."""
        self._refresh_wanted = True
        self.wake()

    def fill_later(self, seconds: float | None = None) -> None:
        """No fill for ``seconds``, by default for the next, longer pause after failures."""
        pause = self.fill_backoff.next() if seconds is None else seconds
        self._no_fill_before = time.monotonic() + pause

    def retry_now(self) -> None:
        """Check the source and fill soon; earlier failures delay nothing any more."""
        self._reach_at = self._no_fill_before = 0.0
        self._reach_backoff.reset()
        self.fill_backoff.reset()
        self.wake()

    def suspect_source(self) -> None:
        """Check the source soon."""
        self._reach_at = 0.0

    def put_back(self) -> None:
        """It was removed, and is wanted again."""
        self.removed = False
        self._save_state()

    # --- end

    async def remove(self) -> None:
        """Take the view down and discard the store. InUseError names who uses the view."""
        self._refuse_newer()
        async with self.lock:
            await kit.child.call(view.take_down, self.view, deadline=VIEW_SECONDS)
            self.stage = Stage.NONE
            self.removed = True
            self.fill_queued = False
            self._save_state()
        await self.stop()
        async with self.lock:
            await self.source.release()
            self.reached = None
            await kit.child.call(
                generations.discard, self._store, self.folder, deadline=STORE_SECONDS
            )
            self.generation = generations.new(self.name, self.generation.identity)
            self.figures = Figures()
            self.trouble = None
        log.info("dataset removed", dataset=self.name)

    async def stop(self) -> None:
        """End the running job. The view stays."""
        if self.job is not None:
            await self.job.cancel()

    # --- for status

    def used(self) -> int:
        """SSD bytes that it takes."""
        return max(self.generation.used, self.figures.used if self.job is not None else 0)

    def state(self) -> str:
        """One word; docs/cache.md lists them."""
        generation = self.generation
        if self.removed:
            return "removed"
        if self.newer is not None:
            return "failed"
        if self.job is not None:
            if self.job.kind == "verify":
                return "verifying"
            return "paused" if generation.held == "paused" else self.job.phase or "queued"
        if generation.held and generation.state != "complete":
            return generation.held
        if generation.state == "complete" and self.stage is not Stage.STORE:
            return "failed" if self.trouble is not None else "queued"
        if generation.state in ("complete", "partial"):
            return generation.state
        if self.reached is None:
            return "waiting"
        if self.fill_queued:
            return "queued"
        return "failed" if generation.why else "cold"

    def why(self) -> str:
        """Why its state is not better, in one line."""
        if self.trouble is not None and self.state() != "complete":
            return str(self.trouble)
        return self.generation.why
