"""Passes without an agent: their tasks made here, their coordinators run to the end."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit.line_worker
from cache.fill import protocol
from cache.sources import roots
from cache.store import generations
from tests.testbed import trees

LIMITS = protocol.Limits(
    workers=1, bytes_per_second=0, files_per_second=0, budget=2**30, reserve=0.01, others=0
)


def common(generation: Path, source: Path) -> dict[str, Any]:
    """The fields of every task."""
    return {
        "generation": str(generation),
        "source": str(source),
        "stamp": roots.look(str(source))["stamp"],
        "immutable": False,
        "limits": LIMITS,
    }


def run(kind: str, task: protocol.Task) -> protocol.End:
    """How a pass of ``cache.fill.<kind>`` ended."""
    return run_module(f"cache.fill.{kind}:main", task)


def run_module(
    target: str, task: object, each: Callable[[protocol.Report], None] = lambda _: None
) -> protocol.End:
    """How the pass of ``target`` (module:function) ended; ``each`` gets all that it reports."""

    async def listen() -> protocol.End:
        worker = kit.line_worker.LineWorker(
            target, protocol.Report, about=target, largest=2**20,
            forked=target.startswith("cache.fill.blocks:"),  # as the agent starts it
        )  # fmt: skip
        try:
            async with contextlib.aclosing(worker.listen(task, 60.0)) as reports:
                async for report in reports:
                    each(report)
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


def complete(area: Path, files: int) -> Generation:
    """A generation that is filled and recorded as complete."""
    made = Generation(area)
    trees.plain(made.source, files)
    record = dataclasses.asdict(generations.new("a", "source"))
    generations.save(str(made.folder), record | {"state": "complete", "done_files": files})
    assert made.fill().result == "complete"
    return made
