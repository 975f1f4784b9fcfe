"""No secret comes through, whatever is around it; what helps to understand an error does."""

import base64
import json
import logging
import os
import string
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

import kit.errors
import kit.findings
import kit.redact
from nodeagent import logs
from tests.testbed.own_log import own_log

# What the text around a secret says itself. Hypothesis takes strings from our code, too.
_SAID = (
    "authorization identitytoken registrytoken refresh_token private password signature "
    "awsaccesskeyid x-amz-credential x-amz-security-token access_token key-pair-id q-signature "
    "unknown-to-us eyjhbgcioijiuzi1nij9 bucket.example https://h.example registry.example service "
    "x-vault-token client-key-data accountkey endpointsuffix defaultendpointsprotocol --password"
)


def _secret(alphabet: Any) -> st.SearchStrategy[str]:
    """At least eight characters, so that it does not stand in the text around it by chance."""
    made = st.text(alphabet, min_size=8, max_size=60)
    return made.filter(lambda text: text.lower() not in _SAID)


_WORDS = _secret(string.ascii_letters + string.digits)
_RAW = _secret(st.characters(min_codepoint=33, max_codepoint=0x2FF))
_AROUND = st.sampled_from(["", " ", '"', "failed: ", "\n", "(", "[", "{'a': ", "x=1,", "Get ", "é"])
_PARAMETERS = [
    "X-Amz-Signature", "X-Amz-Credential", "x-amz-security-token", "X-Goog-Signature", "Signature",
    "sig", "token", "access_token", "AWSAccessKeyId", "Key-Pair-Id", "Policy", "q-signature",
    "jwt", "password", "X-Oss-Signature",
]  # fmt: skip
_FIELDS = ["auth", "password", "identitytoken", "registrytoken", "refresh_token", "secret"]


def _url(name: str, secret: str) -> str:
    query = f"service=x&{name}={urllib.parse.quote(secret, '')}"
    return f"https://bucket.example/v2/a/blobs/sha256:0?{query}"


# With what no word of a sentence has: after 'NAME: ' a plain word may be the sentence's.
_ODD = st.builds(lambda s, odd, at: s[:at] + odd + s[at:], _WORDS, st.sampled_from("7_+$"),
                 st.integers(0, 8))  # fmt: skip
_PLAIN = ["password", "token", "X-Vault-Token", "client-key-data", "db_password", "apiKey"]
_KINDS = ["ghp_", "github_pat_", "glpat-", "hf_", "dckr_pat_", "hvs.", "xoxb-"]

_KEYS = st.binary(min_size=26, max_size=26).map(
    lambda noise: base64.b64encode(b"\1\0" + noise).decode()
)


_SECRETS = st.one_of(
    st.builds(
        lambda n, s: (urllib.parse.quote(s, ""), _url(n, s)), st.sampled_from(_PARAMETERS), _RAW
    ),
    st.builds(lambda s: (s, f"https://h.example/x?unknown-to-us={s}&y=1"), _WORDS),
    st.builds(lambda s: (s, f"https://h.example/x#access={s}"), _WORDS),
    st.builds(lambda n, s: (s, f"/v2/a?n=1&{n}={s}&z=2"), st.sampled_from(_PARAMETERS), _WORDS),
    st.builds(lambda s: (s, f"https://user:{s}@registry.example:5000/v2/"), _WORDS),
    st.builds(lambda s: (s, f"redis://:{s}@@h/"), _WORDS),
    st.builds(lambda s: (s, f"https://{s}@h.example"), _WORDS),
    st.builds(lambda k: (k, f"key = {k}"), _KEYS),
    st.builds(lambda k: (k, f"name=admin,secret={k},fs=a"), _KEYS),
    st.builds(lambda s: (s, f"Authorization: Bearer {s}"), _WORDS),
    st.builds(lambda s: (s, f"bearer {s}"), _WORDS),
    st.builds(lambda s: (s, f"Authorization: Basic {s}"), _WORDS),
    st.builds(lambda s: (s, f"{{'authorization': '{s}'}}"), _WORDS),
    st.builds(
        lambda n, s: (json.dumps(s)[1:-1], json.dumps({"h": {n: s, "b": 1}})),
        st.sampled_from(_FIELDS),
        _RAW,
    ),
    st.builds(lambda n, s: (s, json.dumps(json.dumps({n: s}))), st.sampled_from(_FIELDS), _WORDS),
    st.builds(lambda n, s: (s, f"{{'{n}': '{s}'}}"), st.sampled_from(_FIELDS), _WORDS),
    st.builds(lambda s: (s, f"eyJhbGciOiJIUzI1NiJ9.{s}.{s}"), _WORDS),
    st.builds(lambda n, s: (s, f"{n}: {s}"), st.sampled_from(_PLAIN), _ODD),
    st.builds(lambda s: (s, f"a: b\npassword: {s}\nc: d"), _WORDS),
    st.builds(lambda n, s: (s, f'{n}="{s}"'), st.sampled_from(_PARAMETERS), _WORDS),
    st.builds(lambda n, s: (s, f"{n}: '{s}'"), st.sampled_from(_PLAIN), _WORDS),
    st.builds(lambda n, s: (s, f"{n}:{s}"), st.sampled_from(_PLAIN), _ODD),
    st.builds(lambda s: (s, repr(["--password", s])), _WORDS),
    st.builds(lambda n, s: (s, f"--{n} {s}"), st.sampled_from(["password", "auth-token"]), _ODD),
    st.builds(lambda s: (s, f"AccountName=a;AccountKey={s};EndpointSuffix=x"), _WORDS),
    st.builds(lambda s: (s, f"user:{s}@registry.example:5000/v2"), _WORDS),
    st.builds(lambda s: (s, f"user:{s}@mirror/debian"), _WORDS),
    st.builds(lambda kind, s: (s, f"{kind}{s}"), st.sampled_from(_KINDS), _WORDS),
    st.builds(
        lambda s: (s, f"-----BEGIN PRIVATE KEY-----\n{s}\n{s}\n-----END PRIVATE KEY-----"), _WORDS
    ),
)  # fmt: skip


