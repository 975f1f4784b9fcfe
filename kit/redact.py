"""Takes secrets out of texts that people read: log lines, errors, findings.

Other programs put them there: containerd quotes the presigned URL that failed, a mount quotes its
options. So every such text passes here, whoever wrote it. What looks like a secret goes; a text
that loses a harmless word is better than one that keeps a key.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

# Parameters of a URL whose values help to understand an error. The value of any other may sign it.
_HARMLESS = {"service", "scope", "ns", "ref", "tag", "digest", "n", "last", "limit"}

_NAME = (
    r"x-(?:amz|goog|oss|cos|obs|ms)-[\w-]{1,60}|q-(?:ak|signature)|sig|jwt|pwd|auth|policy|"
    r"(?:[\w-]{0,40}?)(?:token|secret|password|passwd|passphrase|signature|credentials?|"
    r"authorization|api[_-]?key|secret[_-]?key|access[_-]?key(?:[_-]?id)?|accessid|key-pair-id)"
)
_SCHEME = r"(?:(?:bearer|basic|digest|negotiate) +)?"
_FIELD = re.compile(_NAME, re.IGNORECASE)
_URL = re.compile(r'(?<=://)[^\s"<>]+')
_RULES = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL | re.ASCII), shown)
    for pattern, shown in (
        (r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END[A-Z ]{0,40}-----|\Z)", HIDDEN),
        # Headers, with or without a scheme before the secret.
        (
            rf"\b(authorization|x-registry-auth|cookie)(\\*[\"']?\s?[:=]\s?\\*[\"']?){_SCHEME}[^\s\"']+",
            rf"\1\2{HIDDEN}",
        ),
        (r"\b(bearer|basic) +(?!authenti)[\w.~+/=-]{8,}", rf"\1 {HIDDEN}"),
        (r"\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*", HIDDEN),  # a JWT
        # JSON's and Python's fields: docker's auths, answers of token services.
        (
            rf"(?<![\w-])({_NAME})(\\*[\"']\s?:\s?\\*)([\"'])(?:(?!\3|\\+\3).)*",
            rf"\1\2\3{HIDDEN}",
        ),
        (rf"(?<![\w-])({_NAME})(\s?=\s?|%3D)[^\s&\"']+", rf"\1\2{HIDDEN}"),
        # What 'ceph auth print-key' shows.
        (r"(?<![A-Za-z0-9+/])A[Qg][A-Za-z0-9+/]{36,62}={0,2}(?![A-Za-z0-9+/=])", HIDDEN),
    )
]


def text(said: str) -> str:
    """``said`` without its secrets; twice is the same as once."""
    said = _URL.sub(lambda found: _url(found[0]), said)
    for pattern, shown in _RULES:
        said = pattern.sub(shown, said)
    return said


def _url(said: str) -> str:
    """A URL after its scheme: no login, no value of a parameter that is not known as harmless."""
    place, mark, query = re.match(r"([^?#]*)([?#]?)(.*)", said, re.DOTALL).groups()  # type: ignore[union-attr]
    host, slash, path = place.partition("/")
    if "@" in host:
        host = f"{HIDDEN}@{host.rpartition('@')[2]}"
    return host + slash + path + mark + "&".join(map(_parameter, query.split("&") if mark else ()))


def _parameter(said: str) -> str:
    name, equals, _ = said.partition("=")
    if equals and name.lower() in _HARMLESS and "#" not in said:
        return said
    return f"{name}={HIDDEN}" if equals and re.fullmatch(r"[\w.%~-]+", name) else HIDDEN


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
