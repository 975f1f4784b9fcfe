"""A device that answers slowly is not one that hangs: the deadline counts from its last answer."""

import asyncio
import itertools
from collections.abc import Callable

import pytest

from kit import processes
from linux import procfs
from nodeagent.api import server
from tests.testbed import waiting
from volumes.guard import lease_manager
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
    child: Slow, monkeypatch: pytest.MonkeyPatch, reads: Callable[[int], int | None],
    deadline: float = DEADLINE,
) -> Verdict:  # fmt: skip
    monkeypatch.setattr(prober, "_worker", lambda: child)
    monkeypatch.setattr(procfs, "reads", reads)
    probes = prober.Prober(deadline=deadline)
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


@pytest.mark.parametrize(("deadline", "expected"), [
    (1.0, 20.0), (3.0, prober.MOST_SECONDS), (60.0, 60.0),
])  # fmt: skip
async def test_a_whole_probe_ends_before_who_waits_for_it_gives_up(
    deadline: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = itertools.count()
    child = Slow(after=0)
    await probed(child, monkeypatch, lambda pid: next(answered), deadline)
    assert child.whole == expected
    assert prober.MOST_SECONDS < lease_manager.ALLOW_SECONDS < server.HANDLER_SECONDS


class Waiting(Slow):
    """A child that answers reads, but of a slow device comes to no end before ``over``."""

    def __init__(self, over: asyncio.Event) -> None:
        super().__init__(after=0)
        self.over = over

    async def ask(self, request: Request, deadline: float) -> Verdict:
        if "slow" in request.device:
            await self.over.wait()
        return BLANK


async def test_slow_devices_of_a_cluster_keep_no_other_clusters_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, over = itertools.count(), asyncio.Event()
    monkeypatch.setattr(prober, "_worker", lambda: Waiting(over))
    monkeypatch.setattr(procfs, "reads", lambda pid: next(answered))
    probes = prober.Prober(deadline=waiting.limit(60))
    slow = [asyncio.create_task(probes.probe(f"/dev/slow{n}", cluster="a")) for n in range(12)]
    try:
        await asyncio.sleep(0)
        other = asyncio.create_task(probes.probe("/dev/rbd9", cluster="b"))
        await asyncio.wait({other}, timeout=waiting.limit(10))
        assert other.done() and probes.started == 4 + 1
        over.set()
        assert await asyncio.gather(*slow) == [BLANK] * 12
    finally:
        await probes.close()


async def test_the_probes_of_all_clusters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, over = itertools.count(), asyncio.Event()
    monkeypatch.setattr(prober, "_worker", lambda: Waiting(over))
    monkeypatch.setattr(procfs, "reads", lambda pid: next(answered))
    probes = prober.Prober(deadline=waiting.limit(60), at_once=1)
    names = [f"slow{n}" for n in range(2 * prober.MOST_CLUSTERS)]
    slow = [asyncio.create_task(probes.probe(each, cluster=each)) for each in names]
    try:
        await waiting.until_async(lambda: probes.started == prober.MOST_CLUSTERS, 10, "probes")
        over.set()
        await asyncio.gather(*slow)
        assert probes.started == len(names)
    finally:
        await probes.close()


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
