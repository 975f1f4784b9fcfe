"""Files that rotate: what was good last stays, the rest is a finding and admits nobody."""

import datetime
import hashlib
import os
import ssl
import subprocess
from pathlib import Path

import pytest

import kit.findings
from kit.room import Role
from nodeagent.api import access, rotation
from nodeagent.settings import ApiSettings

SECRET = "a-token-that-is-long"
GOOD = f"a: {{role: read, token: {SECRET}}}\n"
BAD = [
    "", "[", "x", "- a", f"a: {{role: king, token: {SECRET}}}", "a: {role: read}",
    "a: {role: read, token: short-s3cret}", "a: {role: read, sha256: s3cret}",
    f"a: {{role: read, token: {SECRET}, sha256: {'0' * 64}}}", f"a: {{token: {SECRET}}}",
    f"a b: {{role: read, token: {SECRET}}}", "a: s3cret: {", "a: {role: read, token: 12345678}",
    "[" * 1_000, "#" * 2_000_000,
]  # fmt: skip


def held(folder: Path, text: str) -> rotation.WatchedFiles[rotation.Known]:
    """Tokens of a file with ``text``, looked at once."""
    (folder / "tokens").write_text(text)
    made = rotation.tokens(folder / "tokens")
    made.look()
    return made


def whose(tokens: rotation.WatchedFiles[rotation.Known], header: str) -> access.Caller | None:
    return rotation.whose(tokens.value, rotation.bearer(header))


def test_token_is_given_plain_or_hashed(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another-long-token").hexdigest()
    made = held(tmp_path, f"{GOOD}b: {{role: dangerous, sha256: {digest}}}\n")
    found = whose(made, f"Bearer {SECRET}")
    assert found is not None
    assert (found.name, found.role) == ("token a", Role.READ)
    other = whose(made, "bearer another-long-token")
    assert other is not None
    assert other.role is Role.DANGEROUS
    for header in ("", "Bearer", "Bearer ", f"Basic {SECRET}", f"Bearer {SECRET}x", SECRET,
                   f"Bearer {digest}", "Bearer \udcff"):  # fmt: skip
        assert whose(made, header) is None, header


@pytest.mark.parametrize("text", BAD)
def test_bad_tokens_file_admits_nobody_and_says_so_without_a_token(
    tmp_path: Path, text: str
) -> None:
    made = held(tmp_path, text)
    assert whose(made, f"Bearer {SECRET}") is None
    found = made.finding()
    assert found is not None
    assert found.severity is kit.findings.Severity.CRITICAL
    assert "nobody is admitted" in found.message
    assert "s3cret" not in repr(found)
    assert SECRET not in repr(found)


@pytest.mark.parametrize("text", [*BAD, None])
def test_bad_tokens_file_leaves_the_earlier_one_in_force(tmp_path: Path, text: str | None) -> None:
    made = held(tmp_path, GOOD)
    assert made.finding() is None
    if text is None:
        (tmp_path / "tokens").unlink()
    else:
        (tmp_path / "tokens").write_text(text)
    made.look()
    assert whose(made, f"Bearer {SECRET}") is not None
    found = made.finding()
    assert found is not None
    assert found.severity is kit.findings.Severity.WARNING
    assert "the earlier one stays" in found.message
    (tmp_path / "tokens").write_text("{}")
    made.look()
    assert made.finding() is None
    assert whose(made, f"Bearer {SECRET}") is None


def test_unchanged_file_is_read_once(tmp_path: Path) -> None:
    reads = []
    (tmp_path / "f").write_text("x")
    made = rotation.WatchedFiles("f", [tmp_path / "f"], lambda: reads.append(1))
    for _ in range(3):
        made.look()
    assert reads == [1]


# --- the certificate


def run(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)


def certify(folder: Path, *, start: str = "20250101000000Z", end: str = "20600101000000Z") -> None:
    """tls.crt and tls.key for 127.0.0.1."""
    (folder / "ca").mkdir(exist_ok=True)
    (folder / "ca" / "index").write_text("")
    (folder / "ca" / "cnf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\ndatabase={folder}/ca/index\nnew_certs_dir={folder}/ca\n"
        "rand_serial=yes\ndefault_md=sha256\npolicy=p\nunique_subject=no\n[p]\ncommonName=supplied\n"
    )
    key, request = folder / "ca" / "key", folder / "ca" / "csr"
    run("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
           "-keyout", key, "-out", request, "-subj", "/CN=a")  # fmt: skip
    run("openssl", "ca", "-batch", "-selfsign", "-config", folder / "ca" / "cnf",
            "-keyfile", key, "-in", request, "-out", folder / "tls.crt", "-startdate", start,
            "-enddate", end, "-notext")  # fmt: skip
    key.rename(folder / "tls.key")


def certificate(folder: Path) -> rotation.Certificate:
    api = ApiSettings(
        listen="127.0.0.1:0",
        cert_file=folder / "tls.crt",
        key_file=folder / "tls.key",
        tokens_file=folder / "tokens",
    )
    made = rotation.Certificate(api)
    made.look()
    return made


def spoil(folder: Path, how: str) -> None:
    cert, key = folder / "tls.crt", folder / "tls.key"
    if how == "missing":
        cert.unlink()
    elif how == "key missing":
        key.unlink()
    elif how == "empty":
        cert.write_text("")
    elif how == "nonsense":
        cert.write_bytes(os.urandom(4096))
    elif how == "a folder":
        cert.unlink()
        cert.mkdir()
    elif how == "expired":
        certify(folder, start="20200101000000Z", end="20200201000000Z")
    elif how == "not valid yet":
        certify(folder, start="20580101000000Z")
    elif how == "other key":
        old = cert.read_bytes()
        certify(folder)
        cert.write_bytes(old)
    elif how == "encrypted key":
        run("openssl", "ec", "-aes256", "-passout", "pass:x", "-in", key, "-out", key)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("missing", "No such file"), ("key missing", "No such file"), ("empty", "cannot be used"),
        ("nonsense", "cannot be used"), ("a folder", "cannot be"), ("expired", "expired"),
        ("not valid yet", "not yet valid"), ("other key", "MISMATCH"),
        ("encrypted key", "cannot be used"),
    ],
)  # fmt: skip
def test_bad_pair_is_never_taken_and_leaves_the_earlier_one(
    tmp_path: Path, how: str, says: str
) -> None:
    certify(tmp_path)
    made = certificate(tmp_path)
    assert made.finding() is None
    before = made.value
    assert before is not None
    spoil(tmp_path, how)
    made.look()
    assert made.value is before
    first = certificate(tmp_path)
    assert first.value is None
    for each, severity in (
        (made, kit.findings.Severity.WARNING), (first, kit.findings.Severity.CRITICAL),
    ):  # fmt: skip
        found = each.finding()
        assert found is not None
        assert found.severity is severity
        assert says in found.message
    if not (tmp_path / "tls.crt").is_dir():
        certify(tmp_path)
        made.look()
        assert made.finding() is None
        assert made.value is not before


