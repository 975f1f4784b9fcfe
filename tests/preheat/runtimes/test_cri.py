"""The connection to a runtime: the breaker, and answers that cannot be read."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

import kit.files
from preheat.runtimes import base, cri, cri_pb2
from preheat.runtimes import containerd_api as api
from tests.testbed import waiting


def test_breaker_rests_longer_each_time_and_forgets() -> None:
    clock = [10_000.0]
    breaker = cri.Breaker(lambda: clock[0])
    rests = []
    for _ in range(6):
        breaker.trip(cri.PULL_IMAGE)
        rests.append(breaker.rests)
        with pytest.raises(base.BreakerOpenError):
            breaker.check(cri.PULL_IMAGE)
        clock[0] += breaker.rests
        breaker.check(cri.PULL_IMAGE)
    assert rests == [1.0, 10.0, 60.0, 600.0, 3600.0, 3600.0]
    clock[0] += 10_000
    breaker.trip(cri.PULL_IMAGE)
    assert breaker.rests == 1.0


@pytest.mark.parametrize(
    ("tripped_by", "passes"),
    [
        (api.CREATE_LEASE, True),
        (cri.PULL_IMAGE, True),
        (api.DELETE_LEASE, False),
        (api.CLEAR_MARK, False),
    ],
)
def test_an_open_breaker_lets_releases_pass_unless_one_tripped_it(
    tripped_by: cri.Method[Any, Any], passes: bool
) -> None:
    """Under disk pressure they are what helps."""
    breaker = cri.Breaker(lambda: 0.0)
    breaker.trip(tripped_by)
    for method in (api.CREATE_LEASE, api.UPDATE_IMAGE):
        with pytest.raises(base.BreakerOpenError):
            breaker.check(method)
    for release in (api.DELETE_LEASE, api.CLEAR_MARK, api.CREATE_NOTE):
        with contextlib.nullcontext() if passes else pytest.raises(base.BreakerOpenError):
            breaker.check(release)


@contextlib.asynccontextmanager
async def answering(socket: Path, answer: bytes) -> AsyncIterator[None]:
    """A runtime that says the same to everything."""

    async def answered(request: bytes, context: object) -> bytes:
        return answer

    server = grpc.aio.server()
    for service, method in (("RuntimeService", "ListContainers"), ("ImageService", "PullImage")):
        handler: Any = grpc.unary_unary_rpc_method_handler(answered)
        generic = grpc.method_handlers_generic_handler(f"runtime.v1.{service}", {method: handler})
        server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(kit.files.grpc_address(socket))
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest_asyncio.fixture
async def broken(tmp_path: Path) -> AsyncIterator[cri.Cri]:
    """A runtime whose answers cannot be decoded."""
    async with answering(tmp_path / "socket", b"\xff"):
        runtime = cri.Cri(cri.Connection(tmp_path / "socket"))
        try:
            yield runtime
        finally:
            await runtime.connection.close()


async def test_broken_answer_is_an_error_not_none(broken: cri.Cri) -> None:
    with pytest.raises(base.RuntimeCallError, match="cannot be decoded"):
        await broken.connection.read(cri.LIST_CONTAINERS, cri.Empty())
    with pytest.raises(base.RuntimeCallError, match="cannot be decoded"):
        await broken.pull("r.e/a:b", base.Login("u", "p"), "nodeagent-pull-x", 5.0)
    assert broken.connection.breaker.total == 0


async def test_change_refuses_a_foreign_lease_and_other_requests(broken: cri.Cri) -> None:
    with pytest.raises(base.InvalidCallError, match="lease"):
        await broken.pull("r.e/a:b", None, "somebody-else", 5.0)
    with pytest.raises(base.InvalidCallError, match="another method"):
        request: Any = cri_pb2.ImageRequest()
        await broken.connection.change(cri.PULL_IMAGE, request)


async def test_socket_of_any_name_is_called_and_named(tmp_path: Path) -> None:
    plain, odd = tmp_path / "plain", tmp_path / "a %20#b?c"
    answer = cri_pb2.ListContainersResponse(
        containers=[cri_pb2.Container(id="here")]
    ).SerializeToString()
    runtime = cri.Cri(cri.Connection(odd))
    try:
        with pytest.raises(base.RuntimeGoneError) as gone:
            await runtime.connection.read(cri.LIST_CONTAINERS, cri.Empty())
        assert gone.value.cause == f"{odd}: No such file or directory"
        async with answering(plain, answer):
            odd.symlink_to(plain)
            answered = await waiting.until_async(lambda: _containers(runtime), 30, "an answer")
        assert [each.id for each in answered.containers] == ["here"]
    finally:
        await runtime.connection.close()


async def _containers(runtime: cri.Cri) -> cri_pb2.ListContainersResponse | None:
    try:
        return await runtime.connection.read(cri.LIST_CONTAINERS, cri.Empty())
    except base.RuntimeCallError:
        return None  # it connects anew in a moment


async def test_missing_socket_does_not_trip_the_breaker(tmp_path: Path) -> None:
    runtime = cri.Cri(cri.Connection(tmp_path / "nobody"))
    try:
        async with asyncio.timeout(waiting.limit(60)):
            with pytest.raises(base.RuntimeGoneError):
                await runtime.pull("r.e/a:b", None, "nodeagent-pull-x", 5.0)
    finally:
        await runtime.connection.close()

    assert runtime.connection.breaker.total == 0


_DIE = """
import asyncio, os, sys, grpc, grpc.aio
async def main():
    async def locked(request, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "ref x locked")
    async def pull(request, context):
        if b"die" in request:
            os._exit(1)
        await asyncio.Event().wait()
    server = grpc.aio.server()
    for name, call in (("ImageFsInfo", locked), ("PullImage", pull)):
        handler = grpc.unary_unary_rpc_method_handler(call)
        generic = grpc.method_handlers_generic_handler("runtime.v1.ImageService", {name: handler})
        server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port("unix:" + sys.argv[1])
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()
asyncio.run(main())
"""


@pytest.mark.parametrize(("evidence", "trips"), [(600.0, 1), (0.0, 0)])
async def test_breaker_trips_once_for_a_broken_connection_and_never_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: float, trips: int
) -> None:
    """Nor for calls that were in flight for a while: those did not kill it."""
    monkeypatch.setattr(cri, "EVIDENCE_SECONDS", evidence)
    socket = tmp_path / "socket"
    command = (sys.executable, "-c", _DIE, str(socket))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    runtime = cri.Cri(cri.Connection(socket))
    try:
        assert process.stdout is not None and await process.stdout.readline() == b"ready\n"
        with pytest.raises(base.RuntimeCallError, match="locked") as answered:
            await runtime.image_paths()
        assert not isinstance(answered.value, base.RuntimeGoneError)
        lease = "nodeagent-pull-x"
        waiting = [runtime.pull(f"r.e/a:{n}", None, lease, 30.0) for n in range(4)]
        pulls = [asyncio.create_task(each) for each in waiting]
        while runtime.connection.channel().get_state() != grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0)
        with pytest.raises(base.RuntimeGoneError):
            await runtime.pull("r.e/die:1", None, lease, 30.0)
        ended = await asyncio.gather(*pulls, return_exceptions=True)
    finally:
        await runtime.connection.close()
        if process.returncode is None:
            process.kill()
        await process.wait()

    assert [type(each) for each in ended] == [base.RuntimeGoneError] * 4
    assert runtime.connection.breaker.total == trips
