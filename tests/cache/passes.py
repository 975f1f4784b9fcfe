"""Passes without an agent: their tasks made here, their coordinators run to the end."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import kit.line_worker
from cache.fill import protocol
from cache.sources import base

LIMITS = protocol.Limits(
    workers=1, bytes_per_second=0, files_per_second=0, budget=2**30, reserve=0.01, others=0
)


def common(generation: Path, source: Path) -> dict[str, Any]:
    """The fields of every task."""
    return {
        "generation": str(generation),
        "source": str(source),
        "stamp": base.look(str(source))["stamp"],
        "immutable": False,
        "limits": LIMITS,
    }


def run(kind: str, task: protocol.Task) -> protocol.End:
    """How a pass of ``cache.fill.<kind>`` ended."""

    async def listen() -> protocol.End:
        worker = kit.line_worker.Worker(
            f"cache.fill.{kind}:main", protocol.Report, about=kind, largest=2**20
        )
        try:
            async with contextlib.aclosing(worker.listen(task, 60.0)) as reports:
                async for report in reports:
                    if report.end is not None:
                        return report.end
            raise AssertionError("the coordinator did not say how the pass ended")
        finally:
            await worker.close()

    return asyncio.run(listen())


class Generation:
    """A source and a generation of it below ``area``, and the passes over them."""

    def __init__(self, area: Path) -> None:
        self.source = area / "source"
        self.folder = area / "generation"
        self.tree = self.folder / "tree"

    @property
    def common(self) -> dict[str, Any]:
        return common(self.folder, self.source)

    def fill(self) -> protocol.End:
        return run("fill", protocol.FillTask(**self.common))

    def verify(self) -> protocol.End:
        return run(
            "verify", protocol.VerifyTask(**self.common, against_source=False, reachable=True)
        )

    def withdraw(self, part: str) -> protocol.End:
        return run("withdraw", protocol.WithdrawTask(**self.common, part=part))