def expose(path: Path, how: str) -> None:
    """As its words say; else nobody gets at it."""
    path.chmod({"read": 0o644, "written": 0o622, "a group's to read": 0o440}.get(how, 0o400))
    if how == "of another":
        os.chown(path, 65534, -1)
    if how == "a group's to read":
        os.chown(path, -1, 65534)
    if how == "a group's to write":
        os.chown(path, -1, 65534)
        path.chmod(0o620)
    if how == "in an open directory":
        path.parent.chmod(0o777)
    if how == "in a directory like /tmp":
        path.parent.chmod(0o1777)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize(("how", "severity"), [
    ("private", None), ("a group's to read", None), ("in a directory like /tmp", None),
    ("read", kit.findings.Severity.WARNING),
    ("written", kit.findings.Severity.CRITICAL), ("of another", kit.findings.Severity.CRITICAL),
    ("a group's to write", kit.findings.Severity.CRITICAL),
    ("in an open directory", kit.findings.Severity.CRITICAL),
])  # fmt: skip
def test_file_that_others_may_read_or_write_is_used_and_is_a_finding(
    tmp_path: Path, how: str, severity: kit.findings.Severity | None
) -> None:
    made = held(tmp_path, GOOD)
    expose(tmp_path / "tokens", how)
    made.look()  # nothing else has changed than the mode
    found = made.warnings()
    assert [each.severity for each in found] == ([severity] if severity else [])
    assert made.finding() is None
    assert whose(made, f"Bearer {SECRET}") is not None
    if severity:
        assert str(tmp_path / "tokens") in found[0].message
        expose(tmp_path / "tokens", "private")
        tmp_path.chmod(0o755)
        os.chown(tmp_path / "tokens", 0, 0)
        made.look()
        assert made.warnings() == []


def test_key_is_private_and_the_certificate_is_not(tmp_path: Path) -> None:
    certify(tmp_path)
    for name, mode, exposed in (
        ("tls.crt", 0o644, []), ("tls.key", 0o644, ["tls.key"]), ("tls.key", 0o600, []),
        ("tls.crt", 0o666, ["tls.crt"]),
    ):  # fmt: skip
        (tmp_path / name).chmod(mode)
        made = certificate(tmp_path)
        assert [Path(each.subject).name for each in made.warnings()] == exposed


DAY = 86400.0
UNTIL = 2_840_140_800.0  # 20600101000000Z


@pytest.mark.parametrize(("start", "left", "soon"), [
    ("20250101000000Z", 15 * DAY, False), ("20250101000000Z", 13 * DAY, True),
    ("20591231000000Z", DAY / 3, False), ("20591231000000Z", DAY / 6, True),
])  # fmt: skip
def test_certificate_that_expires_soon_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, left: float, soon: bool
) -> None:
    pair = rotation.Pair(ssl.create_default_context(), calendar(start), UNTIL)
    assert pair.expires_soon(UNTIL - left) is soon
    certify(tmp_path)
    (tmp_path / "tls.key").chmod(0o400)
    made = certificate(tmp_path)
    assert made.value is not None
    assert made.value.until == UNTIL
    monkeypatch.setattr(made, "value", pair)
    monkeypatch.setattr("time.time", lambda: UNTIL - left)
    assert [each.rule for each in made.warnings()] == (["certificate-expires"] if soon else [])
    assert made.finding() is None


def calendar(text: str) -> float:
    form = "%Y%m%d%H%M%SZ%z"
    return datetime.datetime.strptime(f"{text}+0000", form).timestamp()


def test_certificate_that_expires_in_force_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify(tmp_path)
    made = certificate(tmp_path)
    assert made.finding() is None
    monkeypatch.setattr("time.time", lambda: 2_900_000_000.0)
    made.look()
    found = made.finding()
    assert found is not None
    assert "has expired" in found.message