@given(st.lists(st.tuples(_AROUND, _SECRETS), min_size=1, max_size=3), _AROUND)
def test_no_secret_comes_through(parts: list[tuple[str, tuple[str, str]]], end: str) -> None:
    said = " ".join(f"{before}{shown}" for before, (_, shown) in parts) + f" {end}"
    clean = kit.redact.text(said)
    for _, (secret, _) in parts:
        assert secret not in clean
    assert kit.redact.text(clean) == clean


@pytest.mark.parametrize(
    "said",
    [
        json.dumps({"auth": 'ab"SECRET', "b": "end"}),
        json.dumps(json.dumps({"auth": 'ab"SECRET', "b": "end"})),
        json.dumps({"auth": "ab\\", "token": "SECRET"}) + " end",
        repr({"auth": "ab'\"SECRET", "b": "end"}),
        '--password "ab\\"SECRET" --b end',
    ],
)
def test_a_quote_within_a_secret_does_not_end_it(said: str) -> None:
    clean = kit.redact.text(said)
    assert "SECRET" not in clean
    assert "end" in clean


@given(st.text(max_size=300))
def test_any_text_is_taken(said: str) -> None:
    clean = kit.redact.text(said)
    assert kit.redact.text(clean) == clean


@pytest.mark.parametrize(
    "said",
    [
        "registry.example:5000/team/app:v1@sha256:" + "0" * 64,
        "https://registry.example/token?service=registry&scope=repository:a/b:pull",
        "secret_file /etc/ceph/key has no key for client.gpu",
        "a bearer token is needed (admin.api.tokens_file)",
        "unknown authentication scheme 'digest'",
        "/dev/rbd0 mounted at /var/lib/kubelet/plugins/kubernetes.io/csi/rbd.csi/globalmount/0001",
        "monitors 10.0.0.1:6789,[fd00::1]:6789",
        "tokens.yaml: a.token: the token is shorter than 16 characters",
        "dataset coco: cephfs 10.0.0.1:6789:/datasets/coco@v1",
        "app:v1@sha256:" + "0" * 64,
        "rbd:csi-vol-1@snap-7",
        "admin.api.tokens_file: a.token: expired",
        "volumes.guard.token: Field required",
        "password: is not set",
        "of a Secret: defaultMode 0400",
        "token: /etc/nodeagent/token cannot be read",
        "use --token-file FILE, or --token TOKEN",
        "mail root@node.example",
        "at 12:30:45 pid 7 (python3): has 3 files open below /v/a",
        "provider config.yaml: it is not valid YAML (found unexpected end of stream, line 3)",
        "disk-0123456789abcdef0123 has no hf_model",
        "pull registry.example/team/get-token:v1.2",
        "tokens: 3 callers",
        f"https://cdn.example/docker/registry/v2/blobs/sha256/ab/{'ab' * 32}/data",
        f"https://r.example/v2/a/blobs/sha256:{'0a' * 32}",
        "s3://bucket/ImageNet2012Train/Part_0000012345_of_0000099999.tar",
    ],
)
def test_what_is_no_secret_stays(said: str) -> None:
    assert kit.redact.text(said) == said


