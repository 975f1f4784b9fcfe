"""What goes wrong with registries: classified, shown, and tried again or not, as documented."""

import asyncio
import base64
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.preheat import rig
from tests.testbed import containerd, proxy, registry

# The oldest and the newest: what registries do is told apart by their words.
pytestmark = [
    pytest.mark.real,
    pytest.mark.parametrize("release", ["bookworm", "sid"], indirect=True),
]

MB = 1_000_000
LOGIN = ("team", "correct horse")


def docker_config(folder: Path, host: str, password: str) -> dict[str, Any]:
    auth = base64.b64encode(f"{LOGIN[0]}:{password}".encode()).decode()
    file = folder / "docker.json"
    file.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return {"docker_config": str(file)}


@pytest.mark.parametrize("bearer", [False, True], ids=["basic", "token"])
async def test_a_wrong_password_is_auth_and_a_right_one_works_at_once(
    images: registry.Registry,
    gate: proxy.Proxy,
    daemon: containerd.Containerd,
    tmp_path: Path,
    bearer: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    images.push("fw/secret", "v1", [registry.layer("secret", MB, 81)])
    ref = f"{gate.host}/fw/secret:v1"
    gate.login, gate.bearer = LOGIN, bearer
    more: dict[str, Any] = {"images": [{"ref": ref, "share_private": True}]}
    more["credentials"] = docker_config(tmp_path, gate.host, "wrong donkey")
    async with rig.running(daemon, tmp_path, **more) as room:
        row = await rig.state(room, ref, "failed")
        requests = len(gate.requests())
        await asyncio.sleep(1.0)
        again = len(gate.requests()) - requests
        docker_config(tmp_path, gate.host, LOGIN[1])
        await room.resume(ref)
        await rig.state(room, ref, "ready")

    assert row.failure_kind == "auth"
    assert row.retry_at is not None  # a secret may be rotated
    assert again == 0
    out = "".join(capfd.readouterr()) + str(row)
    assert "donkey" not in out
    assert LOGIN[1] not in out


async def test_a_private_image_is_refused_unless_sharing_is_allowed(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    images.push("fw/private", "v1", [registry.layer("private", MB, 82)])
    ref = f"{gate.host}/fw/private:v1"
    gate.login = LOGIN
    more: dict[str, Any] = {"credentials": docker_config(tmp_path, gate.host, LOGIN[1])}
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}], **more) as room:
        row = await rig.state(room, ref, "refused")
        allowed = [{"ref": ref, "share_private": True}]
        await room.reconcile(rig.section(daemon, images=allowed, **more))
        await rig.state(room, ref, "ready")

    assert "share_private" in row.reason


async def test_credentials_that_are_not_needed_are_not_sent(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    images.push("fw/public", "v1", [registry.layer("public", MB, 83)])
    ref = f"{gate.host}/fw/public:v1"
    more: dict[str, Any] = {"credentials": docker_config(tmp_path, gate.host, LOGIN[1])}
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}], **more) as room:
        await rig.state(room, ref, "ready")

    assert not any(seen.authorized for seen in gate.requests())


