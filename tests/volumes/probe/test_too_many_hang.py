"""The prober where no child can be started, or where one cluster's children hang."""

import asyncio
import os
from pathlib import Path

import pytest

from kit import processes
from tests.testbed import expiry, waiting
from volumes.probe import prober
from volumes.probe.examine import Kind


async def test_no_child_is_no_verdict_and_keeps_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes = prober.Prober(waiting.limit(30))
    try:
        monkeypatch.setattr(processes, "MOST_HANGING", 0)
        await probes.warm()
        with pytest.raises(processes.TooManyHangError):
            await probes.probe("/dev/there-is-none")
        assert not probes.hanging
        monkeypatch.undo()
        assert (await probes.probe("/dev/there-is-none")).verdict is Kind.NO_MEDIA
    finally:
        await probes.close()


async def test_a_dead_cluster_leaves_children_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "MOST_OF_CLUSTER", 1)
    late = expiry.Expiry(monkeypatch)
    probes = prober.Prober(deadline=late.seconds)
    silent = tmp_path / "device"
    os.mkfifo(silent)
    monkeypatch.setattr(processes, "hanging", lambda about=None: int(str(silent) in (about or "")))
    try:
        hanging = asyncio.create_task(probes.probe(str(silent), cluster="dead"))
        await late.running()
        late.pass_all()
        assert (await hanging).verdict is Kind.TIMEOUT
        with pytest.raises(processes.TooManyHangError, match="cluster or driver dead"):
            await probes.probe("/dev/there-is-none", cluster="dead")
        probes.deadline = waiting.limit(30)
        other = await probes.probe("/dev/there-is-none", cluster="well")
        assert other.verdict is Kind.NO_MEDIA
    finally:
        await probes.close()
