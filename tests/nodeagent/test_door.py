"""Doctor's checks of the door: certificate, key, tokens, who may read them, group, addresses."""

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import kit.errors
from kube.settings import AccessSettings, ThisNode
from nodeagent import configfile
from nodeagent.api import rotation
from nodeagent.commands import doctor
from nodeagent.settings import AdminSettings
from tests.nodeagent.test_rotation import GOOD, certify, spoil
from tests.testbed import ports


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Certificate, key and tokens as they should be."""
    certify(tmp_path)
    (tmp_path / "tokens").write_text(GOOD)
    for name in ("tls.key", "tokens"):
        (tmp_path / name).chmod(0o400)
    return tmp_path


def settings(folder: Path, **more: Any) -> AdminSettings:
    metrics, api = ports.free(2)
    return AdminSettings.model_validate(
        {
            "socket": str(folder / "s"),
            "metrics": f"127.0.0.1:{metrics}",
            "api": {
                "listen": f"127.0.0.1:{api}",
                "cert_file": str(folder / "tls.crt"),
                "key_file": str(folder / "tls.key"),
                "tokens_file": str(folder / "tokens"),
            },
        }
        | more
    )


def lacking(admin: AdminSettings) -> dict[str, str]:
    """What each check that is not content says."""
    found = {}
    for check in doctor.admin_checks(admin, ThisNode()):
        if check.name == "admin reviews":
            continue
        try:
            assert check.look(*check.arguments), check.name
        except kit.errors.AgentError as error:
            assert error.remedy, check.name
            found[check.name] = str(error)
    return found


def test_what_the_agent_would_refuse_is_told_before(folder: Path) -> None:
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    said = lacking(settings(folder, socket=str(folder / "open" / "s")))
    assert "others could replace the socket" in said["admin socket"]


def test_checks_can_be_made_in_a_child(folder: Path) -> None:
    api = settings(folder).model_dump(mode="json")["api"] | {"kubernetes": {}}
    found = doctor.admin_checks(settings(folder, api=api), ThisNode())
    assert [check.name for check in found] == [
        "admin socket", "admin metrics", "admin api", "admin certificate", "admin files",
        "admin tokens", "admin reviews",
    ]  # fmt: skip
    for check in found:
        function = check.look
        assert getattr(sys.modules[function.__module__], function.__qualname__) is function
        assert json.loads(json.dumps(check.arguments)) == list(check.arguments)
        assert check.cost


def test_door_that_has_all(folder: Path) -> None:
    assert lacking(settings(folder)) == {}
    assert not (folder / "s").exists()
    assert [e.name for e in doctor.admin_checks(AdminSettings(metrics=None), ThisNode())] == [
        "admin socket"
    ]


@pytest.mark.parametrize(("how", "says"), [
    ("missing", "No such file"), ("nonsense", "cannot be used"), ("expired", "expired"),
    ("other key", "MISMATCH"), ("encrypted key", "cannot be used"),
])  # fmt: skip
def test_certificate_that_no_client_would_take(folder: Path, how: str, says: str) -> None:
    spoil(folder, how)
    assert says in lacking(settings(folder))["admin certificate"]


def test_certificate_that_expires_soon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 2_840_140_800.0 - 13 * 86400)
    assert "expires in" in lacking(settings(folder))["admin certificate"]


def test_tokens_that_cannot_be_used_are_named_and_not_repeated(folder: Path) -> None:
    (folder / "tokens").chmod(0o600)
    (folder / "tokens").write_text("a: {role: read, token: 'hunter2-canary}")
    said = lacking(settings(folder))["admin tokens"]
    assert "not valid YAML" in said
    assert "canary" not in said


@pytest.mark.parametrize(("name", "mode"), [
    ("tokens", 0o644), ("tls.key", 0o666), ("tls.crt", 0o666), ("tls.key", 0o604),
])  # fmt: skip
def test_files_that_others_may_read_or_write(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    found = lacking(settings(folder))
    assert list(found) == ["admin files"]
    assert str(folder / name) in found["admin files"]
    assert f"{mode:04o}" in found["admin files"]


@pytest.mark.parametrize("how", ["above", "owner", "link"])
def test_files_that_others_may_replace(folder: Path, how: str) -> None:
    (folder / "open" / "closed").mkdir(parents=True)
    tokens = folder / "open" / "closed" / "tokens"
    if how == "link":
        tokens.symlink_to(folder / "tokens")
    else:
        shutil.copy2(folder / "tokens", tokens)
    if how == "owner":
        os.chown(folder / "open", 4711, 0)
    else:
        (folder / "open").chmod(0o777)
    exposed = rotation.exposure(tokens, secret=True)
    assert str(exposed) == f"{tokens} lies below {folder / 'open'}, which others may write"
    (folder / "open").chmod(0o755)
    os.chown(folder / "open", 0, 0)
    assert rotation.exposure(tokens, secret=True) is None


def test_volume_of_a_config_map_is_not_open_to_others(folder: Path) -> None:
    volume = folder / "volume"
    (volume / "..1").mkdir(parents=True)
    volume.chmod(0o777)
    shutil.copy2(folder / "tokens", volume / "..1" / "tokens")
    (volume / "..data").symlink_to("..1")
    (volume / "tokens").symlink_to("..data/tokens")
    assert rotation.exposure(volume / "tokens", secret=True) is None


def test_group_that_this_host_lacks(folder: Path) -> None:
    assert "no such group" in lacking(settings(folder, group="no-such-group"))["admin socket"]
    assert lacking(settings(folder, group="root")) == {}


def test_socket_that_something_else_is_at(folder: Path) -> None:
    (folder / "s").write_text("")
    assert "not a socket" in lacking(settings(folder))["admin socket"]
    assert (
        "cannot be written"
        in lacking(settings(folder, socket=str(folder / "tokens" / "x" / "s")))["admin socket"]
    )


def test_addresses_that_cannot_be_had(folder: Path) -> None:
    admin = settings(folder)
    with socket.create_server(("127.0.0.1", int(str(admin.metrics).rpartition(":")[2]))):
        assert list(lacking(admin)) == ["admin metrics"]
        with socket.socket(socket.AF_UNIX) as running:  # an agent has the address
            running.bind(str(folder / "s"))
            running.listen()
            assert lacking(admin) == {}
    elsewhere = settings(folder, metrics="192.0.2.1:9470")
    assert "192.0.2.1" in lacking(elsewhere)["admin metrics"]


async def test_doctor_makes_them(folder: Path) -> None:
    (folder / "tokens").chmod(0o644)
    file = folder / "a.yaml"
    shown = settings(folder).model_dump(mode="json", exclude_none=True)
    file.write_text(json.dumps({"state_dir": str(folder), "admin": shown}))
    assert configfile.load(file).admin.api is not None
    found = {each.name: each for each in await doctor.examine(file) if each.room == "agent"}
    assert found["admin files"].word == "MISSING"
    assert found["admin certificate"].word == "ok"
    assert found["admin tokens"].said.endswith("has the tokens of 1 callers")


# --- the right to ask the cluster


@contextlib.asynccontextmanager
async def cluster(folder: Path, allowed: dict[str, Any]) -> AsyncIterator[AccessSettings]:
    """An API server that answers for each resource; None: 403."""

    async def handle(request: web.Request) -> web.Response:
        asked = (await request.json())["spec"]["resourceAttributes"]
        assert asked["verb"] == "create"
        answer = allowed[asked["resource"]]
        return web.json_response(
            {"status": answer} if answer else {}, status=201 if answer else 403
        )

    made = web.Application()
    made.router.add_post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", handle)
    runner = web.AppRunner(made, shutdown_timeout=0.1)
    await runner.setup()
    (port,) = ports.free(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    (folder / "own").write_text("the-agents-own\n")
    try:
        yield AccessSettings.model_construct(
            server=f"http://127.0.0.1:{port}", ca_file=folder / "tls.crt", token_file=folder / "own"
        )
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(("tokens", "access", "says"), [
    ({"allowed": True}, {"allowed": True}, ""),
    ({"allowed": False}, {"allowed": True}, "may not create tokenreviews"),
    ({"allowed": True}, {"allowed": False}, "may not create subjectaccessreviews"),
    (None, None, "403"), ("nonsense", None, "no SelfSubjectAccessReview"),
])  # fmt: skip
async def test_right_to_ask_about_tokens(folder: Path, tokens: Any, access: Any, says: str) -> None:
    async with cluster(folder, {"tokenreviews": tokens, "subjectaccessreviews": access}) as asked:
        if not says:
            assert "may ask" in await doctor.may_review(asked)
            return
        with pytest.raises(kit.errors.HostError, match=says):
            await doctor.may_review(asked)
