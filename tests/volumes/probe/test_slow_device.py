"""A device that answers slowly is not one that hangs: the deadline counts from its last answer."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from kit import processes
from linux import procfs
from tests.testbed import waiting
from volumes.probe import prober
from volumes.probe.examine import Kind, Request, Verdict

DEADLINE = 1.0
BLANK = Verdict(Kind.BLANK_VERIFIED, "/dev/rbd0")


class Slow:
    """A child that answers when ``after`` deadlines have passed; None: never."""

    pid = 1
    about = ""

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.whole = 0.0
        self.abandoned = False

    async def ask(self, request: Request, deadline: float) -> Verdict:
        self.whole = deadline
        try:
            await asyncio.sleep(60 if self.after is None else self.after * DEADLINE)
        except asyncio.CancelledError:
            self.abandoned = True
            raise
        return BLANK

    async def start(self) -> None: ...

    async def close(self) -> None: ...


async def probed(
    child: Slow, monkeypatch: pytest.MonkeyPatch, reads: Callable[[int], int | None]
) -> Verdict:
    monkeypatch.setattr(prober, "_worker", lambda: child)
    monkeypatch.setattr(procfs, "reads", reads)
    probes = prober.Prober(deadline=DEADLINE)
    try:
        return await probes.probe("/dev/rbd0")
    finally:
        await probes.close()


async def test_a_device_that_answers_reads_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = itertools.count()
    child = Slow(after=2)
    found = await probed(child, monkeypatch, lambda pid: next(answered))
    assert found == BLANK
    assert child.whole == prober.MOST_DEADLINES * DEADLINE  # and no more in all


@pytest.mark.parametrize("reads", [7, None])  # None: this kernel counts none
async def test_a_device_that_answers_no_read_hangs(
    monkeypatch: pytest.MonkeyPatch, reads: int | None
) -> None:
    child = Slow(after=None)
    found = await probed(child, monkeypatch, lambda pid: reads)
    assert found.verdict is Kind.TIMEOUT and child.abandoned


async def test_reads_of_a_process_are_counted_as_they_are_answered() -> None:
    process = await processes.start_python("tests.volumes.probe.test_slow_device:reader")
    try:
        first = procfs.reads(process.pid)
        assert first is not None
        await waiting.until_async(
            lambda: (procfs.reads(process.pid) or 0) > first + 100, 30, "more reads"
        )
    finally:
        process.kill()
        await process.wait()
    assert procfs.reads(process.pid) is None


def reader() -> None:
    while True:
        with open("/dev/zero", "rb", buffering=0) as zeros:
            zeros.read(1)
