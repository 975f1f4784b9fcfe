"""Logins: docker's files and programs, the kubelet's credential plugins, and trying them."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import kit.processes
from preheat import settings
from preheat.image import manifest
from preheat.registry import credentials
from preheat.registry.failure import Kind, PullError
from preheat.runtimes import base
from tests.preheat.rig import Rig, state, until
from tests.testbed import constants

LOGIN = ("team", "correct horse")


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

    async def ask(
        self, ref: str = "reg.example/a:b", *, fresh: bool = False, **more: Any
    ) -> credentials.Found:
        section = constants.made(settings.CredentialSettings, **self.section, **more)
        return await self.credentials.find(manifest.parse(ref), section, fresh=fresh)

    @property
    def credentials(self) -> credentials.Credentials:
        if not hasattr(self, "_credentials"):
            self._credentials = credentials.Credentials()
        return self._credentials


def answering(answer: dict[str, Any]) -> str:
    made = {"kind": "CredentialProviderResponse", "cacheKeyType": "Image"} | answer
    text = json.dumps(made)
    return f"#!/bin/sh\necho x >>\"$0.calls\"\ncat >/dev/null\ncat <<'EOF'\n{text}\nEOF\n"


async def test_plugin_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, '#!/bin/sh\nsleep 100 & echo $! >"$0.child"\nsleep 100\n')
    found = await plugin.ask(provider_timeout=2)
    assert found.logins == ()
    assert "no answer" in found.troubles[0]
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
    found = [await plugin.ask(), await plugin.ask()]

    assert [each.logins for each in found] == [(base.Login("u", "p"),)] * 2
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
    (trouble,) = (await Plugin(tmp_path, program).ask()).troubles
    assert why in trouble
    assert "test-provider" in trouble
    assert await kit.processes.settled("credential provider test-provider", 5.0)


async def test_missing_plugin_is_named(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, "")
    plugin.file.unlink()
    (trouble,) = (await plugin.ask()).troubles
    assert "test-provider" in trouble


@pytest.mark.parametrize(
    ("kind", "refs", "calls"),
    [
        ("Image", ("reg.example/a:1", "reg.example/a:2", "reg.example/b"), 2),
        ("Registry", ("reg.example/a", "reg.example/b", "x.example/a"), 2),
        ("Global", ("reg.example/a", "x.example/a"), 1),
    ],
)
async def test_plugin_answers_serve_what_their_cache_key_type_says(
    tmp_path: Path, kind: str, refs: tuple[str, ...], calls: int
) -> None:
    auth = {"*.example": {"username": "u", "password": "p"}}
    answer = answering({"auth": auth, "cacheDuration": "1h", "cacheKeyType": kind})
    plugin = Plugin(tmp_path, answer, matchImages=["*.example"])
    found = [await plugin.ask(ref) for ref in refs]

    assert [each.logins for each in found] == [(base.Login("u", "p"),)] * len(refs)
    assert (tmp_path / "test-provider.calls").read_text().count("x") == calls


async def test_a_kept_answer_that_is_no_longer_good_is_replaced_at_once(tmp_path: Path) -> None:
    """As when a token expires in the middle of a pull."""

    def write(password: str) -> Plugin:
        auth = {"reg.example": {"username": "u", "password": password}}
        return Plugin(tmp_path, answering({"auth": auth, "cacheDuration": "1h"}))

    plugin, tried = write("old"), []
    first = await plugin.ask()
    write("new")

    async def ask(login: base.Login | None) -> str:
        tried.append(login.password if login is not None else "")
        if tried[-1] != "new":
            raise PullError("image", Kind.AUTH, "it answered 401")
        return "done"

    answer, login = await credentials.attempt(lambda fresh: plugin.ask(fresh=fresh), ask)

    assert first.logins == (base.Login("u", "old"),)
    assert (answer, login) == ("done", base.Login("u", "new"))
    assert tried == ["old", "", "new"]


# Keeps the question beside itself.
KEEPING = answering({"auth": {"reg.example": {"username": "u", "password": "p"}}}).replace(
    "cat >/dev/null", 'cat >"$0.asked"'
)


@pytest.mark.parametrize("attributes", [{}, {"requireServiceAccount": True}])
async def test_a_provider_that_must_have_a_token_is_passed_over_and_named(
    tmp_path: Path, attributes: dict[str, bool]
) -> None:
    plugin = Plugin(tmp_path, KEEPING, tokenAttributes=attributes)
    found = await plugin.ask()
    assert found.logins == ()
    (trouble,) = found.troubles
    assert "test-provider: was passed over: it wants the token of a service account" in trouble
    assert "the agent does not give tokens of pods' accounts" in trouble
    assert "preheat.credentials.docker_config" in trouble
    assert not Path(f"{plugin.file}.asked").exists()


async def test_a_provider_that_can_do_without_a_token_is_asked_without(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path, KEEPING, tokenAttributes={"requireServiceAccount": False})
    found = await plugin.ask()
    assert (found.logins, found.troubles) == ((base.Login("u", "p"),), ())
    question = json.loads(Path(f"{plugin.file}.asked").read_text())
    assert question == {
        "kind": "CredentialProviderRequest",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "image": "reg.example/a",
    }


# --- docker's files and programs ------------------------------------------------------------------


async def find(ref: str, **section: Any) -> credentials.Found:
    where = settings.CredentialSettings.model_validate(section)
    return await credentials.Credentials().find(manifest.parse(ref), where)


async def test_a_file_that_cannot_be_used_leaves_the_others(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"auths": {"reg.example": {"username": "u", "password": "p"}}}))
    bad.write_text("nonsense")
    files = [str(tmp_path / "missing.json"), str(bad), str(good)]
    found = await find("reg.example/a", docker_config=files)

    assert found.logins == (base.Login("u", "p"),)
    assert [name in trouble for name, trouble in zip(files, found.troubles, strict=False)] == [
        True
    ] * 2


async def test_troubles_are_told_with_the_failure_of_an_image_that_needs_a_login(
    tmp_path: Path,
) -> None:
    file = tmp_path / "missing.json"

    async def refuse(login: base.Login | None) -> None:
        raise PullError("image", Kind.AUTH, "it answered 401")

    with pytest.raises(PullError, match=r"401.*missing\.json"):
        await credentials.attempt(lambda _: find("reg.example/a", docker_config=str(file)), refuse)


HELPER = f"""#!/bin/sh
read server; echo "$1 $server" >>"$0.calls"
case $server in
reg.example) echo '{{"ServerURL": "x", "Username": "u", "Secret": "p"}}';;
{manifest.HUB_LOGIN_KEY}) echo '{{"Username": "<token>", "Secret": "t"}}';;
bad.example) exit 2;;
*) echo credentials not found in native keychain; exit 1;;
esac
"""


async def test_programs_of_a_docker_config_are_asked_as_docker_asks(tmp_path: Path) -> None:
    file, program = tmp_path / "config.json", tmp_path / "docker-credential-test"
    file.write_text(json.dumps({"auths": {"reg.example": {}}, "credsStore": "test"}))
    program.write_text(HELPER)
    program.chmod(0o755)
    section = {"docker_config": str(file), "helper_dir": str(tmp_path)}
    login = await find("reg.example/a", **section)
    token = await find(f"{manifest.HUB}/ubuntu", **section)
    none = await find("other.example/a", **section)
    bad = await find("bad.example/a", **section)
    unset = await find("reg.example/a", docker_config=str(file))

    assert login == credentials.Found((base.Login("u", "p"),))
    assert token == credentials.Found((base.Login(identity_token="t"),))
    assert none == credentials.Found()
    assert "status 2" in bad.troubles[0]
    assert "helper_dir" in unset.troubles[0]
    calls = (tmp_path / "docker-credential-test.calls").read_text().splitlines()
    assert calls[:2] == ["get reg.example", f"get {manifest.HUB_LOGIN_KEY}"]


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
