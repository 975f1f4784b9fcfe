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
