"""A fleet of 7,500 nodes in simulated time, with the agent's own ``preheat.registry.schedule``.

``python -m tests.bench.fleet`` prints the table of docs/preheat.md, ``--write`` writes it there. It
is the same each time: all that is random comes from the nodes' numbers.

The model: one image at one registry, 5 GB in ten layers, 100 MB/s for each node whoever else pulls.
New settings reach the nodes within a minute. A node acts in its cycles, every 15 s. A registry that
is down refuses at once, and cuts off pulls, which keep what they have.
"""

import argparse
import bisect
import calendar
import heapq
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kube.settings import ThisNode
from preheat.image import manifest
from preheat.pulling import pull
from preheat.pulling.pull import PROBED_AFTER
from preheat.registry import failure, resolver, schedule
from preheat.registry.failure import Kind, PullError
from preheat.settings import PreheatSettings

DOCS = Path(__file__).parents[2] / "docs" / "preheat.md"
REF = "registry.example/fw/torch:v2"
START = float(calendar.timegm((2026, 11, 20, 12, 0, 0)))
NODES, PER_REGISTRY = 7500, 50
SIZE, RATE, LAYERS = 5 * 10**9, 10**8, 10
DELIVERY_SECONDS = 60.0
# Requests: of an unchanged tag one HEAD, of a new digest index, manifest and config too; of a pull
# the same four by the runtime, and its layers.
UNCHANGED, NEW, PULL = 1, 4, 4 + LAYERS
REFUSED = 1
HOUR = 3600.0
# What a look-up found; its parts do not matter here.
SHAPE = manifest.Shape(manifest.Target("", "sha256:1", 1), (), (), "")
GONE = PullError(REF, Kind.NETWORK, "connection refused")


@dataclass(frozen=True)
class Case:
    name: str
    windows: tuple[str, ...] = ()
    moves: bool = False  # all have the image, and its tag moves at START
    down: tuple[float, float] = (math.inf, math.inf)  # seconds after START
    begins: float = 0.0  # seconds after START from which rates count
    told: bool = True  # the docs have its figures


CASES = (
    Case("a new image"),
    Case("a tag moves to a new image", moves=True),
    Case("the registry does not answer for an hour", down=(30.0, 30.0 + HOUR), told=False),
    Case("an allowed hour (`windows`) begins", ("14:00-22:00",), begins=2 * HOUR, told=False),
)


@dataclass
class Result:
    """What the registry saw, from ``begins`` on until all nodes had the image."""

    requests: Counter[int] = field(default_factory=Counter)  # by second after START
    pulls: list[tuple[float, float]] = field(default_factory=list)  # begin and end
    done: list[float] = field(default_factory=list)  # seconds after START, one for each node

    def rates(self, begins: float) -> list[int]:
        last = max(self.done)
        return sorted(self.requests[second] for second in range(int(begins), int(last) + 1))

    def most_at_once(self) -> int:
        begun = sorted(begin for begin, _ in self.pulls)
        ended = sorted(end for _, end in self.pulls)
        return max(n + 1 - bisect.bisect_right(ended, at) for n, at in enumerate(begun))


