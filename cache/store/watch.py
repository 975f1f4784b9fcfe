"""Watches the store's disk and says when it must not be used any more, and when it may be again.

One process looks once a second (``cache.store.probe``). One that hangs is left behind and counted,
and no other is started until it has ended: a dead disk must not use up the agent's processes.

A disk that is busy answers late. While it completes other reads and writes meanwhile, by the
kernel's count, it is not dead, and the watch waits on.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

import kit.errors
import kit.line_worker
import kit.pause
import kit.processes
from cache.store import health, probe
from cache.store.health import DiskHealth, Sign
from cache.store.soundness import Soundness

log = structlog.get_logger("store")

LOOK_SECONDS = 1.0
# A disk that neither answers nor completes anything else for this long is dead or hangs.
PATIENCE_SECONDS = 4.0
# A busy disk that has not answered by then is of no use to jobs, either.
MOST_PATIENCE_SECONDS = 60.0


class StoreWatch:
    def __init__(
        self, store: str, state_dir: Path, disk: Path | None, changed: Callable[[], None],
        soundness: Soundness, looked: Callable[[], None],
    ) -> None:  # fmt: skip
        """``changed`` is called when ``health.state`` has become another one, ``looked`` after each
        look."""
        self.health = DiskHealth(since=time.monotonic())
        self.disk = disk  # of the settings
        self.seen = probe.Seen()  # the last look that found nothing wrong
        self.missing = False  # as in Sign, at the last look
        self.late = 0  # looks that a busy disk answered after the patience for a dead one
        self._store, self._state_dir = store, str(state_dir)
        self._device = 0
        self._heard = -1
        self._changed, self._looked = changed, looked
        self._soundness = soundness
        self._about = f"disk of cache.store {store}"
        self._worker = kit.line_worker.LineWorker(
            "cache.store.probe:main", probe.Seen, about=self._about,
            backoff=kit.pause.Backoff(0.5, 5.0),
        )  # fmt: skip

    async def follow(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                self.take(await self._look())
                self._looked()
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._worker.close()

    async def _look(self) -> Sign:
        # Only where the kernel's log can be read is silence a sign that nothing was lost.
        slow = self._heard >= 0
        if kit.processes.hanging(self._about):
            return Sign("its disk does not answer", gone=True, slow=slow)
        wanted = probe.Look(
            self._store, self._state_dir, None if self.disk is None else str(self.disk),
            self._device, thorough=not self.health.usable, heard=self._heard,
        )  # fmt: skip
        try:
            seen = await self._patiently(wanted)
        except TimeoutError as error:
            return Sign(str(error), slow=slow)
        except (OSError, kit.errors.AgentError, kit.line_worker.ChildError) as error:
            # The process died or could not start: that says nothing of the disk.
            log.info("the store's disk could not be looked at", why=str(error))
            return Sign(self.health.why, slow=True)
        self._device = seen.device or self._device
        self._heard = seen.heard
        counted = self._soundness.new_errors(seen.errors) if seen.errors is not None else 0
        if counted and not seen.fault:
            return Sign(f"its file system has counted {counted} new errors")
        self.seen = seen if not seen.fault else self.seen
        return Sign(seen.fault, seen.gone, missing=seen.missing)

    async def _patiently(self, wanted: probe.Look) -> probe.Seen:
        """TimeoutError of a disk that does nothing any more, or takes far too long."""
        began = time.monotonic()
        asking = asyncio.create_task(self._worker.ask(wanted, MOST_PATIENCE_SECONDS))
        done = completed(self._device)
        late = False
        try:
            while True:
                ready, _ = await asyncio.wait({asking}, timeout=PATIENCE_SECONDS)
                if ready:
                    return await asking
                before, done = done, completed(self._device)
                if done is None or done == before:
                    raise TimeoutError(f"its disk does not answer within {PATIENCE_SECONDS:g}s")
                if time.monotonic() - began >= MOST_PATIENCE_SECONDS:
                    raise TimeoutError(f"its disk is too slow: {MOST_PATIENCE_SECONDS:g}s a read")
                self.late += not late
                late = True
        except kit.processes.DeadlineError as error:
            raise TimeoutError(f"its disk is too slow: {error.cause}") from error
        finally:
            if not asking.done():
                asking.cancel()  # leaves the process behind
                await asyncio.gather(asking, return_exceptions=True)

    def take(self, sign: Sign) -> None:
        before, self.health = self.health, health.after(self.health, sign, time.monotonic())
        self.missing = sign.missing
        if self.health.suspect and not before.suspect:
            self._soundness.count_trouble(self.health.why)
        if self.health.state is not before.state:
            log.warning(
                "health of the store's disk", before=str(before.state), now=str(self.health.state),
                why=self.health.why,
            )  # fmt: skip
            self._changed()

    def trouble(self) -> kit.errors.HostError | None:
        """Why the store is not used now."""
        if self.health.usable:
            return None
        return kit.errors.HostError(
            f"cache.store {self._store}", f"{self.health.why} ({self.health.state})",
            "a new one is made there" if self.missing
            else "see the kernel log and smartctl, mount or replace the SSD",
        )  # fmt: skip


def completed(device: int, sys: Path = Path("/sys")) -> int | None:
    """Reads and writes that a block device has completed; None where nobody counts them.

    The kernel answers from memory, however the disk is.
    """
    try:
        path = sys / f"dev/block/{os.major(device)}:{os.minor(device)}/stat"
        fields = path.read_text().split()
        return int(fields[0]) + int(fields[4])
    except (OSError, ValueError, IndexError):
        return None
