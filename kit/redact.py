"""Takes secrets out of texts that people read: log lines, errors, findings.

Other programs put them there: containerd quotes the presigned URL that failed, a mount quotes its
options. So every such text passes here, whoever wrote it. What looks like a secret goes; a text
that loses a harmless word is better than one that keeps a key.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_MOST_READ = 2**16  # characters of a program's last words

# Parameters of a URL whose values help to understand an error. The value of any other may sign it.
_HARMLESS = {"service", "scope", "ns", "ref", "tag", "digest", "n", "last", "limit"}

_NAME = (
    r"x-(?:amz|goog|oss|cos|obs|ms)-[\w-]{1,60}|q-(?:ak|signature)|sig|jwt|auth|policy|"
    r"(?:[\w-]{0,40}?)(?:token|secret|password|passwd|passphrase|pwd|signature|credentials?|"
    r"authorization|api[_-]?key|secret[_-]?key|access[_-]?key(?:[_-]?id)?|accessid|key-pair-id|"
    r"account[_-]?key|private[_-]?key|client-key-data)"
)
# Names that stand before a secret in plain text too: 'NAME: value', '--NAME value'. Of these few,
# because any sentence can follow a colon.
_PLAIN = (
    r"[\w-]{0,40}?(?:token|secret|password|passwd|passphrase|api[_-]?key|secret[_-]?key|"
    r"access[_-]?key|account[_-]?key|private[_-]?key|client-key-data)"
)
_SHOWN = r"\*\*\*"
_WORD = r"[^\s\"']*[^\s\"',;]"
# A word that no sentence has: with a digit or a sign in its beginning (all of it would cost the
# square of its length). No path, nothing in brackets.
_STANDS_FOR = r"(?-i:[A-Z_]{1,20}(?:[\s.,;)\]'\"]|\Z))"  # FILE, in a help text
_ODD = (
    rf"(?!/[\w.-]+/|[<(\[{{]|{_SHOWN})"
    rf"(?=[^\s\"']{{0,200}}(?:\d|[+=_$!@#%^&~*]|\w[./:]\w)){_WORD}"
)
_SCHEME = r"(?:(?:bearer|basic|digest|negotiate) +)?"
_FIELD = re.compile(_NAME, re.IGNORECASE)
_URL = re.compile(r'(?<=://)[^\s"<>]+')
# A part of a URL's path that signs it: it says so, or it is long and mixed as no name is. Digests
# and the names of repositories have no capitals, files have an end.
_SIGNED = re.compile(
    r"(?<=/)(?:[^/]{0,60}(?i:hmac|signature|sig|token_{0,2})=[^/]*"
    r"|(?=[^/]{0,200}[A-Z])(?=[^/]{0,200}[a-z])(?=[^/]{0,200}\d)[\w+=~-]{32,})(?=/|\Z)",
    re.ASCII,
)
# Without one of these words a text has no name that stands before a secret. Most have none, and to
# look for the names takes ten times as long.
_HAS_NAME = re.compile(
    r"x-|q-ak|sig|jwt|auth|policy|token|secret|pass|pwd|credential|key|accessid",
    re.IGNORECASE | re.ASCII,
)
_RULES = [
    (
        re.compile(pattern, re.IGNORECASE | re.DOTALL | re.MULTILINE | re.ASCII),
        shown,
        "passphrase" in pattern,  # it looks for such a name
    )
    for pattern, shown in (
        (r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END[A-Z ]{0,40}-----|\Z)", HIDDEN),
        # Headers, with or without a scheme before the secret.
        (r"\b(cookie: ?)[^\n\"']+", rf"\1{HIDDEN}"),
        (
            rf"\b(authorization|x-registry-auth|cookie)(\\*[\"']?\s?[:=]\s?\\*[\"']?){_SCHEME}[^\s\"']+",
            rf"\1\2{HIDDEN}",
        ),
        (r"\b(bearer|basic) +(?!authenti)[\w.~+/=-]{8,}", rf"\1 {HIDDEN}"),
        (r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*", HIDDEN),  # a JWT
        # In quotes: fields of JSON and Python (docker's auths, answers of token services), YAML,
        # TOML, logs of Go. Up to the quote with as many backslashes: one within has more.
        (
            (
                rf"(?<![\w-])((?:{_NAME})(?:\\*[\"']\s?:\s?|\s?=\s?)|{_PLAIN}:[ \t]*)"
                r"(\\+)?b?([\"'])(?(2)(?:(?!(?<!\\)\2\3).)*|(?:\\.|(?!\3)[^\\])*)"
            ),
            rf"\1\2\3{HIDDEN}",
        ),
        (rf"(?<![\w-])({_NAME})(\s?=\s?|%3D)[^\s&\"']+", rf"\1\2{HIDDEN}"),
        # YAML, headers that we do not know, options of a command line.
        (rf"(?<![\w-])({_PLAIN} ?:[ \t]+){_ODD}", rf"\1{HIDDEN}"),
        # Without a space, or as Go prints headers. After a slash it is a name with a tag.
        (rf"(?<![\w/.-])({_PLAIN}:\[?){_ODD}", rf"\1{HIDDEN}"),
        (
            (
                rf"(?<![\w-])([\w-]{{0,40}}?(?:password|passwd|passphrase|pwd): +)(?!{_SHOWN})"
                rf"{_WORD}(?=[,;]|[^\S\n]*$)"
            ),
            rf"\1{HIDDEN}",
        ),
        (
            rf"(?<![\w-])(--?{_PLAIN} +)(?!-|{_SHOWN}|{_STANDS_FOR}){_WORD}",
            rf"\1{HIDDEN}",
        ),
        (
            # In quotes, in a list.
            rf"(?<![\w-])(--?{_PLAIN}(?:[\"'],)? +)([\"'])(?:\\.|(?!\2)[^\\])*",
            rf"\1\2{HIDDEN}",
        ),
        # A login before a host, without a scheme. Digests and snapshots of images are none.
        (
            (
                rf"(?<![\w/@.%+-])([\w.%+-]{{1,64}}):(?!{_SHOWN}@)[^\s/@\"'<>:,]{{1,200}}@"
                r"(?!sha\d)(?=[\w-]{1,60}(?:[/:]|\.[a-z\d]))"
            ),
            rf"\1:{HIDDEN}@",
        ),
        # Tokens that name their kind: GitHub, GitLab, Hugging Face, NVIDIA, Docker, Vault, npm,
        # AWS, Slack.
        (
            (
                r"(?<![\w-])(gh[pousr]_|github_pat_|glpat-|hf_|nvapi-|dckr_[po]at_|hvs\.|npm_|"
                r"xox[abeprs]-)[\w-]{8,}"
            ),
            rf"\1{HIDDEN}",
        ),
        (r"(?<!\w)(?-i:A[KS]IA[0-9A-Z]{16})(?!\w)", HIDDEN),
        (r"(?<!\w)(?-i:LS0tLS1CRUdJTi)[\w+/=]*", HIDDEN),  # PEM in base64
        # What 'ceph auth print-key' shows.
        (r"(?<![A-Za-z0-9+/])A[Qg][A-Za-z0-9+/]{36,62}={0,2}(?![A-Za-z0-9+/=])", HIDDEN),
    )
]


def text(said: str) -> str:
    """``said`` without its secrets; twice is the same as once."""
    said = _URL.sub(lambda found: _url(found[0]), said)
    named = _HAS_NAME.search(said) is not None
    for pattern, shown, of_names in _RULES:
        if named or not of_names:
            said = pattern.sub(shown, said)
    return said


def _url(said: str) -> str:
    """A URL after its scheme: no login, no value of a parameter that is not known as harmless."""
    place, mark, query = re.match(r"([^?#]*)([?#]?)(.*)", said, re.DOTALL).groups()  # type: ignore[union-attr]
    host, slash, path = place.partition("/")
    path = _SIGNED.sub(HIDDEN, slash + path).removeprefix("/")
    if "@" in host:
        host = f"{HIDDEN}@{host.rpartition('@')[2]}"
    return host + slash + path + mark + "&".join(map(_parameter, query.split("&") if mark else ()))


def _parameter(said: str) -> str:
    name, equals, _ = said.partition("=")
    if equals and name.lower() in _HARMLESS and "#" not in said:
        return said
    return f"{name}={HIDDEN}" if equals and re.fullmatch(r"[\w.%~-]+", name) else HIDDEN


def last(said: str, most: int) -> str:
    """Its last ``most`` characters, without secrets. They go before the cut: the rest of one that
    was cut would not be known as one. Of a long text only the end is looked at."""
    return text(said[-_MOST_READ:])[-most:]


def value(said: Any, name: str = "") -> Any:
    """A field of a log line, or all in it, as deep as it goes."""
    if isinstance(said, str):
        return HIDDEN if said and _FIELD.fullmatch(name) else text(said)
    if isinstance(said, Mapping):
        return {key: value(inner, str(key)) for key, inner in said.items()}
    if isinstance(said, list | tuple | set | frozenset):
        return [value(each, name) for each in said]
    if said is None or isinstance(said, int | float):
        return said
    return text(str(said))
