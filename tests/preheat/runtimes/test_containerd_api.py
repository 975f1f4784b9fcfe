"""Holds as leases, and the checks of changing calls; the fuzz sends them to real containerds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from preheat.image import manifest
from preheat.runtimes import base, cri, holds
from preheat.runtimes import containerd as adapter
from preheat.runtimes import containerd_api as api
from preheat.runtimes import containerd_pb2 as pb
from tests.preheat.rig import Rig, until
from tests.testbed import containerd, waiting

DIGEST = "sha256:" + "a" * 64
CHANGING = (*api.CHANGING, cri.PULL_IMAGE)


# --- holds as leases ------------------------------------------------------------------------------


@given(
    st.sampled_from(["pull", "pin", "note"]),
    st.lists(st.text("abc:/@.", min_size=1, max_size=30), max_size=5),
    st.sampled_from([None, 1_900_000_000.0]),
    st.text("abc:0123", max_size=20),
)
def test_lease_labels_give_the_hold_back(
    role: Any, names: list[str], expires: float | None, keep: str
) -> None:
    hold = base.Hold(
        id=f"nodeagent-{role}-1",
        role=role,
        ref="r.e/a:b",
        by="policy",
        target=manifest.Target("t", DIGEST, 5),
        image_id=DIGEST,
        names=tuple(names),
        state="paused",
        keep=keep,
        created=1_800_000_000.0,
        expires=expires,
    )
    request = pb.CreateLeaseRequest(id=hold.id, labels=holds.lease_labels(hold))
    assert api.CREATE_LEASE.check is not None
    api.CREATE_LEASE.check(request)

    assert holds.hold_of(pb.Lease(id=request.id, labels=request.labels)) == hold


def test_lease_of_a_newer_agent_is_not_ours() -> None:
    hold = base.Hold("pin", "r.e/a:b", "policy", manifest.Target("t", DIGEST, 5), id="x")
    labels = holds.lease_labels(hold)
    assert not holds.is_newer(pb.Lease(id="x", labels=labels))
    older = {key: value for key, value in labels.items() if key != "nodeagent/format"}
    assert holds.hold_of(pb.Lease(id="x", labels=older)) == hold
    newer = pb.Lease(id="x", labels=labels | {"nodeagent/format": "2"})
    assert holds.is_newer(newer)
    assert holds.hold_of(newer) is None


def test_hold_id_depends_on_the_digest_of_pins_only() -> None:
    def lease(role: Any, digest: str) -> str:
        target = manifest.Target("t", digest, 1)
        return base.hold_id(base.Hold(role, "r.e/a:b", "policy", target))

    assert lease("pin", "sha256:1") != lease("pin", "sha256:2")
    assert lease("pull", "sha256:1") == lease("pull", "sha256:2")


def test_notes_of_different_states_stand_beside_one_another() -> None:
    states = ("released", "paused", "done", "expired", "dropped")
    ids = {base.hold_id(base.Hold("note", "r.e/a:b", "policy", state=each)) for each in states}
    assert len(ids) == len(states)


@pytest.mark.parametrize(
    "target", ["", "{}", "[]", "null", '{"media_type":"x","digest":"y","size":1}']
)
def test_hold_of_ignores_nonsense(target: str) -> None:
    labels = {"nodeagent/role": "pin", "nodeagent/by": "policy", "nodeagent/ref": "r"}
    lease = pb.Lease(id="x", labels=labels | {"nodeagent/target": target})

    assert holds.hold_of(lease) is None


@pytest.mark.parametrize(("size", "seconds"), [(1, 30.0), (10 * 10**9, 1030.0)])
async def test_a_large_layer_has_time_to_be_hashed_and_synced(
    size: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a write resumes containerd reads all that is there, and at its end syncs it."""
    given: dict[int, float] = {}

    async def send(_: Any, request: Any, deadline: float = cri.CHANGE_SECONDS) -> Any:
        given[request.action] = deadline
        return pb.WriteContentResponse(offset=0)

    async def add(*_: Any) -> None:
        """It has no lease."""

    async def source(_: int) -> AsyncIterator[bytes]:
        yield b"x"

    monkeypatch.setattr(cri.Exchange, "send", send)
    monkeypatch.setattr(holds.Leases, "add", add)
    box = adapter.Containerd(Path("/nobody"))
    hold = base.Hold("pull", "r.e/a:b", "policy", id="nodeagent-pull-x")
    await box.content.write(DIGEST, size, source, hold, manifest.parse("r.e/a:b"))

    assert given[pb.STAT] == given[pb.COMMIT] == seconds
    assert given[pb.WRITE] == cri.CHANGE_SECONDS


