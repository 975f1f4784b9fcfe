"""One pull, at a runtime that a test plays: what it asks of it, and when."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from preheat import settings
from preheat.image import manifest
from preheat.planning import desired
from preheat.pulling import pull
from preheat.registry import failure, resolver
from preheat.runtimes import base, containerd_api, holds
from preheat.runtimes import containerd_pb2 as pb
from tests.preheat.registry.test_estimate import shape_of
from tests.testbed import constants

REF = "r.e/fw/a:v1"
SHAPE = shape_of("a", "b")


class Runtime:
    """A runtime without any layer; a test says what its calls do."""

    def __init__(self) -> None:
        self.begun: list[base.Hold] = []
        self.ended: list[base.Hold] = []
        self.aborted: list[str] = []
        self.here: dict[str, int] = {}  # bytes of each layer
        self.moved: dict[str, base.Ingest] = {}
        self.content = self.cri = self.layers = self
        self.unpacks = True
        self.target = SHAPE.top
        self.pulled: Callable[[], Any] = self.nothing
        self.written: Callable[[str], Any] = self.nothing

    async def nothing(self, *_: Any) -> str:
        return ""

    async def begin(self, hold: base.Hold) -> base.Hold:
        self.begun.append(hold)
        return hold

    async def end(self, hold: base.Hold) -> None:
        self.ended.append(hold)

    async def pin(self, hold: base.Hold) -> base.Hold:
        return hold

    async def abort(self, write: str) -> None:
        self.aborted.append(write)

    async def ingests(self) -> Mapping[str, base.Ingest]:
        return self.moved

    async def inventory(self) -> base.ImageInventory:
        return base.ImageInventory(records=(base.Record(REF, self.target),))

    async def progress(self, layers: Sequence[manifest.Layer]) -> Mapping[str, base.LayerState]:
        return {
            each.digest: base.LayerState(self.here.get(each.digest, 0), unpacked=False)
            for each in layers
        }

    async def pull(self, *_: Any) -> str:
        return str(await self.pulled())

    async def write(self, digest: str, *_: Any) -> None:
        await self.written(digest)


def puller(runtime: Runtime, rate: float | None = None, **more: Any) -> pull.Puller:
    section = constants.made(settings.PreheatSettings, **more)
    lookup = resolver.Lookup(manifest.parse(REF), SHAPE)
    lookups = SimpleNamespace(of=lambda _: lookup, probe=lambda _: None)
    pulls = SimpleNamespace(
        runtime=runtime,
        section=section,
        lookups=lookups,
        limit=pull.Limiter(rate),
        writers=pull.Writers(),
        client=None,
        room=lambda: asyncio.sleep(0),
    )
    return pull.Puller(pulls, desired.Request(REF, "policy", fetch=200))  # type: ignore[arg-type]


# --- leases ---------------------------------------------------------------------------------------


async def test_own_writes_stop_now_and_then_for_a_renewal_of_their_lease() -> None:
    """They last as long as the rate limit says, and a lease cannot be renewed below them."""
    runtime = Runtime()

    async def written(_: str) -> None:
        if len(runtime.begun) < 3:  # both layers, in two laps
            await asyncio.sleep(3600)

    runtime.written = written
    await puller(runtime, 1e6, partial_keep=2.0).run()

    assert len(runtime.begun) == 3
    assert len({base.hold_id(each) for each in runtime.begun}) == 1


class Leases:
    """A connection to a containerd that has one lease."""

    def __init__(self, lease: base.Hold) -> None:
        self.lease, self.calls = lease, list[str]()

    async def read(self, method: Any, _: Any) -> Any:
        if method is containerd_api.LIST_RESOURCES:
            return pb.ListResourcesResponse()
        labels = holds.lease_labels(self.lease)
        return pb.ListLeasesResponse(leases=[pb.Lease(id=self.lease.id, labels=labels)])

    async def change(self, method: Any, request: Any) -> None:
        self.calls.append(method.path.rpartition("/")[2])
        there = request.id == self.lease.id and "Delete" not in self.calls
        if method is containerd_api.CREATE_LEASE and there:
            raise base.RuntimeCallError("lease", "exists", "", "ALREADY_EXISTS")


@pytest.mark.parametrize(("hours", "renewed"), [(23, False), (13, False), (11, True), (1.5, True)])
async def test_a_pull_begins_with_half_of_its_leases_time(
    hours: float, renewed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt may take two hours, and there may be several."""
    now = 1_900_000_000.0
    monkeypatch.setattr(holds, "time", SimpleNamespace(time=lambda: now))
    hold = base.Hold("pull", REF, "policy", expires=now + 86400)
    there = base.Hold("pull", REF, "policy", id=base.hold_id(hold), expires=now + hours * 3600)
    connection = Leases(there)
    await holds.Leases(connection).begin(hold)  # type: ignore[arg-type]

    assert ("Delete" in connection.calls) is renewed


@pytest.mark.parametrize("text", ["lease does not exist", 'lease "x": not found'])
def test_an_ended_lease_is_told_with_all_its_causes(text: str) -> None:
    found = failure.classify(REF, base.RuntimeCallError("r", text, "", "NOT_FOUND"))
    assert found.kind is failure.Kind.RUNTIME
    assert "another agent finished the pull, or the clock was set" in str(found)