class Node:
    """One node; ``turn`` does what is due and says when it wants to go on."""

    def __init__(self, number: int, case: Case, result: Result, section: PreheatSettings) -> None:
        self._section = section.at(ThisNode(name=f"node{number}"))
        self._random = random.Random(number)
        self._turns = schedule.Schedule(self._section, self._random.random)
        self._case, self._result = case, result
        self._digest, self._left = "sha256:1", float(SIZE)
        self._answered = 0.0  # of the last look-up
        self._lookup = resolver.Lookup(manifest.parse(REF))
        self._pull: failure.PullFailure | None = None
        self._has = False
        if case.moves:
            # It runs for long: the last refresh was at its phase before START.
            self._turns.want({REF: False}, START - 10 * HOUR)
            self._turns.measured(REF, self._digest, 0, True, START - 10 * HOUR)
            at = START - 2 * self._section.refresh
            while at <= START:
                self._answered = at
                at = self._lookup_at()
            self._has, self.next, self._lookup.shape = True, at, SHAPE
        else:
            self.next = START + self._random.random() * DELIVERY_SECONDS
            self._turns.want({REF: False}, self.next)
        self._phase = self._random.random() * pull.CYCLE_SECONDS

    def _lookup_at(self) -> float:
        return self._turns.lookup_at(REF, self._answered, fixed=False, failed=self._lookup.failed)

    def _is_down(self, now: float) -> bool:
        begin, end = self._case.down
        return begin <= now - START < end

    def _request(self, count: int, now: float) -> None:
        self._result.requests[int(now - START)] += count

    def turn(self, now: float) -> float | None:
        """When to go on; None when it has the image."""
        if self._lookup_at() <= now:
            self._look_up(now)
        # As hurdle.reason: what no look-up has found the runtime tries once enough of them failed.
        known = self._lookup.shape is not None or self._lookup.leaves_it_to_the_runtime
        if known and not self._has:
            failed = self._turns.standing(REF, self._pull)
            at = self._turns.pull_at(REF, now, begun=self._left < SIZE)
            at = max(at, now if failed is None else failed.retry_at or math.inf)
            if at > now:
                return self._cycle(min(at, self._lookup_at()))
            end = self._do_pull(now)
            if self._has:
                self._result.done.append(end - START)
                return None
            return self._cycle(end)
        return self._cycle(self._lookup_at())

    def _cycle(self, at: float) -> float:
        """The node's first cycle from ``at`` on; a retry wakes it (reconciler)."""
        if self._lookup.failed is not None or self._pull is not None:
            return at
        cycles = math.ceil((at - START - self._phase) / pull.CYCLE_SECONDS)
        return START + self._phase + cycles * pull.CYCLE_SECONDS

    def _failed(
        self, known: failure.PullFailure | None, now: float, pull: bool
    ) -> failure.PullFailure:
        attempts = 1 if known is None else known.attempts + 1
        if pull and attempts >= PROBED_AFTER and self._lookup.failed is None:
            self._answered = 0.0  # as Resolver.probe
        return self._turns.failed(REF, GONE, attempts, now, pull=pull)

    def _look_up(self, now: float) -> None:
        if self._is_down(now):
            self._request(REFUSED, now)
            self._lookup.failed = self._failed(self._lookup.failed, now, pull=False)
            return
        moved = self._case.moves and self._digest == "sha256:1"
        self._request(UNCHANGED if self._answered and not moved else NEW, now)
        self._lookup.failed, self._lookup.shape, self._answered = None, SHAPE, now
        self._turns.answered(REF, now)
        if moved:
            self._digest, self._has = "sha256:2", False
        self._turns.measured(REF, self._digest, int(self._left), self._has, now)

    def _do_pull(self, now: float) -> float:
        """When it ended, done or failed."""
        if self._is_down(now):
            self._request(REFUSED, now)
            self._pull = self._failed(self._pull, now, pull=True)
            return now
        self._request(PULL, now)
        end = now + self._left / RATE
        cut = START + self._case.down[0]
        if now < cut < end:
            self._left -= (cut - now) * RATE
            self._pull = self._failed(self._pull, cut, pull=True)
            end = cut
        else:
            self._has = True
            self._turns.answered(REF, end)
        self._result.pulls.append((now, end))
        return end


def simulate(case: Case, nodes: int = NODES, **more: Any) -> Result:
    """All nodes, until each has the image."""
    result = Result()
    section = PreheatSettings.model_validate({"windows": case.windows, **more})
    fleet = [Node(number, case, result, section) for number in range(nodes)]
    due = [(node.next, number) for number, node in enumerate(fleet)]
    heapq.heapify(due)
    while due:
        now, number = heapq.heappop(due)
        after = fleet[number].turn(now)
        if after is not None:
            heapq.heappush(due, (max(after, now + 0.001), number))
    return result


FLEET = {"nodes": NODES, "per_registry": PER_REGISTRY}
SETTINGS: Sequence[dict[str, Any]] = ({}, {"fleet": FLEET})


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"


HEAD = "| what happens | default | `fleet` as above |\n| --- | --- | --- |\n"


def cell(case: Case, more: dict[str, Any]) -> str:
    """Pulls at once, most requests in a second, and when all nodes have the image."""
    result = simulate(case, **more)
    took = _time(max(result.done) - case.begins)
    return f"{result.most_at_once()} / {result.rates(case.begins)[-1]} / {took}"


def table() -> str:
    told = [case for case in CASES if case.told]
    rows = ([case.name, *(cell(case, more) for more in SETTINGS)] for case in told)
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


_TABLE = re.compile(r"(?<=<!-- python -m tests\.bench\.fleet --write -->\n)(?:\|.*\n)*")


def in_docs() -> tuple[str, str, str]:
    """The docs before the table, the table, and what follows."""
    text = DOCS.read_text(encoding="utf-8")
    found = _TABLE.search(text)
    assert found is not None, "docs/preheat.md has lost the mark of the table"
    return text[: found.start()], found[0], text[found.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleet", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/preheat.md")
    write = parser.parse_args().write
    made = table()
    print(made, end="")
    if write:
        before, _, after = in_docs()
        DOCS.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    main()
