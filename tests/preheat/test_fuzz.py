"""Malformed changing calls: through our wrapper containerd never dies; without it, it does."""

import asyncio
import dataclasses
import time
import typing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from preheat.runtimes import base, cri, wire
from preheat.runtimes import containerd as adapter
from preheat.runtimes import messages as m
from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

DIGEST = "sha256:" + "0" * 64
WORDS = st.sampled_from(
    [
        "",
        "x",
        " ",
        "\0",
        "nodeagent-",
        "nodeagent-pin-1",
        f"nodeagent-{DIGEST}",
        DIGEST,
        "sha256:",
        "content",
        "snapshots/overlayfs",
        "labels.a",
        "labels.",
        "target",
        "localhost/a:b",
        "a" * 5000,
        "é\ud800",
        "../../etc",
    ]
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 7, 1 << 40, -(1 << 63), (1 << 63) - 1])


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field may hold, and for messages their absence."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(strategy(arguments[0]), max_size=2).map(tuple)
    if origin is not None and issubclass(type(origin), type) and origin.__name__ == "Mapping":
        return st.dictionaries(WORDS, WORDS, max_size=2)
    if arguments:
        inner = next(each for each in arguments if each is not type(None))
        return st.none() | strategy(inner)
    if kind is str:
        return WORDS
    if kind is int:
        return NUMBERS
    if kind is bool:
        return st.booleans()
    if kind is bytes:
        return st.binary(max_size=20)
    return message(kind)


def message(kind: type[wire.Message]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    fields = {field.name: strategy(hints[field.name]) for field in dataclasses.fields(kind)}
    return st.builds(kind, **fields)


REQUESTS = st.sampled_from(cri.CHANGING).flatmap(
    lambda method: st.tuples(st.just(method), message(method.request))
)


async def test_no_malformed_call_through_the_wrapper_kills_containerd(
    daemon: containerd.Containerd, box: adapter.Containerd
) -> None:
    pid = daemon.pid
    sent, refused = 0, 0
    loop = asyncio.get_running_loop()
    examples: list[tuple[Any, Any]] = []

    @settings(
        max_examples=1500,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(REQUESTS)
    def gather(example: tuple[Any, Any]) -> None:
        examples.append(example)

    await loop.run_in_executor(None, gather)
    for method, request in examples:
        try:
            if method is cri.WRITE:
                writer = box.calls.writer("nodeagent-pull-fuzz")
                try:
                    await writer.send(request)
                finally:
                    writer.close()
            else:
                await box.calls.change(method, request, deadline=5.0)
            sent += 1
        except base.InvalidCallError:
            refused += 1
        except base.RuntimeCallError:
            sent += 1

    assert daemon.alive
    assert daemon.pid == pid
    assert box.calls.breaker.total == 0
    # Both ways were taken, or this proved nothing.
    assert refused > 1000
    assert sent > 5


async def test_every_changing_method_refuses_the_shapes_that_kill(box: adapter.Containerd) -> None:
    """An empty request, and one in which each message is missing its own messages."""
    for method in cri.CHANGING:
        with pytest.raises(base.InvalidCallError):
            if method is cri.WRITE:
                await box.calls.writer("nodeagent-pull-x").send(m.WriteRequest())
            else:
                await box.calls.change(method, method.request())


@pytest.mark.parametrize("release", ["trixie", "sid"], indirect=True)
async def test_without_the_wrapper_a_malformed_call_kills_containerd(
    daemon: containerd.Containerd, kubelet: containerd.Kubelet
) -> None:
    """The control: the same shapes, sent by hand."""
    shapes = [
        (cri.UPDATE_IMAGE.path, b""),
        (cri.ADD_RESOURCE.path, m.LeaseResourceRequest(id="x").encode()),
        (cri.UPDATE_CONTENT.path, b""),
    ]
    killed = 0
    for path, request in shapes:
        with pytest.raises(grpc.aio.AioRpcError):
            await kubelet.raw(path, request, timeout=5.0)
        deadline = time.monotonic() + 5
        while daemon.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if not daemon.alive:
            killed += 1
            daemon.start()

    assert killed > 0


@pytest.mark.parametrize("release", ["trixie"], indirect=True)
async def test_the_breaker_opens_when_the_runtime_dies_on_a_call(
    daemon: containerd.Containerd,
    box: adapter.Containerd,
    images: registry.Registry,
    gate: proxy.Proxy,
    tmp_path: Path,
) -> None:
    """A well-formed call whose runtime dies under it: the next changing call is not even sent."""
    images.push("fw/break", "v1", [registry.layer("break", 8_000_000, 41)])
    ref = f"{gate.host}/fw/break:v1"
    gate.rate = 2_000_000
    hold = await box.begin(base.Hold(id="", role="pull", ref=ref, by="operator"))
    pull = asyncio.create_task(box.pull(ref, None, hold, 60.0))
    await rig.until(lambda: gate.blob_bytes > 500_000)
    daemon.kill()
    with pytest.raises(base.RuntimeGoneError):
        await pull
    with pytest.raises(base.BreakerOpenError):
        await box.end(hold)
    daemon.start()
    await asyncio.sleep(box.calls.breaker.rests)
    await box.connect()
    await box.end(hold)

    assert box.calls.breaker.total == 1