# --- changing calls -------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *("", "x", " ", "\0", "é", "a" * 5000, "../../etc", "localhost/a:b"),
        *("nodeagent-", "nodeagent-pin-1", f"nodeagent-{DIGEST}", DIGEST, "sha256:"),
        *("content", "snapshots/overlayfs", "labels.a", "labels.", "target", "overlayfs"),
    ]
)
NUMBERS = {
    FieldDescriptor.TYPE_INT64: st.sampled_from(
        [0, 1, -1, 2, 7, 1 << 40, -(1 << 63), (1 << 63) - 1]
    ),
    FieldDescriptor.TYPE_ENUM: st.sampled_from([0, 1, 2, 7, -1]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
    FieldDescriptor.TYPE_STRING: WORDS,
}


def values(kind: Descriptor) -> st.SearchStrategy[dict[str, Any]]:
    """Any values of the message's fields, each of which may be absent."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for each in kind.fields:
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            fields[each.name] = st.dictionaries(WORDS, WORDS, max_size=2)
            continue
        message = each.message_type
        one = values(message) if message is not None else NUMBERS[each.type]
        fields[each.name] = st.lists(one, max_size=2) if each.is_repeated else one
    return st.fixed_dictionaries({}, optional=fields)


REQUESTS = st.sampled_from(CHANGING).flatmap(
    lambda method: st.tuples(
        st.just(method), values(method.request.DESCRIPTOR).map(lambda each: method.request(**each))
    )
)


def examples(count: int) -> list[tuple[cri.Method[Any, Any], Any]]:
    found = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(REQUESTS)
    def gather(example: tuple[cri.Method[Any, Any], Any]) -> None:
        found.append(example)

    gather()
    return found


async def send(box: adapter.Containerd, method: cri.Method[Any, Any], request: Any) -> None:
    if method is api.WRITE:
        with contextlib.closing(
            cri.Exchange(box.connection, api.WRITE, "nodeagent-pull-fuzz")
        ) as writer:
            await writer.send(request)
    else:
        await box.connection.change(method, request, deadline=waiting.limit(5.0))


@pytest.mark.real
@pytest.mark.timeout(240)
async def test_checked_calls_never_kill_containerd(
    daemon: containerd.Containerd, box: adapter.Containerd
) -> None:
    pid = daemon.pid
    sent, refused = 0, 0
    for method, request in await asyncio.to_thread(examples, 3000):
        try:
            await send(box, method, request)
            sent += 1
        except base.InvalidCallError:
            refused += 1
        except base.RuntimeCallError:
            sent += 1

    assert daemon.alive
    assert daemon.pid == pid
    assert box.connection.breaker.total == 0
    # Both ways were taken, or this proved nothing.
    assert refused > 1000
    assert sent > 2


@pytest.mark.parametrize("method", CHANGING, ids=lambda method: method.path.rpartition("/")[2])
async def test_checks_refuse_empty_requests(method: cri.Method[Any, Any], tmp_path: Path) -> None:
    """Empty requests are the shape that kills containerd; nothing listens on this socket."""
    with pytest.raises(base.InvalidCallError):
        await send(adapter.Containerd(tmp_path / "socket"), method, method.request())


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize("release", ["trixie", "sid"], indirect=True)
async def test_unchecked_calls_kill_containerd(
    daemon: containerd.Containerd, kubelet: containerd.Kubelet
) -> None:
    """The control: the same shapes without the checks."""
    shapes = [
        (api.UPDATE_IMAGE.path, b""),
        (api.ADD_RESOURCE.path, pb.AddResourceRequest(id="x").SerializeToString()),
        (api.UPDATE_CONTENT.path, b""),
    ]
    killed = 0
    for path, request in shapes:
        with pytest.raises(grpc.aio.AioRpcError):
            await kubelet.raw(path, request, timeout=waiting.limit(5.0))
        ended = await _within(5.0, lambda: not daemon.alive)
        if ended:
            killed += 1
            daemon.start()

    assert killed > 0


async def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    try:
        await until(condition, seconds)
    except AssertionError:
        return False
    return True


@pytest.mark.real
@pytest.mark.parametrize("release", ["trixie"], indirect=True)
async def test_breaker_opens_when_the_runtime_dies_on_a_call(
    rig: Rig, box: adapter.Containerd
) -> None:
    """A well-formed call whose runtime dies under it: the next changing call is not even sent."""
    image = rig.push("fw/break:v1", size=8_000_000)
    rig.gate.rate = 2_000_000
    hold = await box.begin(base.Hold("pull", image.ref, "operator"))
    pull = asyncio.create_task(box.cri.pull(image.ref, None, hold.id, 60.0))
    await until(lambda: rig.gate.blob_bytes > 500_000)
    rig.daemon.kill()
    with pytest.raises(base.RuntimeGoneError):
        await pull
    with pytest.raises(base.BreakerOpenError):
        await box.begin(base.Hold("pull", "r.e/fw/next:v1", "operator"))
    rig.daemon.start()
    await until(lambda: not box.connection.breaker.rests)
    await box.connect()
    await box.end(hold)

    assert box.connection.breaker.total == 1
