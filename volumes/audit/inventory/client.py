"""The agent's end of the scan child: asks with a deadline, abandons what hangs."""

import asyncio
import json
import sys
import time

import structlog

import kit.errors
from volumes.audit.inventory import model, scan

log = structlog.get_logger("audit.inventory")

# Children stuck in the kernel at once. Each is 15 MB; another one would only hang beside them.
MOST_ABANDONED = 3
LARGEST_ANSWER = 32 * 2**20


class BlindError(kit.errors.AgentError):
    """The node could not be looked at; what was known stays, and nothing is called fine."""


class Scanner:
    """Looks, one at a time.

    Invariant: at most one child answers to us; one that let its deadline pass is killed, never
    waited for, and counted until the kernel lets it go.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._stuck: list[asyncio.subprocess.Process] = []
        self._busy = asyncio.Lock()
        self.looks = 0
        self.failures = 0
        self.cpu_seconds = 0.0

    @property
    def stuck(self) -> int:
        return len(self._stuck)

    async def look(self, request: scan.Request, deadline: float) -> model.Inventory:
        """BlindError when it takes longer than ``deadline`` seconds or cannot be done."""
        async with self._busy:
            self.looks += 1
            began = time.monotonic()
            try:
                async with asyncio.timeout(deadline):
                    process = await self._child()
                    assert process.stdin is not None and process.stdout is not None
                    process.stdin.write(json.dumps(model.to_json(request)).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
            except TimeoutError:
                self.failures += 1
                self._abandon()
                raise BlindError(
                    "volume audit",
                    f"the look at the node gave no answer within {deadline:g}s",
                    "something it reads hangs in the kernel; 'nodeagent volume audit' says more",
                ) from None
            except (OSError, ValueError) as error:
                self.failures += 1
                self._abandon()
                raise BlindError("volume audit", f"the scan child failed: {error}", "") from error
            except asyncio.CancelledError:
                self._abandon()
                raise
            return self._inventory(line, time.monotonic() - began)

    def _inventory(self, line: bytes, took: float) -> model.Inventory:
        if not line:
            self.failures += 1
            self._abandon()
            raise BlindError(
                "volume audit", "the scan child ended", "it is started again with the next look"
            )
        answer = json.loads(line)
        if "error" in answer:
            self.failures += 1
            raise BlindError(
                "volume audit",
                f"the look failed: {answer['error']}",
                "run as root with the host's /proc and /sys",
            )
        inventory: model.Inventory = model.from_json(model.Inventory, answer["inventory"])
        self.cpu_seconds += inventory.cpu
        return inventory

    async def _child(self) -> asyncio.subprocess.Process:
        self._stuck = [process for process in self._stuck if process.returncode is None]
        if self._process is not None and self._process.returncode is None:
            return self._process
        if len(self._stuck) >= MOST_ABANDONED:
            raise OSError(f"{len(self._stuck)} earlier looks still hang in the kernel")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "volumes.audit.inventory.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=LARGEST_ANSWER,
        )  # fmt: skip
        return self._process

    def _abandon(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.kill()
        except ProcessLookupError:
            pass  # it ended by itself
        if process.returncode is None:
            self._stuck.append(process)

    async def close(self) -> None:
        """End the children; those that hang are left to the kernel."""
        self._abandon()
        ending = [asyncio.create_task(process.wait()) for process in self._stuck]
        if not ending:
            return
        _, hanging = await asyncio.wait(ending, timeout=1.0)
        for task in hanging:
            task.cancel()
        if hanging:
            log.warning("scan children hang in the kernel and are left behind", count=len(hanging))
