"""A crowd that asks for the status while a dataset fills: what the fill and the crowd see of it.

Sides in turn, a fill each: of one dataset alone, and with 1,000 requests a second for
``/v1/status`` beside it, from one process; more than a minute of them together. That process takes
CPU from the fill, too: a third side has the same requests answered by a program that does nothing
else. A side is short, because this disk's speed drifts.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import agent, harness, trees
from tests.testbed import waiting
from tests.testbed.agent import Agent, ApiError

NAME = "asked"
RATE = 1000.0
ROUNDS = 9
FILL_SECONDS = 180.0
_SOURCE = Path(__file__).with_name("askers.c")
# What a web server of the same library needs for one fixed answer of the same size.
_PEER = """
import sys
from aiohttp import web
body = b"x" * int(sys.argv[2])
async def answer(request):
    return web.Response(body=body, content_type="application/json")
app = web.Application()
app.router.add_get("/v1/status", answer)
web.run_app(app, path=sys.argv[1], print=None, access_log=None)
"""


def run(place: harness.Workplace) -> harness.Results:
    with place.room("status") as room:
        size = trees.make(room / "source", place.size(20_000, 60), 4096, 64 * 1024)
        askers = room / "askers"
        command = ["cc", "-O2", "-Wall", "-o", str(askers), str(_SOURCE)]
        subprocess.run(command, check=True, timeout=waiting.limit(60))
        settings: dict[str, Any] = {
            "budget": "20GiB",
            "reserve": "1%",
            "datasets": [
                {
                    "name": NAME,
                    "freshness": "frozen",
                    "warm": False,
                    "source": {"kind": "dir", "path": str(room / "source")},
                }
            ],
        }
        with agent.running(room / "agent", settings) as nodeagent:
            nodeagent.wait_served(NAME, "source")
            yield from _measure(place, Fills(nodeagent, size, askers))


class Fills:
    """One dataset, filled again and again, in files per second."""

    def __init__(self, made: Agent, size: int, askers: Path) -> None:
        self._agent, self._size, self._askers = made, size, askers
        self.answers: list[dict[str, Any]] = []
        self.rss = 0.0

    def alone(self) -> float:
        return self._fill()

    def asked(self) -> float:
        before = agent.own_rss(self._agent)
        with self._asking(self._agent.socket) as answers:
            rate = self._fill()
            self.rss = max(self.rss, agent.own_rss(self._agent) - before)
        self.answers += answers
        return rate

    def beside(self) -> float:
        """The same requests, answered by something else."""
        length = len(json.dumps(self._agent.get("/v1/status")))
        place = self._agent.socket.with_name("peer.sock")
        place.unlink(missing_ok=True)  # of the round before
        with subprocess.Popen([sys.executable, "-c", _PEER, str(place), str(length)]) as peer:
            try:
                waiting.until(place.exists, what="the peer to listen")
                with self._asking(place):
                    return self._fill()
            finally:
                peer.terminate()

    def _fill(self) -> float:
        """Files per second of one; what clears the store before it does not count."""
        trash = self._agent.store / ".trash"
        with contextlib.suppress(ApiError):  # nothing is there the first time
            self._agent.remove(NAME)
        waiting.until(lambda: not any(trash.iterdir()), FILL_SECONDS, "an empty trash")
        began = time.monotonic()
        self._agent.tell(NAME, "warm", {})
        shown = self._agent.wait_state(NAME, "complete", seconds=FILL_SECONDS)
        took = time.monotonic() - began
        if shown["bytes"]["done"] != self._size:
            raise RuntimeError(f"complete with {shown['files']} {shown['bytes']}")
        return float(shown["files"]["done"]) / took

    @contextlib.contextmanager
    def _asking(self, place: Path) -> Iterator[list[dict[str, Any]]]:
        """Requests while the block runs; the list gets what they saw when it has ended."""
        words = [str(self._askers), str(place), "/v1/status", str(RATE)]
        found: list[dict[str, Any]] = []
        with subprocess.Popen(words, stdout=subprocess.PIPE) as askers:
            try:
                yield found
            finally:
                askers.terminate()
                said, _ = askers.communicate(timeout=waiting.limit(30))
        found.append(json.loads(said))


def _measure(place: harness.Workplace, fills: Fills) -> harness.Results:
    fills.alone()  # warm
    sides = {"alone": fills.alone, "asked": fills.asked, "beside": fills.beside}
    rates = harness.in_turn(sides, place.rounds if place.tiny else ROUNDS)
    lasted = sum(each["seconds"] for each in fills.answers)
    crowd = sum(each["cpu"] for each in fills.answers) / lasted
    yield (
        "fill_while_asked",
        harness.at_least(
            rates["asked"], rates["alone"], 0.95, "files/s", f"crowd {crowd:.0%} of a core"
        ),
    )
    yield (
        "fill_beside_a_web_server",
        harness.at_least(rates["asked"], rates["beside"], 0.95, "files/s"),
    )
    p99 = [each["p99"] for each in fills.answers]
    answered = sum(each["asked"] - each["failed"] for each in fills.answers)
    failed = sum(each["failed"] for each in fills.answers)
    note = f"{answered} answers, {answered / lasted:,.0f}/s, {failed} failed"
    yield "status_p99", harness.at_most(p99, 50.0, "ms", note)
    yield "status_memory", harness.at_most([fills.rss], 32.0, "MiB", "more than before")


GROUPS = {"status": run}