@pytest.mark.parametrize(
    "file", ["nodeagent/shown/runbook.yaml", "volumes/audit/logs/patterns.yaml"]
)
def test_our_own_advice_and_lines_of_other_programs_stay(file: str) -> None:
    text = (Path(kit.__file__).parents[1] / file).read_text()
    assert kit.redact.text(text) == text


@pytest.mark.parametrize(("said", "shown"), [
    ("login failed, password: hunter2", "login failed, password: ***"),
    ("passwd: hunter", "passwd: ***"),
    ("token: 3f1c09aa, expired", "token: ***, expired"),
    ("X-Vault-Token: s.abc", "X-Vault-Token: ***"),
    ("client-key-data: LS0tLS1CRUdJTiBSU0E=", "client-key-data: ***"),
    ("AccountName=a;AccountKey=a/b+==", "AccountName=a;AccountKey=***"),
    ("pull user:pw@host/app: refused", "pull user:***@host/app: refused"),
    ("mount.cifs --password x //a", "mount.cifs --password *** //a"),
    ("git said ghp_0123456789abcdef", "git said ghp_***"),
    ("nvcr.io: nvapi-0123456789ab", "nvcr.io: nvapi-***"),
    ('msg="denied" password="hunter 2" code=1', 'msg="denied" password="***" code=1'),
    ("Login(user='a', password='hunter', b=1)", "Login(user='a', password='***', b=1)"),
    ("Login(password=b'hunter', b=1)", "Login(password='***', b=1)"),
    ('token = "hunter"  # toml', 'token = "***"  # toml'),
    ('password: "hunter 2"', 'password: "***"'),
    ("db-password:\thunter2, x", "db-password:\t***, x"),
    ("password : hunter2", "password : ***"),
    ("x-auth-token:3f1c", "x-auth-token:***"),
    ("map[Accept:[a] X-Vault-Token:[s.abc] B:[c]]", "map[Accept:[a] X-Vault-Token:[*** B:[c]]"),
    ("mount --password 'hunter 2' //a", "mount --password '***' //a"),
    ("['mount', '--password', 'hunter', '//a']", "['mount', '--password', '***', '//a']"),
    ("MYSQL_PWD=hunter2 mysql", "MYSQL_PWD=*** mysql"),
    (f"https://h.e/signed/{'aB3_' * 10}/blobs/x: 403", "https://h.e/signed/***/blobs/x: 403"),
    ("https://h.e/__token__=exp=17~hmac=0a1b2c/x.gz", "https://h.e/***/x.gz"),
    ("https://h.e/Signature=0a1b2c/x.gz?a=1", "https://h.e/***/x.gz?a=***"),
    ("Cookie: a=hunter2; sid=3f1c\nHost: x", "Cookie: ***\nHost: x"),
])  # fmt: skip
def test_only_the_secret_goes(said: str, shown: str) -> None:
    assert kit.redact.text(said) == shown


@pytest.mark.parametrize(
    "piece",
    ["a", "://", "://?", "token", "x-amz-", "eyJ", "eyJ.", "a=", "AQ", "'auth': '", "?&", "\\",
     "bearer ", "a:", "a:b@", "password: ", "--token ", "token: a",
     "-----BEGIN PRIVATE KEY-----", "token=", "-", "auth\\'", 'pwd="', "token:[", "cookie: a",
     "://a/", "/a=", "/aB3"],
)  # fmt: skip
def test_long_text_takes_no_longer_than_its_length(piece: str) -> None:
    """Work that grows with the square of the length would end at the test's time limit."""
    assert kit.redact.text(piece * 100_000)
    clean = kit.redact.text(piece * 100)
    assert kit.redact.text(clean) == clean


# --- where it is used

SECRET = "s3cretS3cret"
URL = f"https://bucket.example/x?X-Amz-Signature={SECRET}"


def test_errors_and_findings_hold_none() -> None:
    error = kit.errors.SourceError(URL, f"Get {URL!r}: refused", f"open {URL}")
    found = kit.findings.Finding(
        "id", "rule", kit.findings.Severity.INFO, URL, f"saw {URL}", URL, {"line": URL}
    )
    for shown in (str(error), repr(error), repr(vars(error)), repr(found)):
        assert SECRET not in shown
        assert "bucket.example" in shown


def test_log_holds_none(tmp_path: Path) -> None:
    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with own_log():
        drain = logs.configure(file)
        log: Any = structlog.get_logger("test")
        try:
            raise OSError(URL)
        except OSError:
            log.exception("failed", why=URL, deep={"a": [URL], "password": SECRET}, token=SECRET)
        logging.getLogger("library").error("failed: %s", URL)
        drain.close(60)
    said = (tmp_path / "log").read_text()
    assert said.count("bucket.example") == 4
    assert SECRET not in said
