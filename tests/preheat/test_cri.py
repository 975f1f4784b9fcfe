"""The connection to a runtime: the breaker, and answers that cannot be read."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from preheat.runtimes import base, cri, cri_pb2


def test_breaker_rests_longer_each_time_and_forgets() -> None:
    clock = [10_000.0]
    breaker = cri.Breaker(lambda: clock[0])
    rests = []
    for _ in range(6):
        breaker.trip()
        rests.append(breaker.rests)
        with pytest.raises(base.BreakerOpenError):
            breaker.check()
        clock[0] += breaker.rests
        breaker.check()
    assert rests == [1.0, 10.0, 60.0, 600.0, 3600.0, 3600.0]
    clock[0] += 10_000
    breaker.trip()
    assert breaker.rests == 1.0


@pytest_asyncio.fixture
async def broken(tmp_path: Path) -> AsyncIterator[cri.CriRuntime]:
    """A runtime whose answers are no messages."""

    async def answer(request: bytes, context: object) -> bytes:
        return b"\xff"

    server = grpc.aio.server()
    for service, method in (("RuntimeService", "Version"), ("ImageService", "PullImage")):
        handler: Any = grpc.unary_unary_rpc_method_handler(answer)
        generic = grpc.method_handlers_generic_handler(f"runtime.v1.{service}", {method: handler})
        server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(f"unix://{tmp_path}/socket")
    await server.start()
    runtime = cri.CriRuntime(tmp_path / "socket")
    try:
        yield runtime
    finally:
        await runtime.close()
        await server.stop(None)


async def test_broken_answer_is_an_error_not_none(broken: cri.CriRuntime) -> None:
    with pytest.raises(base.RuntimeCallError, match="cannot be decoded"):
        await broken.connection.read(cri.VERSION, cri.Empty())
    with pytest.raises(base.RuntimeCallError, match="cannot be decoded"):
        await broken._pull_image("r.e/a:b", base.Login("u", "p"), "nodeagent-pull-x", 5.0)
    assert broken.trips == 0


async def test_change_refuses_a_foreign_lease_and_other_requests(broken: cri.CriRuntime) -> None:
    with pytest.raises(base.InvalidCallError, match="lease"):
        await broken._pull_image("r.e/a:b", None, "somebody-else", 5.0)
    with pytest.raises(base.InvalidCallError, match="another method"):
        request: Any = cri_pb2.ImageRequest()
        await broken.connection.change(cri.PULL_IMAGE, request)


async def test_missing_socket_does_not_trip_the_breaker(tmp_path: Path) -> None:
    runtime = cri.CriRuntime(tmp_path / "nobody")
    try:
        async with asyncio.timeout(20):
            with pytest.raises(base.RuntimeGoneError):
                await runtime._pull_image("r.e/a:b", None, None, 5.0)
    finally:
        await runtime.close()

    assert runtime.trips == 0
