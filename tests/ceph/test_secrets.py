from pathlib import Path

import pytest

import kit.errors
from ceph import secrets

KEY = "AQAVUCdhj8DLCBAAKA9WzcQG6u44EeNooNObug=="
KEYRING = (
    f"[client.other]\n\tkey = AQotherotherotherother==\n[client.me]\n  key = {KEY}\n caps = x\n"
)


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", KEYRING])
def test_read_takes_a_bare_secret_and_a_keyring(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").write_text(text)
    assert secrets.read(tmp_path / "k", "me", "cluster c") == KEY


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "does not hold a Ceph key"),
        (b"hunter2 hunter2 hunter2", "does not hold a Ceph key"),
        (b"[client.me]\nkey = hunter2\n", "does not hold a Ceph key"),
        (b"[client.other]\nkey = hunter2hunter2hunter2hunter2\n", "no key for client.me"),
        (b"hunter2\xff", "not ASCII text"),
        (None, "No such file"),
    ],
)
def test_read_explains_without_showing_the_file(
    tmp_path: Path, data: bytes | None, text: str
) -> None:
    if data is not None:
        (tmp_path / "k").write_bytes(data)
    with pytest.raises(kit.errors.SourceError, match=text) as caught:
        secrets.read(tmp_path / "k", "me", "cluster c")
    shown = str(caught.value) + repr(caught.value.__cause__)
    assert "hunter2" not in shown and str(caught.value).startswith("cluster c: ")


# A key of type aes256k: 32 random bytes, and as clusters print it.
NEWER = "AgBdGQlqAAAAACAA" + "QUJD" * 10 + "QUI="


def client(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A node with this Ceph client; "": with none."""
    monkeypatch.setenv("PATH", str(folder))
    if version:
        (folder / "rados").write_text(f"#!/bin/sh\necho 'ceph version {version} (0) x (stable)'\n")
        (folder / "rados").chmod(0o755)


@pytest.mark.parametrize("version", ["16.2.15", "18.2.7", "19.2.5", "20.2.3"])
def test_key_that_the_nodes_client_does_not_know_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    client(tmp_path, monkeypatch, version)
    (tmp_path / "k").write_text(NEWER)
    with pytest.raises(kit.errors.SourceError) as caught:
        secrets.read(tmp_path / "k", "me", "cluster c")
    said = str(caught.value)
    assert f"client.me is of type aes256k, which this node's Ceph client {version} does" in said
    assert "20.2.4 or newer" in said and "auth_allowed_ciphers" in said and NEWER not in said
    assert secrets.read(tmp_path / "k", "me", "cluster c", by_kernel=True) == NEWER
    (tmp_path / "k").write_text(KEY)
    assert secrets.read(tmp_path / "k", "me", "cluster c") == KEY


@pytest.mark.parametrize("version", ["", "19.2.6", "20.2.4", "20.3.0", "21.2.0"])
def test_key_is_left_to_a_client_that_may_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    client(tmp_path, monkeypatch, version)
    (tmp_path / "k").write_text(NEWER)
    assert secrets.read(tmp_path / "k", "me", "cluster c") == NEWER