async def test_a_credential_provider_plugin_is_asked_as_the_kubelet_does(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    images.push("fw/plugin", "v1", [registry.layer("plugin", MB, 84)])
    ref = f"{gate.host}/fw/plugin:v1"
    gate.login = LOGIN
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    program = plugins / "test-provider"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "asked = json.load(sys.stdin)\n"
        "assert asked['kind'] == 'CredentialProviderRequest', asked\n"
        "login = {'username': os.environ['NAME'], 'password': sys.argv[1]}\n"
        "host = asked['image'].split('/')[0]\n"
        "print(json.dumps({'kind': 'CredentialProviderResponse', 'cacheKeyType': 'Registry',\n"
        "    'cacheDuration': '5m', 'apiVersion': asked['apiVersion'], 'auth': {host: login}}))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    config = tmp_path / "providers.yaml"
    provider = {
        "name": program.name,
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "matchImages": [gate.host],
        "defaultCacheDuration": "1m",
        "args": [LOGIN[1]],
        "env": [{"name": "NAME", "value": LOGIN[0]}],
    }
    config.write_text(json.dumps({"kind": "CredentialProviderConfig", "providers": [provider]}))
    more: dict[str, Any] = {
        "images": [{"ref": ref, "share_private": True}],
        "credentials": {"provider_config": str(config), "provider_dir": str(plugins)},
    }
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.state(room, ref, "ready")


async def test_a_missing_tag_is_not_found_and_comes_once_it_is_pushed(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    name = f"late-{daemon.release}"
    ref = f"{gate.host}/fw/{name}:v1"
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        row = await rig.state(room, ref, "failed")
        images.push(f"fw/{name}", "v1", [registry.layer("late", MB, 85)])
        await room.resume(ref)
        await rig.state(room, ref, "ready")

    assert row.failure_kind == "not_found"
    assert row.retry_at is not None


async def test_a_registry_that_is_down_is_network_and_retried_by_itself(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    images.push("fw/down", "v1", [registry.layer("down", MB, 86)])
    ref = f"{gate.host}/fw/down:v1"
    with gate.down():
        async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
            row = await rig.state(room, ref, "failed")
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        gate.fail_status = 503
        room.core.resolver.again(ref)
        await rig.until(lambda: room.images() and room.show(ref).state in ("failed", "ready"))
        gate.fail_status = 0
        await rig.state(room, ref, "ready")  # nobody asked for it

    assert row.failure_kind == "network"
    assert row.retry_at is not None


async def test_a_truncated_blob_is_fetched_again_until_it_is_whole(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    pushed = images.push("fw/short", "v1", [registry.layer("short", 2 * MB, 87)])
    ref = f"{gate.host}/fw/short:v1"
    blob = pushed.layers[0].digest
    gate.truncate = {blob}
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        cut = [s for s in gate.requests() if blob in s.path]
        await rig.until(lambda: len([s for s in gate.requests() if blob in s.path]) > 1)
        gate.truncate = set()
        await rig.state(room, ref, "ready")
        kinds = {kind for kind, count in room.core.failed.items() if count}

    assert len(cut) <= len(gate.requests())
    assert kinds <= {"network", "corrupt"}


async def test_a_corrupt_blob_is_corrupt_and_its_partial_bytes_are_dropped(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    """A half-fetched layer with a wrong byte must not be completed for ever."""
    pushed = images.push("fw/bad", "v1", [registry.layer("bad", 2 * MB, 88)])
    ref = f"{gate.host}/fw/bad:v1"
    gate.corrupt = {pushed.layers[0].digest}
    async with rig.running(daemon, tmp_path, images=[{"ref": ref}]) as room:
        row = await rig.state(room, ref, "failed")
        partial = (await room.core.box.inventory()).ingests
        gate.corrupt = set()
        await room.resume(ref)
        await rig.state(room, ref, "ready")

    assert row.failure_kind == "corrupt"
    assert partial == {}


async def test_a_registry_that_stalls_is_network_and_one_that_is_slow_is_not(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    images.push("fw/slow", "v1", [registry.layer("slow", 8 * MB, 89)])
    ref = f"{gate.host}/fw/slow:v1"
    gate.rate = 2 * MB  # 4 s in all, but always moving
    more: dict[str, Any] = {"images": [{"ref": ref}], "stall_timeout": 2}
    async with rig.running(daemon, tmp_path, **more) as room:
        await rig.until(lambda: gate.blob_bytes > 6 * MB)
        slow = dict(room.core.failed)
        gate.stall = True
        await rig.until(lambda: room.core.failed["network"] > 0)
        gate.stall, gate.rate = False, 0
        await rig.state(room, ref, "ready")

    assert slow["network"] == 0


async def test_an_image_for_another_platform_is_a_bad_image_and_not_retried(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, tmp_path: Path
) -> None:
    images.push("fw/arch", "v1", [registry.layer("arch", MB, 90)])
    ref = f"{gate.host}/fw/arch:v1"
    more: dict[str, Any] = {"images": [{"ref": ref}], "platform": "linux/s390x"}
    async with rig.running(daemon, tmp_path, **more) as room:
        row = await rig.state(room, ref, "failed")

    assert row.failure_kind == "bad_image"
    assert row.retry_at is None
    assert "linux/amd64" in row.reason
