"""One pull, at a runtime that a test plays: what it asks of it, and when."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from preheat import settings
from preheat.image import manifest
from preheat.planning import desired, plan
from preheat.pulling import pull
from preheat.registry import failure, resolver
from preheat.runtimes import base, containerd_api, cri, holds
from preheat.runtimes import containerd_pb2 as pb
from tests.preheat.registry.test_estimate import DIGEST, shape_of
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
        # Bytes of each snapshot below the hold; None: it is gone by the time its use is asked.
        self.taken: dict[str, int | None] = {"before": 250}
        self.inodes = 0  # of each
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

    async def unpacked(self, _: base.Hold) -> frozenset[str]:
        return frozenset(self.taken)

    async def usage(self, name: str) -> base.DiskUse:
        size = self.taken[name]
        if size is None:
            raise base.RuntimeCallError("snapshot", "not found", "", "NOT_FOUND")
        return base.DiskUse(size, self.inodes)

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


async def no_disk() -> plan.Node | None:
    return None


def puller(
    runtime: Runtime,
    rate: float | None = None,
    disk: Any = None,
    lookup_failed: str | None = None,
    **more: Any,
) -> pull.Puller:
    section = constants.made(settings.PreheatSettings, **more)
    lookup = resolver.Lookup(manifest.parse(REF), SHAPE if lookup_failed is None else None)
    if lookup_failed is not None:
        error = failure.PullError(REF, failure.Kind(lookup_failed), "x")
        lookup.failed = failure.after(error, 1, 0.0)
    lookups: Any = SimpleNamespace(
        of=lambda _: lookup, client=None, turns=SimpleNamespace(section=section)
    )
    anything: Any = runtime
    pulls = pull.Pulls(anything, lookups, lookups, disk or no_disk, lambda: None)
    pulls.limit = pull.Limiter(rate)
    other: Any = None
    pulls.running["other"] = pull.Running(pull.PullProgress(SHAPE, 0), other)
    return pull.Puller(pulls, desired.Request(REF, "policy", fetch=200))


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
        self.breaker = cri.Breaker(lambda: 0.0)
        self.synced = False

    async def read(self, method: Any, _: Any) -> Any:
        if method is containerd_api.LIST_RESOURCES:
            return pb.ListResourcesResponse()
        labels = holds.lease_labels(self.lease)
        return pb.ListLeasesResponse(leases=[pb.Lease(id=self.lease.id, labels=labels)])

    async def change(self, method: Any, request: Any) -> None:
        self.breaker.check(method)
        self.calls.append(method.path.rpartition("/")[2])
        self.synced = getattr(request, "sync", False) or self.synced
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


@pytest.mark.parametrize("role", ["pull", "pin", "note"])
async def test_an_open_breaker_lets_notes_pass_and_loses_no_request(role: Any) -> None:
    hold = base.Hold(role, REF, "operator", SHAPE.top, state="released" if role == "note" else "")
    hold = dataclasses.replace(hold, id=base.hold_id(hold))
    connection = Leases(dataclasses.replace(hold, id="other"))
    connection.breaker.trip(cri.PULL_IMAGE)
    leases = holds.Leases(connection)  # type: ignore[arg-type]
    with contextlib.nullcontext() if role == "note" else pytest.raises(base.BreakerOpenError):
        await leases.begin(hold)
    with contextlib.nullcontext() if role == "note" else pytest.raises(base.BreakerOpenError):
        await leases.renew(hold, hold, empty=True)

    made = ["Create", "Create", "Delete", "Create", "Delete"]
    assert connection.calls == (made if role == "note" else [])
    assert connection.synced is (role == "note")


@pytest.mark.parametrize("text", ["lease does not exist", 'lease "x": not found'])
def test_an_ended_lease_is_told_with_all_its_causes(text: str) -> None:
    found = failure.classify(REF, base.RuntimeCallError("r", text, "", "NOT_FOUND"))
    assert found.kind is failure.Kind.RUNTIME
    assert "another agent finished the pull, or the clock was set" in str(found)


# --- the disk -------------------------------------------------------------------------------------


def disk_of(*free: int, inodes: float = 1.0) -> Any:
    """A disk of 1000 bytes with so many free, one after the other; pressed below 150."""
    left = list(free)

    async def disk() -> plan.Node:
        now = left.pop(0) if len(left) > 1 else left[0]
        lacking = inodes if len(left) == 1 else 1.0
        return plan.Node(*(1000, now, 0.85, 0.8, 0.0, 300), 0, lacking, 0.05, 1000)

    return disk


# What the plan starts beside another pull: below the threshold there is room for both.
REQUEST = desired.Request(REF, "policy", digest=SHAPE.top.digest, measured=True, fetch=200)
OTHER = desired.Request("other", "policy", measured=True, fetch=50, running=True)


@pytest.mark.parametrize(
    ("disk", "layers", "inodes", "took"),
    [
        (disk_of(420, 420, 100), {"a": 150, "extract-1 b": 100}, 0, base.DiskUse(250)),
        (disk_of(420, 420, 100), {"a": 100, "extract-1 b": 100}, 0, base.NO_USE),
        (disk_of(420, 420, 100), {"before": 250}, 0, base.NO_USE),
        # 40 are missing of 1000.
        (disk_of(420, 420, 290, inodes=0.01), {"a": 250, "b": 0}, 19, base.NO_USE),
        (disk_of(420, 420, 290, inodes=0.01), {"before": 250}, 60, base.NO_USE),
        (disk_of(420, 420, 290, inodes=0.01), {"a": 10, "b": 0}, 30, base.DiskUse(0, 60)),
        (disk_of(420, 300), {"a": 250}, 0, base.NO_USE),
        (disk_of(420, 420, 100), {"a": None, "b": 250}, 0, base.DiskUse(250)),
    ],
    ids=[
        *("over", "others", "earlier", "inodes of others", "inodes earlier", "inodes"),
        *("room", "committed meanwhile"),
    ],
)
async def test_a_pull_that_takes_more_than_planned_stops_at_the_threshold(
    disk: Any, layers: dict[str, int | None], inodes: int, took: base.DiskUse
) -> None:
    """An unpack fills a disk between two looks of the work loop. Others that fill it cost the pull
    nothing: the loop pauses it."""
    runtime = Runtime()
    runtime.inodes = inodes
    node = await disk()
    assert plan.decide(node, [REQUEST, OTHER], [], 2, 0.0).pulls == (REF,)

    async def pulled() -> str:
        runtime.taken |= layers
        await asyncio.sleep(30 if took != base.NO_USE else 5 * pull.POLL_SECONDS)
        return ""

    runtime.pulled = pulled
    one = puller(runtime, disk=disk)
    if took == base.NO_USE:
        assert await one.run() is not None
        assert one.footprint.took == took
        return
    with pytest.raises(failure.PullError, match="the kubelet's threshold") as raised:
        await one.run()

    assert raised.value.kind is failure.Kind.DISK
    assert one.footprint.took == took
    assert len(runtime.ended) == 1


@pytest.mark.parametrize(("layer", "took"), [(250, 250), (150, 0)], ids=["itself", "others"])
async def test_a_pull_that_found_no_space_counts_with_what_its_own_layers_took(
    layer: int, took: int
) -> None:
    runtime = Runtime()

    async def pulled() -> str:
        runtime.taken["a"] = layer
        raise base.RuntimeCallError("r", "write /x: no space left on device", "")

    runtime.pulled = pulled
    one = puller(runtime, disk=disk_of(420))
    with pytest.raises(failure.PullError):
        await one.run()
    assert one.footprint.took == base.DiskUse(took)
    assert len(runtime.ended) == 1


@pytest.mark.parametrize(("lookup_failed", "took"), [(None, 391), ("auth", 240)])
async def test_what_others_fetch_is_not_what_an_image_without_a_lookup_took(
    lookup_failed: str | None, took: int
) -> None:
    runtime = Runtime()

    async def pulled() -> str:
        runtime.moved = {DIGEST: base.Ingest(theirs=10**6)}
        runtime.here = {each.digest: 100 for each in SHAPE.layers}
        runtime.taken["a"] = took if lookup_failed else took - 201  # and what was fetched
        raise base.RuntimeCallError("r", "write /x: no space left on device", "")

    runtime.pulled = pulled
    one = puller(runtime, lookup_failed=lookup_failed)
    with pytest.raises(failure.PullError):
        await one.run()
    assert one.footprint.took == base.DiskUse(took)


def test_what_filled_the_disk_once_counts_so_for_a_while() -> None:
    """Longer each time."""
    failed = failure.PullFailure(
        failure.Kind.DISK, "x", 2, 0.0, at=100.0, digest="d", took=base.DiskUse(9)
    )
    hour = 3600.0
    assert failed.least("d", 100.0 + 1.9 * hour) == base.DiskUse(9)
    assert failed.least("d", 100.0 + 2.1 * hour) == base.NO_USE
    assert failed.least("other", 101.0) == base.NO_USE


# --- images that neither can read -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("lookup_failed", "said", "kind"),
    [
        ("bad_image", "words that nobody knows", "bad_image"),
        ("bad_image", "429 too many requests", "busy"),
        ("network", "words that nobody knows", "network"),
        ("bad_image", "dial tcp 10.0.0.1:443: i/o timeout", "network"),
        ("bad_image", "read tcp: connection reset by peer", "network"),
        ("bad_image", "dial tcp: connect: connection refused", "network"),
        ("bad_image", "failed to copy: unexpected EOF", "network"),
        ("bad_image", "dial tcp: lookup r.e: no such host", "network"),
        ("bad_image", "net/http: TLS handshake timeout", "network"),
        ("bad_image", "tls: failed to verify certificate: x509: unknown authority", "network"),
        ("bad_image", "Client.Timeout exceeded while awaiting headers", "network"),
        ("bad_image", "unexpected status from HEAD request: 503 Service Unavailable", "network"),
        ("bad_image", "r.e/eof-tls/timeout:v1: words that nobody knows", "bad_image"),
    ],
)
async def test_what_the_lookup_could_not_read_and_the_runtime_not_pull_is_a_bad_image(
    lookup_failed: str, said: str, kind: str
) -> None:
    """Not one for which the network is to blame, which is tried again within minutes."""
    runtime = Runtime()

    async def pulled() -> str:
        raise base.RuntimeCallError("r", said, "")

    runtime.pulled = pulled
    with pytest.raises(failure.PullError) as raised:
        await puller(runtime, lookup_failed=lookup_failed).run()
    assert raised.value.kind == kind


# --- tags that move -------------------------------------------------------------------------------


@pytest.mark.parametrize(("whose", "stalls"), [("new", False), ("ours", True), ("nobody", True)])
async def test_layers_of_a_moved_tag_are_progress(whose: str, stalls: bool) -> None:
    """The runtime pulls what the tag names now. Layers of our other pulls are theirs."""
    runtime = Runtime()
    digest = {"new": manifest.digest_of(b"new"), "ours": SHAPE.layers[1].digest, "nobody": ""}[
        whose
    ]

    async def pulled() -> str:
        for step in range(1, 6):
            runtime.moved = {digest: base.Ingest(theirs=step)} if digest else {}
            await asyncio.sleep(pull.POLL_SECONDS)
        return ""

    runtime.pulled = pulled
    one = puller(runtime, stall_timeout=3.5 * pull.POLL_SECONDS)
    if not stalls:
        assert await one.run() is not None
        return
    with pytest.raises(failure.PullError, match="no progress"):
        await one.run()
    assert one.stalled


@pytest.mark.parametrize(("said", "probed"), [("", [REF]), ("connection refused", [])])
async def test_a_tag_is_looked_up_at_the_first_stall_of_its_pull(
    said: str, probed: list[str]
) -> None:
    """It may name another image by now. A registry that is away is not asked at once."""
    runtime, asked = Runtime(), list[str]()

    async def pulled() -> str:
        if said:
            raise base.RuntimeCallError("r", said, "")
        await asyncio.sleep(30)
        return ""

    runtime.pulled = pulled
    one = puller(runtime, stall_timeout=1.5 * pull.POLL_SECONDS)
    lookups: Any = one._pulls.lookups
    lookups.probe = asked.append
    lookups.turns.failed = lambda _, error, attempts, now, **__: failure.after(error, attempts, now)
    await one._pulls._run(desired.Request(REF, "policy"), one)

    assert one._pulls.failures[REF].attempts == 1
    assert asked == probed
