"""How the API server is found and who the agent is there."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube import access
from kube.settings import AccessSettings
from tests.nodeagent.test_listeners import certify


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, Path]:
    certify(tmp_path, "it")
    return {"certificate": tmp_path / "tls.crt", "key": tmp_path / "tls.key"}


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> AccessSettings:
    file = folder / "kubeconfig"
    whole = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://k:6443/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    file.write_text(yaml.safe_dump(whole))
    return AccessSettings(kubeconfig=file)


def _data(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def test_pod_is_told_of_its_cluster_by_the_environment_and_its_account(
    tmp_path: Path, pem: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("one\n")
    asked = AccessSettings(ca_file=pem["certificate"], token_file=tmp_path / "token")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert not asked.is_configured
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert asked.is_configured
    assert not AccessSettings(token_file=tmp_path / "none").is_configured
    reader = access.Reader(asked)
    first = reader.read()
    assert (first.server, first.token) == ("https://[fd00::1]:6443", "one")
    assert "one" not in repr(first)
    (tmp_path / "token").write_text("two\n")  # kubelet rotates it
    again = reader.read()
    assert again.token == "two"
    assert again.tls is first.tls  # so connections stay open
    certify(tmp_path, "another")
    assert reader.read().tls is not first.tls


@pytest.mark.parametrize("inline", [False, True])
def test_kubeconfig_with_certificate_or_token(
    tmp_path: Path, pem: dict[str, Path], inline: bool
) -> None:
    if inline:
        cluster = {"certificate-authority-data": _data(pem["certificate"])}
        user = {
            "client-certificate-data": _data(pem["certificate"]),
            "client-key-data": _data(pem["key"]),
        }
    else:  # relative to the kubeconfig
        cluster = {"certificate-authority": "tls.crt"}
        user = {"client-certificate": "tls.crt", "client-key": "tls.key"}
    found = access.Reader(kubeconfig(tmp_path, cluster, user)).read()
    assert (found.server, found.token) == ("https://k:6443", "")
    (tmp_path / "t").write_text("tok\n")
    for login in ({"token": "tok"}, {"tokenFile": "t"}):
        assert access.Reader(kubeconfig(tmp_path, cluster, login)).read().token == "tok"


@pytest.mark.parametrize(
    ("cluster", "user", "why"),
    [
        ({}, {"exec": {"command": "login"}}, "not supported"),
        ({"server": "http://k"}, {"token": "x"}, "not https"),
        ({"certificate-authority-data": "%%"}, {"token": "x"}, "not base64"),
        ({"certificate-authority-data": "aGVsbG8="}, {"token": "x"}, "not certificates"),
    ],
)
def test_unusable_kubeconfig_says_what_is_wrong_and_no_secret(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any], why: str
) -> None:
    asked = kubeconfig(tmp_path, cluster, user)
    with pytest.raises(access.AccessError, match=why) as raised:
        access.Reader(asked).read()
    assert str(asked.kubeconfig) in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "a: [", "current-context: x\ncontexts: []\n"])
def test_file_that_is_no_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text)
    with pytest.raises(access.AccessError, match="not a kubeconfig"):
        access.Reader(AccessSettings(kubeconfig=file)).read()
