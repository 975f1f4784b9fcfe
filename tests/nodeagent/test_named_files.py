"""Files that settings and objects of the cluster name: whatever is there, nobody waits for it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kit.errors
from ceph import secrets
from kube import access, kubelet
from kube.settings import AccessSettings, KubeletSettings
from nodeagent import configfile
from nodeagent.api import rotation
from nodeagent.commands import bundle_files
from preheat import settings
from preheat.image import manifest
from preheat.registry import credentials, hosts
from volumes.audit.logs import patterns

pytestmark = pytest.mark.timeout(60)


def api_server(**fields: Any) -> Any:
    return access.Reader(AccessSettings(server="https://a.example", **fields)).read()


def hosts_file(path: Path) -> Any:
    (path.parent / "r.example").mkdir()
    path.rename(path.parent / "r.example" / "hosts.toml")
    return hosts.of([path.parent], "r.example")


def certificate(path: Path) -> Any:
    return hosts.context(hosts.Host("https://r.example/v2", cas=(str(path),)))


READERS: dict[str, Callable[[Path], Any]] = {
    "settings": configfile.load,
    "key of Ceph": lambda path: secrets.read(path, "gpu", "dataset a"),
    "token of the account": lambda path: api_server(token_file=path),
    "authority": lambda path: api_server(token_file=Path("/etc/hostname"), ca_file=path),
    "kubeconfig": lambda path: api_server(kubeconfig=path),
    "the kubelet's": lambda path: kubelet.thresholds(KubeletSettings(config=path)),
    "tokens": rotation.read_tokens,
    "certificate": lambda path: rotation.read_pair(path, path),
    "patterns": patterns.load,
    "hosts.toml": hosts_file,
    "authority of a registry": certificate,
    "log of the bundle": lambda path: bundle_files.part(str(path), 10, False),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [pipe, device, folder])
def test_what_is_no_file_is_refused_unopened(
    tmp_path: Path, reader: str, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "named"
    make(path)
    with pytest.raises((OSError, ValueError, kit.errors.AgentError)) as caught:
        READERS[reader](path)
    assert "it is no regular file" in str(caught.value)


@pytest.mark.parametrize(
    "reader", [name for name in READERS if name not in ("hosts.toml", "log of the bundle")]
)
def test_what_is_large_is_not_read(tmp_path: Path, reader: str) -> None:
    path = tmp_path / "named"
    with path.open("wb") as file:
        file.truncate(8 * 2**20)
    with pytest.raises((OSError, ValueError, kit.errors.AgentError)) as caught:
        READERS[reader](path)
    assert "it has more than" in str(caught.value)


async def test_logins_are_read_in_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "config.json")
    where = settings.CredentialSettings(docker_config=tmp_path / "config.json")
    find = credentials.Credentials().find
    found = await find(manifest.parse("r.example/a:b"), where)
    assert "it is no regular file" in found.troubles[0]
    monkeypatch.setattr(credentials, "FILE_SECONDS", 0.0)
    found = await find(manifest.parse("r.example/a:b"), where)
    assert "no answer within 0s" in found.troubles[0]


async def test_key_of_a_dataset_is_read_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "key")
    with pytest.raises(kit.errors.SourceError, match=f"{tmp_path}/key .*it is no regular file"):
        await secrets.fetch(tmp_path / "key", "gpu", "dataset a")
    monkeypatch.setattr(secrets, "READ_SECONDS", 0.0)
    with pytest.raises(kit.errors.SourceError, match="no answer within 0s"):
        await secrets.fetch(tmp_path / "key", "gpu", "dataset a")
