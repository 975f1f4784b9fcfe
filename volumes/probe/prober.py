"""Probes devices in children, each abandoned when its device hangs."""

import asyncio
import json
import random
import sys
from pathlib import Path

from volumes.probe import examine

_CHILD = Path(__file__).with_name("child.py")
_LAST_WORDS = 2000


class Prober:
    """Invariant: at most one child per device exists, a hanging one included.

    A child in an uninterruptible sleep does not die of SIGKILL until its device answers; it is
    left alone and counted. While it is there, the device's verdict is TIMEOUT without a new child.
    """

    def __init__(self, deadline: float = 3.0, at_once: int = 4) -> None:
        self.deadline = deadline  # seconds
        self._children: dict[str, asyncio.Task[examine.Verdict]] = {}
        self._slots = asyncio.Semaphore(at_once)
        self._hanging: set[str] = set()
        self._spare: asyncio.subprocess.Process | None = None
        self._closed = False
        self.started = 0

    @property
    def hanging(self) -> frozenset[str]:
        """Devices whose child has outlived its deadline."""
        return frozenset(self._hanging)

    async def probe(self, device: str) -> examine.Verdict:
        """The verdict on the node ``device``, at the latest after the deadline (once a child may
        start: hanging ones hold no slot). Calls for one device share one child."""
        task = self._children.get(device)
        if task is None:
            await self._slots.acquire()
            task = self._children.get(device)
            if task is None:
                task = asyncio.create_task(self._run(device), name=f"probe {device}")
                self._children[device] = task
                task.add_done_callback(lambda _: self._ended(device))
            else:
                self._slots.release()
        elif device in self._hanging:
            return self._timeout(device)
        done, _ = await asyncio.wait({task}, timeout=self.deadline)
        if done:
            return task.result()
        if device not in self._hanging and device in self._children:
            self._hanging.add(device)
            self._slots.release()
        return self._timeout(device)

    def _timeout(self, device: str) -> examine.Verdict:
        return examine.Verdict(
            examine.Kind.TIMEOUT, device, where="no answer", seconds=self.deadline
        )

    def _ended(self, device: str) -> None:
        del self._children[device]
        if device in self._hanging:
            self._hanging.discard(device)
        else:
            self._slots.release()

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-E", str(_CHILD)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def warm(self) -> None:
        """Have a child ready that has started and waits for its device: 40 ms less per probe."""
        if self._spare is None and not self._closed:
            self._spare = await self._start()

    async def _take(self) -> asyncio.subprocess.Process:
        process, self._spare = self._spare, None
        if process is not None and process.returncode is None:
            return process
        return await self._start()

    async def _run(self, device: str) -> examine.Verdict:
        self.started += 1
        process = await self._take()
        loop = asyncio.get_running_loop()
        ends = loop.time() + self.deadline
        timer = loop.call_at(ends, self._kill, process)
        request = json.dumps([device, random.getrandbits(32)]).encode()
        try:
            out, err = await process.communicate(request)
        except asyncio.CancelledError:
            self._kill(process)
            raise
        finally:
            timer.cancel()
        await self.warm()
        try:
            return examine.Verdict.from_json(json.loads(out))
        except (ValueError, KeyError):
            if loop.time() >= ends:  # our own kill ended it, not the device
                return self._timeout(device)
            words = err.decode(errors="replace")[-_LAST_WORDS:].strip()
            where = f"probe ended with {process.returncode}: {words}"
            return examine.Verdict(examine.Kind.UNREADABLE, device, where=where, errno=5)

    @staticmethod
    def _kill(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            try:
                process.kill()
            except ProcessLookupError:
                pass  # it ended by itself just now

    async def close(self) -> None:
        """Give up every child without waiting for those that hang."""
        self._closed = True
        for task in list(self._children.values()):
            task.cancel()
        await asyncio.gather(*self._children.values(), return_exceptions=True)
        if self._spare is not None:
            self._kill(self._spare)
            await self._spare.communicate()
