"""One dataset while the agent runs: facts in, decisions of ``cache.decide`` carried out."""

import asyncio
import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
from cache import decide, passes, progress, store, view
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
        self.view = str(cache.views / settings.name / "data")
        self._state = state_dir / "datasets" / f"{settings.name}.json"
        self._scratch = str(state_dir / "scratch")
        self._woken = woken  # tells the component that the queue of passes may have changed
        identity = json.dumps(self.source.identity, sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        self.folder = str(cache.store / settings.name / f"{settings.freshness}-{digest}")
        self.generation = store.Generation(settings.name, identity, created=time.time())
        self.stage = view.Stage.NONE
        self.reached: reach.Reached | None = None
        self.trouble: kit.errors.AgentError | None = None  # why it is not better than it is
        self.removed = False
        self.queued = False
        self.running: passes.Pass | None = None
        self.task_kind = ""
        self.progress = progress.Progress()
        self.verified: dict[str, Any] = {}  # result of the last verify
        self.notes: list[str] = []
        self._published_device = ""
        self._look_at = 0.0
        self._reach_failures = 0
        self._pass_failures = 0
        self._pass_at = 0.0
        self._refresh_wanted = False
        self._refresh_at = 0.0
        self.refreshes = 0
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()  # around everything that changes view or generation

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def tree(self) -> str:
        return f"{self.folder}/tree"

    # --- start --------------------------------------------------------------------------------

    async def adopt(self) -> None:
        """Find what an earlier agent left: the generation, the view, what was asked for."""
        fields = await kit.child.call(store.load, self.folder, deadline=STORE_SECONDS)
        if fields is not None and fields.get("identity") == self.generation.identity:
            self.generation = store.generation_of(fields)
            self._show_totals()
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

    async def _set(self, **changes: Any) -> None:
        """Change generation.json, durably."""
        self.generation = dataclasses.replace(self.generation, **changes)
        fields = dataclasses.asdict(self.generation)
        await kit.child.call(store.save, self.folder, fields, deadline=STORE_SECONDS)

    # --- the loop -----------------------------------------------------------------------------

    def wake(self) -> None:
        self._wake.set()

    async def follow(self) -> None:
        """For ever: decide, act, wait for something to happen."""
        while True:
            self._wake.clear()
            try:
                async with self._lock:
                    acted = await self._act(decide.next_action(self.facts()))
            except (kit.errors.AgentError, OSError) as error:
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
        if self._pass_at > now:
            due.append(self._pass_at)
        later = [at for at in due if at > now]
        return max(0.05, min(later, default=now + LOOK_SECONDS) - now)

    def facts(self) -> decide.Facts:
        now = time.monotonic()
        generation = self.generation
        wanted = self.settings.warm or generation.wanted
        return decide.Facts(
            stage=self.stage,
            complete=generation.state == "complete",
            skeleton=generation.skeleton,
            reached=self.reached is not None,
            reach_due=now >= self._look_at and not self.removed,
            moved=self.reached is not None and self.reached.device != self._published_device,
            pass_wanted=wanted
            and generation.state in ("new", "filling")
            and not generation.held
            and not self.removed
            and now >= self._pass_at,
            pass_there=self.queued or self.running is not None,
            refresh_due=self._refresh_wanted and now >= self._refresh_at,
        )

    async def _act(self, action: decide.Action) -> bool:
        if self.removed:
            return False
        match action:
            case decide.Action.NOTHING:
                return False
            case decide.Action.REACH:
                await self._reach()
            case decide.Action.PUBLISH_SOURCE:
                await self._publish(view.Stage.SOURCE)
            case decide.Action.PUBLISH_OVERLAY:
                await self._publish(view.Stage.OVERLAY)
            case decide.Action.PUBLISH_STORE:
                await self._publish(view.Stage.STORE)
            case decide.Action.QUEUE:
                self.queued = True
                self._woken()
            case decide.Action.REFRESH:
                await self._refresh()
        return True

    def _note_trouble(self, error: Exception) -> None:
        if isinstance(error, OSError):
            error = kit.errors.HostError(
                f"dataset {self.name}: view {self.view}",
                f"{error.strerror or error}",
                "see the kernel log; it is tried again",
            )
        assert isinstance(error, kit.errors.AgentError)
        if self.trouble is None or str(error) != str(self.trouble):
            log.warning("dataset is not served as it should be", dataset=self.name, why=str(error))
        self.trouble = error
        self._look_at = time.monotonic() + self._wait_after(self._reach_failures)
        self._reach_failures += 1

    def _wait_after(self, failures: int) -> float:
        first, longest = RETRY_SECONDS
        return float(min(first * 2 ** min(failures, 10), longest) * random.uniform(0.8, 1.2))

    async def _reach(self) -> None:
        """SourceError when it does not answer; what is published stays."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            self.reached = await self.source.reach(self.cache.source_timeout)
        except kit.errors.SourceError:
            self.reached = None
            raise
        self._reach_failures = 0
        self.trouble = None
        if not self.generation.skeleton and self.running is None:
            self.progress.files_total = self.reached.files or self.progress.files_total
            self.progress.bytes_total = self.reached.bytes or self.progress.bytes_total

    async def _publish(self, stage: view.Stage) -> None:
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

    async def _refresh(self) -> None:
        self._refresh_wanted = False
        began = time.monotonic()
        await kit.child.call(view.refresh, self.view, deadline=VIEW_SECONDS)
        self.refreshes += 1
        took = time.monotonic() - began
        self._refresh_at = time.monotonic() + max(self.cache.refresh_interval, took / REFRESH_SHARE)

    # --- passes -------------------------------------------------------------------------------

    def limits(self, others: int) -> dict[str, Any]:
        """The command that tells a pass how much it may do. ``others``: bytes of other datasets."""
        fill = self.cache.fill
        return {
            "do": "limits",
            "workers": fill.workers,
            "bytes_per_second": fill.bytes_per_second,
            "files_per_second": fill.files_per_second,
            "space": {
                "reserve": self.cache.reserve,
                "budget": self.cache.budget,
                "others": others,
            },
        }

    async def run_pass(self, others: int) -> None:
        """One fill, to its end. Called by the component when it is this dataset's turn."""
        self.queued = False
        reached = self.reached
        if reached is None:
            return
        await self._set(state="filling", why="", left_files=0, left_bytes=0)
        task = {
            "dataset": self.name,
            "generation": self.folder,
            "source": reached.root,
            "immutable": self.source.immutable,
            "native": reached.native,
            "mounted": _mounted_below(reached.root),
            **self.limits(others),
        }
        end = await self._run("fill", "cache.fill.fillpass", task)
        try:
            await self._fill_ended(end)
        finally:
            self._rest()  # only now: the outcome is written down, nothing asks for another pass
            self.wake()

    async def _run(self, kind: str, module: str, task: dict[str, Any]) -> dict[str, Any]:
        self.task_kind = kind
        self.progress.restart()
        self.running = passes.Pass(module, task, self._heard)
        log.info("pass started", dataset=self.name, kind=kind)
        try:
            await self.running.start()
            assert self.running.ended is not None
            return await self.running.ended
        except BaseException:
            self._rest()
            raise

    def _rest(self) -> None:
        self.running = None
        self.task_kind = ""

    def _heard(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "progress":
                if self.progress.take(event):
                    self._refresh_wanted = True
                    self.wake()
                if not self.progress.estimated or self.reached is None:
                    return
                self.progress.files_total = max(self.progress.files_total, self.reached.files or 0)
                self.progress.bytes_total = max(self.progress.bytes_total, self.reached.bytes or 0)
            case "skeleton":
                self.progress.estimated = False
                if not self.generation.skeleton:
                    # Durable with the next save; until then a restart scans again.
                    self.generation = dataclasses.replace(self.generation, skeleton=True)
                self.wake()
            case "note":
                log.info("pass says", dataset=self.name, text=event["text"])

    async def _fill_ended(self, end: dict[str, Any]) -> None:
        result, why = end["result"], end["why"]
        log.info("pass ended", dataset=self.name, result=result, why=why)
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
        if result in ("complete", "partial"):
            self._pass_failures = 0
        elif result == "failed":
            wait = self._wait_after(self._pass_failures)
            self._pass_at = time.monotonic() + wait
            self._pass_failures += 1
            self._look_at = 0.0  # the source is the first suspect
        async with self._lock:
            await self._set(**changes)
            self._refresh_wanted = True

    def _show_totals(self) -> None:
        """Figures of generation.json, while no pass gives fresher ones."""
        kept, shown = self.generation, self.progress
        shown.files_total, shown.bytes_total = kept.files, kept.bytes
        shown.files_done, shown.bytes_done = kept.done_files, kept.done_bytes
        shown.failed, shown.skipped, shown.used = kept.failed, kept.skipped, kept.used
        shown.estimated = not kept.skeleton

    # --- operations of the API ------------------------------------------------------------------

    async def warm(self) -> None:
        """Begin, go on, or try again what failed. Nothing to do for a complete one."""
        self.removed = False
        self._keep_state()
        self._look_at = self._pass_at = 0.0
        self._reach_failures = self._pass_failures = 0
        async with self._lock:
            if self.generation.state != "complete":
                state = "filling" if self.generation.state == "partial" else self.generation.state
                await self._set(state=state, wanted=True, held="", why="")
        if self.running is not None:
            self.running.tell({"do": "resume"})
        self.wake()

    async def pause(self) -> None:
        self._refuse_unless_filling("pause")
        async with self._lock:
            await self._set(held="paused")
        if self.running is not None:
            self.running.tell({"do": "pause"})

    async def resume(self) -> None:
        if not self.generation.held:
            raise kit.errors.RefusedError(
                f"dataset {self.name}", "it is not paused", "nothing to do"
            )
        await self.warm()

    async def cancel(self) -> None:
        """Stop filling; what is in the store stays and serves."""
        if self.task_kind != "verify":
            self._refuse_unless_filling("cancel")
            async with self._lock:
                await self._set(held="cancelled", wanted=False)
        self.queued = False
        if self.running is not None:
            await self.running.cancel()

    def _refuse_unless_filling(self, what: str) -> None:
        if self.generation.state in ("complete", "partial"):
            raise kit.errors.RefusedError(
                f"dataset {self.name}",
                f"it is {self.generation.state}, there is nothing to {what}",
                "see 'nodeagent dataset show'",
            )

    async def verify(self, *, source: bool) -> None:
        """Ask for a verify pass; its result shows in ``describe``."""
        if self.running is not None:
            raise kit.errors.RefusedError(
                f"dataset {self.name}", f"a {self.task_kind} pass is under way", "wait or cancel it"
            )
        if self.generation.state not in ("complete", "partial"):
            raise kit.errors.RefusedError(
                f"dataset {self.name}",
                f"it is {self.state()}, nothing is finished yet",
                "warm it first",
            )
        if source and self.reached is None:
            await self._reach()
        self.verified = {"state": "queued", "source": source}
        self._woken()

    async def run_verify(self, others: int) -> None:
        """One verify pass to its end; bad files are replaced, or withdrawn."""
        if self.reached is None:
            try:
                await self._reach()
            except kit.errors.SourceError as error:
                self.trouble = error  # without it bad files are found but not replaced
        against_source = bool(self.verified["source"])
        task = {
            "dataset": self.name,
            "generation": self.folder,
            "source": self.reached.root if self.reached else self.tree,
            "reachable": self.reached is not None,
            "against_source": against_source,
            "immutable": self.source.immutable,
            "native": None,
            "mounted": [],
            **self.limits(others),
        }
        self.verified = {"state": "running", "source": against_source}
        end = await self._run("verify", "cache.fill.verifypass", task)
        self._rest()
        self.verified = {"source": against_source, "state": end["result"], "why": end["why"]}
        self.verified |= {k: end.get(k, 0) for k in ("checked_files", "checked_bytes", "bad")}
        self.verified |= {"replaced": end.get("replaced", 0), "withdrawn": 0}
        self.verified["at"] = time.time()
        log.info("verify ended", dataset=self.name, **self.verified)
        if left := end.get("unreplaced", []):
            await self._withdraw(left, others)
        self._show_totals()
        self._refresh_wanted = True
        self.wake()

    async def _withdraw(self, bad: list[Any], others: int) -> None:
        """Take bad files out of the store so that readers get the source's; the rest stays."""
        if self.reached is None:
            self.verified["why"] = "bad files stay until the source answers: it has the only copy"
            return
        async with self._lock:
            # Never unlink under a bind of the store: first the overlay, which falls through.
            await self._publish(view.Stage.OVERLAY)
            await self._set(state="partial", why=f"{len(bad)} bad files could not be replaced")
            task = {
                "dataset": self.name,
                "generation": self.folder,
                "source": self.reached.root,
                "withdraw": bad,
                "immutable": self.source.immutable,
                "native": None,
                "mounted": [],
                **self.limits(others),
            }
            end = await self._run("withdraw", "cache.fill.verifypass", task)
            self._rest()
            self.verified["withdrawn"] = end.get("withdrawn", 0)
            await self._refresh()

    async def remove(self) -> None:
        """Take the view down if nobody uses it, and what is stored. InUseError says who does."""
        async with self._lock:
            await kit.child.call(view.take_down, self.view, deadline=VIEW_SECONDS)
            self.stage = view.Stage.NONE
            self.removed = True
            self.queued = False
            self._keep_state()
        if self.running is not None:
            await self.running.cancel()
        async with self._lock:
            await self.source.release()
            self.reached = None
            await kit.child.call(
                store.discard, str(self.cache.store), self.folder, deadline=STORE_SECONDS
            )
            self.generation = store.Generation(
                self.name, self.generation.identity, created=time.time()
            )
            self.progress = progress.Progress()
            self.trouble = None
        log.info("dataset removed", dataset=self.name)

    def forget(self) -> None:
        """Nothing is left of a dataset that is no longer in the settings."""
        self._state.unlink(missing_ok=True)

    def hint(self, paths: list[str]) -> None:
        """Names that a job opened, relative to the dataset; a running fill fetches them sooner."""
        if self.running is not None and self.task_kind == "fill":
            self.running.tell({"do": "hints", "paths": paths})

    async def stop(self) -> None:
        """End our pass. The view stays."""
        if self.running is not None:
            await self.running.cancel()

    def used(self) -> int:
        """Bytes of the SSD that it takes."""
        return max(self.generation.used, self.progress.used if self.running is not None else 0)

    # --- for people -----------------------------------------------------------------------------

    def state(self) -> str:
        """One word; docs/cache.md lists them."""
        if self.removed:
            return "removed"
        if self.task_kind == "verify":
            return "verifying"
        if self.running is not None:
            return "paused" if self.generation.held == "paused" else self.progress.phase or "queued"
        if self.generation.held and self.generation.state != "complete":
            return self.generation.held
        if self.generation.state in ("complete", "partial"):
            return self.generation.state
        if self.reached is None:
            return "waiting"
        if self.queued:
            return "queued"
        return "failed" if self.generation.why else "cold"

    def why(self) -> str:
        """What keeps it from being better, one line."""
        if self.trouble is not None and self.state() != "complete":
            return str(self.trouble)
        return self.generation.why


def _mounted_below(root: str) -> list[str]:
    """Mount points inside the source, relative: what lies on them is not part of the dataset."""
    return [
        mount.target[len(root) + 1 :]
        for mount in mountinfo.read()
        if mount.target.startswith(root + "/")
    ]
