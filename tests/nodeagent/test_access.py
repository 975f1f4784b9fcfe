"""Tokens, host names, rates and the record of calls."""

import hashlib
from pathlib import Path

import pytest

from kit.room import Role
from nodeagent.api import access

SECRET = "a-token-that-is-long"


def tokens(folder: Path, text: str) -> access.Tokens:
    (folder / "tokens").write_text(text)
    return access.Tokens(folder / "tokens")


def test_token_is_given_plain_or_hashed(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another-long-token").hexdigest()
    made = tokens(
        tmp_path, f"a: {{role: read, token: {SECRET}}}\nb: {{role: dangerous, sha256: {digest}}}\n"
    )
    found = made.caller(f"Bearer {SECRET}", "10.0.0.1")
    assert (found.name, found.role) == ("token a at 10.0.0.1", Role.READ)
    assert made.caller("bearer another-long-token", "x").role is Role.DANGEROUS
    for header in ("", "Bearer", "Bearer ", f"Basic {SECRET}", f"Bearer {SECRET}x", SECRET,
                   f"Bearer {digest}", "Bearer \udcff"):  # fmt: skip
        assert made.caller(header, "x").role is None, header


@pytest.mark.parametrize(
    "text",
    [
        "", "[", "x", "- a", f"a: {{role: king, token: {SECRET}}}", "a: {role: read}",
        "a: {role: read, token: short-s3cret}", "a: {role: read, sha256: s3cret}",
        f"a: {{role: read, token: {SECRET}, sha256: {'0' * 64}}}", f"a: {{token: {SECRET}}}",
        f"a b: {{role: read, token: {SECRET}}}", "a: s3cret: {", "a: {role: read, token: 12345678}",
    ],
)  # fmt: skip
def test_bad_file_admits_nobody_and_its_error_shows_no_token(tmp_path: Path, text: str) -> None:
    made = tokens(tmp_path, text)
    assert made.caller(f"Bearer {SECRET}", "x").role is None
    assert made.problem
    assert "s3cret" not in made.problem
    assert SECRET not in made.problem


def test_missing_file_admits_nobody(tmp_path: Path) -> None:
    made = access.Tokens(tmp_path / "none")
    assert made.caller(f"Bearer {SECRET}", "x").role is None
    assert "No such file" in made.problem


@pytest.mark.parametrize(
    ("listen", "header", "admitted"),
    [
        ("10.0.0.1", "10.0.0.1:9471", True),
        ("10.0.0.1", "NODE.example", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "localhost", False),
        ("10.0.0.1", "", False),
        ("10.0.0.1", "evil.example:9471", False),
        ("0.0.0.0", "10.0.0.2:1", True),
        ("0.0.0.0", "[fd00::1]:1", True),
        ("0.0.0.0", "evil.example", False),
        ("::1", "[::1]:9470", True),
        ("127.0.0.1", "localhost:9470", True),
        ("127.0.0.1", "127.0.0.1@evil.example", False),
    ],
)
def test_hosts(listen: str, header: str, admitted: bool) -> None:
    assert access.Hosts(listen, ["node.example"]).admits(header) is admitted


def test_rate_gives_a_burst_then_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    rate = access.Rate(2.0, 3)
    assert [rate.admits("a") for _ in range(4)] == [True, True, True, False]
    assert rate.admits("b")
    now = 0.6
    assert [rate.admits("a") for _ in range(2)] == [True, False]
    now = 100.0
    assert [rate.admits("a") for _ in range(4)] == [True, True, True, False]
