"""Registries: which server is asked, and failures classified, shown and retried as documented."""

import asyncio
import base64
import json
from typing import Any

import pytest

from tests.preheat.rig import MB, Rig, state, until
from tests.testbed import agent, waiting

LOGIN = ("team", "correct horse")
SIGNED = "5ignedS3cret5ignedS3cret"
# The oldest and the newest containerd: of what registries do they report little but words.
real = pytest.mark.real
ends = pytest.mark.parametrize("release", ["bookworm", "sid"], indirect=True)


def docker_config(rig: Rig, password: str) -> dict[str, Any]:
    auth = base64.b64encode(f"{LOGIN[0]}:{password}".encode()).decode()
    file = rig.folder / "docker.json"
    file.write_text(json.dumps({"auths": {rig.gate.host: {"auth": auth}}}))
    return {"docker_config": str(file)}


@real
@ends
@pytest.mark.parametrize("bearer", [False, True], ids=["basic", "token"])
async def test_wrong_password_is_auth_until_it_is_right(
    rig: Rig, bearer: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    image = rig.push("fw/secret:v1")
    rig.gate.login, rig.gate.bearer = LOGIN, bearer
    more: dict[str, Any] = {"images": [{"ref": image.ref, "share_private": True}]}
    more["credentials"] = docker_config(rig, "wrong donkey")
    async with rig.running(**more) as room:
        row = await state(room, image.ref, "failed")
        requests = len(rig.gate.requests())
        for _ in range(3):
            await room.reconciler.cycle()
        again = len(rig.gate.requests()) - requests
        docker_config(rig, LOGIN[1])
        await room.resume(image.ref)
        await state(room, image.ref, "ready")

    assert row.failure_kind == "auth"
    assert row.retry_at is not None  # a secret may be rotated
    assert again == 0
    out = "".join(capfd.readouterr()) + str(row)
    assert "donkey" not in out
    assert LOGIN[1] not in out


@real
@ends
@pytest.mark.parametrize("who", ["nodeagent", "containerd"])
async def test_presigned_url_that_fails_is_shown_without_its_signature(
    rig: Rig, node: agent.Agent, who: str
) -> None:
    """The agent asks for the config, containerd for all. Both quote the URL that failed."""
    image = rig.push("fw/elsewhere:v1")
    blob = image.pushed.config
    rig.gate.redirected = who
    signed = f"?X-Amz-Credential={SIGNED}&Signature={SIGNED}&sig={SIGNED}"
    rig.gate.redirect[blob] = f"s3://user:{SIGNED}@{rig.gate.host}/expired/{blob}{signed}"
    await asyncio.to_thread(node.post, "/v1/images/preheat", {"ref": image.ref})

    def failed() -> Any:
        (row,) = node.get("/v1/images")["images"]
        return row if row["failure_kind"] else None

    row = await until(failed, 60, what="the pull to fail", detail=node.said)
    page = await asyncio.to_thread(node.get, "/")
    shown = json.dumps([row, node.findings(), node.get("/v1/images/plan")]) + page + node.said()
    assert "/expired/" in row["reason"]
    assert SIGNED not in shown


@real
@ends
async def test_private_image_needs_share_private(rig: Rig) -> None:
    image = rig.push("fw/private:v1")
    rig.gate.login = LOGIN
    more: dict[str, Any] = {"credentials": docker_config(rig, LOGIN[1])}
    async with rig.running(images=[{"ref": image.ref}], **more) as room:
        row = await state(room, image.ref, "refused")
        allowed = [{"ref": image.ref, "share_private": True}]
        await room.reconcile(rig.section(images=allowed, **more))
        await state(room, image.ref, "ready")

    assert "share_private" in row.reason


@real
@ends
async def test_public_image_is_pulled_without_credentials(rig: Rig) -> None:
    image = rig.push("fw/public:v1")
    more: dict[str, Any] = {"credentials": docker_config(rig, LOGIN[1])}
    async with rig.running(images=[{"ref": image.ref}], **more) as room:
        await state(room, image.ref, "ready")

    assert not any(seen.authorized for seen in rig.gate.requests())


@real
@ends
async def test_missing_tag_is_not_found_until_it_is_pushed(rig: Rig) -> None:
    name = f"fw/late-{rig.daemon.release}:v1"
    ref = f"{rig.gate.host}/{name}"
    async with rig.running(images=[{"ref": ref}]) as room:
        row = await state(room, ref, "failed")
        rig.push(name)
        await room.resume(ref)
        await state(room, ref, "ready")

    assert row.failure_kind == "not_found"
    assert row.retry_at is not None


@real
@ends
async def test_unreachable_registry_is_network_and_retried(rig: Rig) -> None:
    image = rig.push("fw/down:v1")
    with rig.gate.down():
        async with rig.running(images=[{"ref": image.ref}]) as room:
            row = await state(room, image.ref, "failed")
    rig.gate.fail_status = 503
    async with rig.running(images=[{"ref": image.ref}]) as room:
        overloaded = await state(room, image.ref, "failed")
        rig.gate.fail_status = 0
        await state(room, image.ref, "ready")  # nobody asked for it

    assert row.failure_kind == overloaded.failure_kind == "network"
    assert row.retry_at is not None


@real
@ends
async def test_truncated_blob_is_fetched_again_until_it_is_whole(rig: Rig) -> None:
    image = rig.push("fw/short:v1", size=2 * MB)
    layer = image.pushed.layers[0]
    rig.gate.truncate = {layer.digest}

    def answers() -> list[int]:
        """Bytes of each answer that containerd got to a request for the blob."""
        seen = rig.gate.requests()
        seen = [s for s in seen if s.method == "GET" and s.agent != "nodeagent"]
        return [s.bytes for s in seen if layer.digest in s.path]

    async with rig.running(images=[{"ref": image.ref}]) as room:
        await until(lambda: len(answers()) > 1, what="a second request")
        cut = answers()
        rig.gate.truncate = set()
        await state(room, image.ref, "ready")
        kinds = {kind for kind, count in room.reconciler.pulls.totals.failed.items() if count}
        content = await rig.kubelet.content()

    assert 0 < cut[0] < len(layer.packed)
    assert sum(answers()) >= len(layer.packed) == content[layer.digest].size
    assert kinds <= {"network", "corrupt"}


@real
@ends
async def test_corrupt_blob_leaves_no_partial_bytes(rig: Rig) -> None:
    """A half-fetched layer with a wrong byte must not be completed for ever."""
    image = rig.push("fw/bad:v1", size=2 * MB)
    rig.gate.corrupt = {image.pushed.layers[0].digest}
    async with rig.running(images=[{"ref": image.ref}]) as room:
        row = await state(room, image.ref, "failed")
        partial = (await room.reconciler.runtime.inventory()).ingests
        rig.gate.corrupt = set()
        await room.resume(image.ref)
        await state(room, image.ref, "ready")

    assert row.failure_kind == "corrupt"
    assert partial == {}


@real
@ends
async def test_stalled_registry_is_network_a_slow_one_is_not(rig: Rig) -> None:
    image = rig.push("fw/slow:v1", size=8 * MB)
    stall = waiting.limit(1.0)
    rig.gate.rate = int(4 * MB / stall)  # always moving, for longer than a stall
    rig.gate.pause_at = 7 * MB  # not complete before it stalls
    async with rig.running(images=[{"ref": image.ref}], stall_timeout=stall) as room:
        failed = room.reconciler.pulls.totals.failed
        await until(lambda: rig.gate.blob_bytes > 6 * MB)
        slow = failed["network"]
        rig.gate.stall = True
        await until(lambda: failed["network"] > 0)
        rig.gate.stall, rig.gate.rate, rig.gate.pause_at = False, 0, 0
        await state(room, image.ref, "ready")

    assert slow == 0


@real
@ends
async def test_other_platform_is_a_bad_image_and_not_retried(rig: Rig) -> None:
    image = rig.push("fw/arch:v1")
    async with rig.running(images=[{"ref": image.ref}], platform="linux/s390x") as room:
        row = await state(room, image.ref, "failed")

    assert row.failure_kind == "bad_image"
    assert row.retry_at is None
    assert "linux/amd64" in row.reason
