"""The API of a running agent: bad requests, and a runtime that is away."""

import asyncio
from typing import Any

import pytest

from tests.preheat.rig import Rig, until
from tests.testbed import agent

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(150),
    pytest.mark.parametrize("release", ["trixie"], indirect=True),
]

BODIES: list[Any] = [
    *([], {}, {"ref": 5}, {"ref": "a b"}, {"ref": "x" * 2000}),
    *({"ref": "r.e/a:b", "pin": each} for each in ("maybe", {"for": "x"}, 5, {"for": 1, "a": 2})),
]


async def post(node: agent.Agent, path: str, body: Any) -> agent.ApiError:
    """The error that the request is answered with."""
    with pytest.raises(agent.ApiError) as caught:
        await asyncio.to_thread(node.post, f"/v1/images/{path}", body)
    return caught.value


async def test_bad_requests_say_what_is_wrong(node: agent.Agent) -> None:
    for body in BODIES:
        error = await post(node, "preheat", body)
        assert error.status == 400, (body, error)
        assert error.error["remedy"]


async def test_requests_without_runtime_fail(rig: Rig, node: agent.Agent) -> None:
    rig.daemon.kill()
    body = {"ref": "r.example/a:b"}
    error = await post(node, "unpin", body)
    # The request itself finds out that the runtime is away, and the agent is no longer ready.
    assert error.status == 502
    await until(lambda: not_ready(node))
    again = await post(node, "pin", body)

    assert again.status == 502
    assert "runtime" in again.error["message"]


async def not_ready(node: agent.Agent) -> bool:
    return not (await asyncio.to_thread(node.get, "/readyz"))["ready"]
