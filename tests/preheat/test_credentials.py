"""Logins: which entry counts, and the kubelet's credential provider plugins."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import kit.processes
from preheat import credentials, manifest, settings
from preheat.runtimes import base
from tests.preheat.rig import Rig, state, until

LOGIN = ("team", "correct horse")


@pytest.mark.parametrize(
    ("pattern", "ref", "fits"),
    [
        ("reg.example", "reg.example/a:b", True),
        ("https://reg.example/v1/", "reg.example/a:b", True),
        ("*.example", "reg.example/a:b", True),
        ("*.example", "x.reg.example/a:b", False),
        ("reg.example:5000", "reg.example/a:b", False),
        ("reg.example/team", "reg.example/team/a:b", True),
        ("reg.example/team", "reg.example/teammate/a:b", False),
    ],
)
def test_matches_host_port_and_path(pattern: str, ref: str, fits: bool) -> None:
    assert credentials.matches(pattern, manifest.parse(ref)) is fits


def test_docker_config_gives_the_most_specific_entry() -> None:
    config = {
        "auths": {
            "reg.example": {"username": "u", "password": "wide"},
            "reg.example/team": {"username": "u", "password": "narrow"},
        }
    }
    data = json.dumps(config).encode()
    login = credentials.from_docker_config(data, manifest.parse("reg.example/team/a:b"))

    assert login is not None
    assert login.password == "narrow"


@pytest.mark.parametrize("data", [b"[]", b"{}", b"x", b'{"auths": {"r.e": {"auth": "?"}}}'])
def test_docker_config_refuses_nonsense(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"auth|Expecting"):
        credentials.from_docker_config(data, manifest.parse("r.e/a:b"))


def test_login_has_no_repr() -> None:
    assert "secret" not in repr(base.Login("u", "secret", "secret", "secret"))


# --- plugins --------------------------------------------------------------------------------------


class Plugin:
    """A credential provider plugin with its configuration."""

    def __init__(self, folder: Path, program: str, **more: Any) -> None:
        self.file = folder / "test-provider"
        self.file.write_text(program)
        self.file.chmod(self.file.stat().st_mode | stat.S_IXUSR)
        config = folder / "providers.yaml"
        provider = {
            "name": self.file.name,
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
            "matchImages": ["reg.example"],
        }
        content = {"kind": "CredentialProviderConfig", "providers": [provider | more]}
        config.write_text(json.dumps(content))
        self.section = {"provider_config": str(config), "provider_dir": str(folder)}

    async def ask(self, **more: Any) -> base.Login | None:
        section = settings.CredentialSettings.model_validate(self.section | more)
        return await self.credentials.login(manifest.parse("reg.example/a:b"), section)

    @property
    def credentials(self) -> credentials.Credentials:
        if not hasattr(self, "_credentials"):
            self._credentials = credentials.Credentials()
        return self._credentials


def answering(answer: dict[str, Any]) -> str:
    text = json.dumps({"kind": "CredentialProviderResponse"} | answer)
    return f"#!/bin/sh\necho x >>\"$0.calls\"\ncat >/dev/null\ncat <<'EOF'\n{text}\nEOF\n"


async def test_plugin_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, '#!/bin/sh\nsleep 100 & echo $! >"$0.child"\nsleep 100\n')
    with pytest.raises(credentials.CredentialError, match="no answer"):
        await plugin.ask(provider_timeout=2)
    child = int((tmp_path / "test-provider.child").read_text())

    def ended() -> bool:
        process = Path(f"/proc/{child}/stat")
        return not process.exists() or process.read_text().split()[2] == "Z"

    await until(ended, 5.0, "the plugin's child to end")


@pytest.mark.parametrize(("duration", "calls"), [("1h", 1), ("0s", 2)])
async def test_plugin_answers_are_kept_as_long_as_it_says(
    tmp_path: Path, duration: str, calls: int
) -> None:
    auth = {"reg.example": {"username": "u", "password": "p"}}
    plugin = Plugin(tmp_path, answering({"auth": auth, "cacheDuration": duration}))
    logins = [await plugin.ask(), await plugin.ask()]

    assert logins == [base.Login("u", "p")] * 2
    assert (tmp_path / "test-provider.calls").read_text().count("x") == calls


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("#!/bin/sh\nexit 3\n", "status 3"),
        ("#!/bin/sh\necho nonsense\n", "not JSON"),
        ("#!/bin/sh\necho '[]'\n", "not a JSON object"),
        ("#!/bin/sh\necho '{}'\n", "not a CredentialProviderResponse"),
        ("#!/bin/sh\nhead -c 2000000 /dev/zero\n", "more than"),
    ],
)
async def test_plugin_that_fails_is_named(tmp_path: Path, program: str, why: str) -> None:
    with pytest.raises(credentials.CredentialError, match=why) as caught:
        await Plugin(tmp_path, program).ask()
    assert "test-provider" in str(caught.value)
    assert await kit.processes.settled("credential provider test-provider", 5.0)


async def test_missing_plugin_is_named(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, "")
    plugin.file.unlink()
    with pytest.raises(credentials.CredentialError, match="test-provider"):
        await plugin.ask()


@pytest.mark.real
@pytest.mark.parametrize("release", ["bookworm", "sid"], indirect=True)
async def test_plugin_is_asked_as_the_kubelet_asks(rig: Rig) -> None:
    image = rig.push("fw/plugin:v1")
    rig.gate.login = LOGIN
    program = (
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "asked = json.load(sys.stdin)\n"
        "assert asked['kind'] == 'CredentialProviderRequest', asked\n"
        "login = {'username': os.environ['NAME'], 'password': sys.argv[1]}\n"
        "host = asked['image'].split('/')[0]\n"
        "print(json.dumps({'kind': 'CredentialProviderResponse', 'cacheKeyType': 'Registry',\n"
        "    'cacheDuration': '5m', 'apiVersion': asked['apiVersion'], 'auth': {host: login}}))\n"
    )
    more = {
        "matchImages": [rig.gate.host],
        "args": [LOGIN[1]],
        "env": [{"name": "NAME", "value": LOGIN[0]}],
    }
    plugin = Plugin(rig.folder, program, **more)
    wanted = [{"ref": image.ref, "share_private": True}]
    async with rig.running(images=wanted, credentials=plugin.section) as room:
        await state(room, image.ref, "ready")
