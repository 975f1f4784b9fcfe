"""Which login fits an image: the kubelet's and docker's rules."""

import base64
import json
from typing import Any

import pytest

from preheat.image import manifest
from preheat.registry import credentials
from preheat.runtimes import base


def config(auths: dict[str, Any], **more: Any) -> credentials.Keys:
    return credentials.from_docker_config(json.dumps({"auths": auths, **more}).encode())


def user(name: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{name}:p".encode()).decode()}


def names(ref: str, *many: credentials.Keys) -> list[str]:
    return [each.username for each in credentials.fitting(many, manifest.parse(ref))]


@pytest.mark.parametrize(
    ("key", "ref", "fits"),
    [
        ("reg.example", "reg.example/a:b", True),
        ("https://reg.example", "reg.example/a:b", True),
        ("https://reg.example/v1/", "reg.example/a:b", True),
        ("http://reg.example/v2/", "reg.example/a:b", True),
        ("reg.example/", "reg.example/a:b", True),
        ("*.example", "reg.example/a:b", True),
        ("r*g.example", "reg.example/a:b", True),
        ("*.example", "x.reg.example/a:b", False),
        ("reg.example:5000", "reg.example/a:b", False),
        ("reg.example:5000", "reg.example:5000/a:b", True),
        ("reg.example", "reg.example:5000/a:b", False),
        ("reg.example/team", "reg.example/team/a:b", True),
        ("reg.example/v2team", "reg.example/v2team/a:b", True),
        ("reg.example/v2team", "reg.example/team/a:b", False),
        ("reg.example/team", "reg.example/other/a:b", False),
        # A plain prefix, as the kubelet's URLsMatch has it.
        ("reg.example/team", "reg.example/teammate/a:b", True),
        ("reg.example/team/", "reg.example/teammate/a:b", False),
        ("reg.example:port", "reg.example/a:b", False),
        ("[reg.example", "reg.example/a:b", False),
    ],
)
def test_a_key_fits_as_in_the_kubelet(key: str, ref: str, fits: bool) -> None:
    try:
        key = credentials.key_of(key)
    except ValueError:
        assert not fits
    assert credentials.matches(key, manifest.parse(ref)) is fits


def test_the_most_specific_login_comes_first_whatever_its_key_is_written_like() -> None:
    keys = config({
        "https://reg.example/v1/": user("wide"), "*.example": user("glob"),
        "reg.example/team": user("narrow"), "other.example": user("other"),
    })  # fmt: skip
    assert names("reg.example/team/a:b", keys) == ["narrow", "wide", "glob"]
    assert names("reg.example/x:b", keys) == ["wide", "glob"]


def test_logins_of_several_files_are_all_tried_once() -> None:
    first, second = config({"reg.example": user("a")}), config({"reg.example": user("b")})
    assert names("reg.example/x:b", first, second, first) == ["a", "b"]


@pytest.mark.parametrize("key", [manifest.HUB_LOGIN_KEY, manifest.HUB_INDEX, manifest.HUB])
@pytest.mark.parametrize(
    "ref", [f"{manifest.HUB}/ubuntu", f"{manifest.HUB_INDEX}/library/ubuntu:latest"]
)
def test_docker_hub_has_its_default_key(key: str, ref: str) -> None:
    assert names(ref, config({key: user("hub"), "reg.example": user("x")})) == ["hub"]


def test_the_older_dockercfg_is_read() -> None:
    data = json.dumps({"https://reg.example": user("old") | {"email": "a@example"}}).encode()
    assert names("reg.example/a:b", credentials.from_docker_config(data)) == ["old"]
    assert credentials.from_docker_config(b"{}") == credentials.Keys()


def test_a_bad_entry_harms_only_its_own_registry() -> None:
    keys = config({"bad.example": {"auth": "?"}, "reg.example": user("good")})
    ref = manifest.parse("bad.example/a:b")
    assert names("reg.example/a:b", keys) == ["good"]
    assert keys.troubles_of(ref) == ["bad.example: its 'auth' is not base64"]
    assert keys.troubles_of(manifest.parse("reg.example/a:b")) == []


def test_auth_without_padding_and_tokens_are_read() -> None:
    text = base64.b64encode(b"u:pass").decode().rstrip("=")
    keys = config({
        "a.example": {"auth": text}, "b.example": {"identitytoken": "t"},
        "c.example": {"registrytoken": "r"}, "d.example": {},
    })  # fmt: skip
    assert dict(keys.entries) == {
        "a.example": base.Login("u", "pass"), "b.example": base.Login(identity_token="t"),
        "c.example": base.Login(registry_token="r"),
    }  # fmt: skip


@pytest.mark.parametrize("data", [b"[]", b"x", b'{"auths": []}x', b'{"auths": 5}', b"[" * 10**5])
def test_a_file_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        credentials.from_docker_config(data)


@pytest.mark.parametrize(
    ("ref", "program"),
    [("reg.example/a", "ecr"), (f"{manifest.HUB}/a", "hub"), ("other.example/a", "all")],
)
def test_the_program_for_a_registry(ref: str, program: str) -> None:
    helpers = {"reg.example": "ecr", manifest.HUB_LOGIN_KEY: "hub"}
    keys = config({}, credHelpers=helpers, credsStore="all")
    assert keys.helper(manifest.parse(ref)) == program


def test_keys_and_logins_have_no_repr() -> None:
    keys = config({"reg.example": {"username": "u", "password": "secret"}})
    assert "secret" not in repr(keys) + repr(keys.entries) + repr(credentials.from_auths({}))
