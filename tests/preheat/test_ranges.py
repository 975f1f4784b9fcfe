"""A layer by several ranges: in order, bounded, and whole whatever the registry refuses."""

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from preheat import lanes, manifest, pull, ranges, trial
from preheat.failure import Kind, PullError
from tests.preheat.rig import MB, Rig, state, until
from tests.testbed import registry

SIZE = 11 * 1000
DATA = random.Random(5).randbytes(SIZE)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PIECE", 1000)
    monkeypatch.setattr(ranges, "LARGE", 4 * MB)


class Server:
    """A registry in memory; ``refuses_from``: no ranges from this byte on."""

    def __init__(self, refuses_from: int = SIZE, kind: Kind | None = None) -> None:
        self.refuses_from, self.kind = refuses_from, kind
        self.at_once = self.most = self.asked = 0
        self.rests: list[int] = []

    async def span(self, first: int, last: int) -> bytes:
        self.at_once += 1
        self.asked += 1
        self.most = max(self.most, self.at_once)
        try:
            # Later pieces come first.
            await asyncio.sleep(0.0001 * (10 - first // 1000 % 10))
        finally:
            self.at_once -= 1
        if first >= self.refuses_from:
            if self.kind is not None:
                raise PullError("r", self.kind, "x")
            return b""
        return DATA[first : last + 1]

    async def rest(self, offset: int) -> AsyncGenerator[bytes, None]:
        self.rests.append(offset)
        for begin in range(offset, SIZE, 700):
            yield DATA[begin : begin + 700]


def several(count: int) -> lanes.Lanes:
    return lanes.Lanes(count, count)


async def fetched(server: Server, offset: int = 0, connections: int = 4) -> bytes:
    stream = ranges.stream(server.span, server.rest, offset, SIZE, several(connections))
    return b"".join([chunk async for chunk in stream])


@pytest.mark.parametrize("offset", [0, 1, 4500, SIZE - 1])
async def test_pieces_come_in_order_by_as_many_connections(offset: int) -> None:
    server = Server()

    assert await fetched(server, offset) == DATA[offset:]
    assert server.most <= 4
    assert (server.most == 4) == (offset < SIZE - 4000)
    assert server.rests == []


async def test_pieces_that_nobody_takes_are_not_fetched() -> None:
    """Memory is bounded by the connections, however slow the store is."""
    server = Server()
    stream = ranges.stream(server.span, server.rest, 0, SIZE, several(4))
    await anext(stream)
    await anext(stream)
    await asyncio.sleep(0.05)
    await stream.aclose()

    assert server.asked <= 1 + 4
    assert server.at_once == 0


@pytest.mark.parametrize("kind", [None, Kind.NETWORK])
@pytest.mark.parametrize("refused", [0, 5000])
async def test_refused_ranges_give_one_stream(refused: int, kind: Kind | None) -> None:
    server = Server(refused, kind)

    assert await fetched(server) == DATA
    assert server.rests == [refused]
    assert server.at_once == 0


async def test_refused_login_is_told() -> None:
    with pytest.raises(PullError):
        await fetched(Server(0, Kind.AUTH))


def test_layers_that_more_pulls_wait_for_come_first() -> None:
    own, shared = (manifest.Layer(name, 1, "", "") for name in ("own", "shared"))
    writers = pull.Writers()
    with writers.demand([own, shared]):
        alone = writers.by_demand([own, shared])
        with writers.demand([shared]):
            both = writers.by_demand([own, shared])
        after = writers.by_demand([own, shared])

    assert alone == after == [own, shared]
    assert both == [shared, own]


# --- whether several help -------------------------------------------------------------------------


class Line:
    """A registry in simulated time: a rate for each connection, and one for all together."""

    def __init__(self, each: float, together: float) -> None:
        self.now = 0.0
        self.each, self.together = each, together

    def run(self, connections: lanes.Lanes, pieces: int) -> int:
        """The most connections that were used for so many pieces."""
        most = 0
        for _ in range(pieces):
            many = connections.many
            self.now += ranges.PIECE / min(many * self.each, self.together)
            connections.took(ranges.PIECE)
            most = max(most, connections.many)
        return most


@pytest.mark.parametrize(
    ("together", "limit", "most", "settled"),
    [(10.0, 8, 8, 8), (3.0, 8, 4, 3), (1.0, 8, 2, 1), (10.0, 1, 1, 1)],
    ids=["each", "three are enough", "one is enough", "setting"],
)
def test_connections_are_added_while_each_adds(
    together: float, limit: int, most: int, settled: int
) -> None:
    line = Line(1000.0, together * 1000)
    connections = lanes.Lanes(limit, clock=lambda: line.now)

    assert line.run(connections, 2000) == most
    assert connections.many == settled


@pytest.mark.parametrize(
    ("before", "during", "beside", "found"),
    [
        (10.0, 10.0, 10.0, lanes.Verdict.SEVERAL),
        (10.0, 8.0, 7.0, lanes.Verdict.SEVERAL),
        (10.0, 5.0, 5.0, lanes.Verdict.ALONE),  # one limit for both
        (10.0, 10.0, 40.0, lanes.Verdict.ALONE),  # the runtime's disk is what limits it
        (10.0, 10.0, 2.0, lanes.Verdict.ALONE),
        (10.0, 10.0, 0.0, lanes.Verdict.ALONE),  # refused, or without ranges
        (10.0, 20.0, 20.0, lanes.Verdict.UNCLEAR),  # still growing
        (10.0, 0.0, 0.0, lanes.Verdict.ALONE),  # it ended meanwhile
    ],
)
def test_verdict(before: float, during: float, beside: float, found: lanes.Verdict) -> None:
    assert lanes.verdict(before, during, beside) is found


def test_busy_node_is_left_alone() -> None:
    assert lanes.is_idle(3.9, 4)
    assert not lanes.is_idle(4.0, 4)


def test_fast_or_nearly_done_is_left_alone() -> None:
    assert lanes.is_worth(20e6, 400_000_000)
    assert not lanes.is_worth(20e6, 100_000_000)
    assert not lanes.is_worth(150e6, 10**11)
    assert not lanes.is_worth(0.0, 10**9)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions on layers of some MB."""
    monkeypatch.setattr(ranges, "PIECE", MB)
    monkeypatch.setattr(trial, "MEASURE_BYTES", 4 * 1024**2)
    monkeypatch.setattr(lanes, "WORTH_SECONDS", 1.0)
    monkeypatch.setattr(lanes, "is_idle", lambda load, cores: True)  # whatever else runs here


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("quick")
async def test_limit_of_each_connection_is_found_and_passed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "STEADY", 0.7)  # a busy machine's rates vary
    monkeypatch.setattr(lanes, "ADDS", 0.2)
    large, small = registry.layer("ranges-large", 30 * MB, 91), registry.layer("s", MB, 92)
    image = rig.push("fw/ranges:v1", [large, small])
    rig.gate.rate = 6 * MB
    async with rig.running(images=[{"ref": image.ref}], connections=4) as room:
        await state(room, image.ref, "ready", seconds=60)
        content = await rig.kubelet.content()
        counted = room.reconciler.totals.fetched_bytes

    parts = [each for each in rig.gate.requests() if large.digest in each.path]
    ours = [each for each in parts if each.agent == "nodeagent" and each.range]
    assert [each for each in parts if each.agent != "nodeagent"], "the runtime begins"
    assert len(ours) >= 30  # the pieces, and the trial
    assert content[large.digest].size == len(large.packed)
    # What the runtime had begun and the trial read is fetched again, and counted.
    assert image.pushed.fetched < rig.gate.blob_bytes < 3 * image.pushed.fetched
    assert abs(counted - rig.gate.blob_bytes) <= 4 * MB


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("release", ["sid"], indirect=True)
async def test_limit_of_all_connections_leaves_it_to_the_runtime(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "ADDS", 0.9)  # a busy machine's rates vary
    layer = registry.layer("ranges-shared", 30 * MB, 93)
    image = rig.push("fw/shared:v1", [layer])
    rig.gate.shared_rate = 6 * MB
    async with rig.running(images=[{"ref": image.ref}], connections=4) as room:
        await state(room, image.ref, "ready", seconds=60)

    parts = [each for each in rig.gate.requests() if layer.digest in each.path]
    tries = [each for each in parts if each.agent == "nodeagent"]
    # A second one follows only when the first was not clear.
    assert 1 <= len(tries) <= trial.MOST_TRIES
    assert all(each.range.endswith("-") for each in tries)
    assert rig.gate.blob_bytes <= image.pushed.fetched + 16 * MB


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("release", ["sid"], indirect=True)
async def test_layer_that_the_agent_began_goes_on_by_ranges(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed or paused after it took over: the next attempt continues with its bytes."""
    monkeypatch.setattr(ranges, "PIECE", MB)
    layer = registry.layer("ranges-again", 12 * MB, 94)
    image = rig.push("fw/again:v1", [layer])
    rig.gate.rate = 4 * MB
    async with rig.running(images=[{"ref": image.ref}], bytes_per_second=3 * MB) as room:
        await until(lambda: rig.gate.blob_bytes > 4 * MB)
    async with rig.running(images=[{"ref": image.ref}], connections=4) as room:
        await state(room, image.ref, "ready")

    assert rig.gate.blob_bytes <= image.pushed.fetched + 4 * MB
