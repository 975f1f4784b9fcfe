"""Keeps a new volume attached from its refused format until its next one may succeed.

ceph-csi undoes a stage whose mkfs was refused: it unmaps the image, and kubelet's next try maps it
anew. That attachment has no lease yet, so its mkfs would be refused too, and so on. While a program
has the device open, krbd refuses the unmap (EBUSY) and cryptsetup the close; ceph-csi then goes on,
and its next try finds the device that was checked meanwhile.

So a child (``hold``) opens the device, for reading, when a format was refused. It ends when the
check says no, when content is seen, with the lease, with the agent, and by itself after its time. A
child, because an open can hang in the kernel.
"""

import asyncio
import contextlib
from collections.abc import Coroutine

import structlog

import kit.errors
import kit.line_worker
from linux import blockdev
from volumes.guard import hold, lease

log = structlog.get_logger("volumes")

MOST = 32
OPEN_SECONDS = 5.0


class Holds:
    """At most one child for each device, and ``MOST`` of them."""

    def __init__(self) -> None:
        self.begun = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()  # those that end, too
        self._spare: kit.line_worker.LineWorker[bool] | None = None
        self._warming: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def names(self) -> list[str]:
        return sorted(self._tasks)

    def begin(self, device: blockdev.BlockDevice, seconds: float) -> None:
        """Hold it for so long at most. Not where that would not keep it attached: an nbd device is
        detached whoever has it open, a loop device when the last one closes it."""
        held = device.name in self._tasks or len(self._tasks) >= MOST
        if held or device.parent or device.driver not in lease.NEW_DISKS:
            return
        self._tasks[device.name] = self._start(self._hold(device, seconds))

    def _start(self, what: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def warm(self) -> None:
        """Have a child ready soon: whoever undoes a stage does not wait for its start."""
        if self._spare is None and self._warming is None and not self._closed:
            self._warming = self._start(self._warm())

    async def _warm(self) -> None:
        spare = _worker()
        try:
            await spare.start()
            self._spare = spare
        except (kit.errors.AgentError, OSError) as error:
            log.warning("no child is ready for the next hold", error=str(error))
        finally:
            self._warming = None
            if self._spare is not spare:
                await spare.close()

    async def _hold(self, device: blockdev.BlockDevice, seconds: float) -> None:
        worker, self._spare = self._spare or _worker(), None
        worker.about = f"hold of {device.path}"
        try:
            request = hold.Request(device.name, device.number, device.diskseq, seconds)
            await worker.ask(request, OPEN_SECONDS)
            self.begun += 1
            log.info("device is held until its format is decided", device=device.name)
            self.warm()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await worker.ended()  # it may be killed
        except kit.line_worker.FAILURES as error:
            log.info("device not held", device=device.name, why=str(error))  # it may be gone
        finally:
            if self._tasks.get(device.name) is asyncio.current_task():
                del self._tasks[device.name]
            await worker.close()

    def end(self, name: str) -> None:
        """Whoever waits to detach it may."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        self._closed = True
        for name in self.names:
            self.end(name)
        if self._warming is not None:
            self._warming.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._spare is not None:
            await self._spare.close()


def _worker() -> kit.line_worker.LineWorker[bool]:
    return kit.line_worker.LineWorker("volumes.guard.hold:main", bool, about="hold", forked=True)
