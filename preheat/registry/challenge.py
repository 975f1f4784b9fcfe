"""What a registry asks for with 401, and how to answer it: Basic, or a token from its service.

Pure; ``registry`` sends what is made here. Errors are ValueErrors without secrets in them.
"""

import base64
import json
import re
import urllib.parse
from dataclasses import dataclass

from preheat.runtimes import base

_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, repr=False)
class TokenQuestion:
    """A request to a token service: a POST with ``form``, else a GET with ``query``."""

    url: str
    query: dict[str, str]
    headers: dict[str, str]
    form: dict[str, str] | None = None


def basic(login: base.Login) -> str:
    plain = f"{login.username}:{login.password}".encode()
    return "Basic " + base64.b64encode(plain).decode()


def answer(
    challenge: str, path: str, login: base.Login | None, *, encrypted: bool
) -> str | TokenQuestion:
    """The Authorization header, or what to ask the token service. Raises ValueError.

    ``encrypted``: the registry is asked by TLS, so its token service must be, too.
    """
    scheme, _, rest = challenge.partition(" ")
    if scheme.lower() == "basic":
        if login is None or not login.username:
            raise ValueError("it requires a login, but none is configured")
        return basic(login)
    if scheme.lower() != "bearer":
        raise ValueError(f"unknown authentication scheme {scheme[:40]!r}")
    if login is not None and login.registry_token:
        return f"Bearer {login.registry_token}"
    return _question(dict(_PARAMETER.findall(rest)), path, login, encrypted)


def _question(
    asked: dict[str, str], path: str, login: base.Login | None, encrypted: bool
) -> TokenQuestion:
    realm = asked.get("realm", "")
    parts = urllib.parse.urlsplit(realm)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"unusable token service {realm[:80]!r}")
    if login is not None and parts.scheme == "http" and encrypted:
        raise ValueError("its token service uses plain http: no credentials sent")
    query = {"service": asked.get("service", ""), "scope": f"repository:{path}:pull"}
    if login is not None and login.identity_token:
        form = {"grant_type": "refresh_token", "client_id": "nodeagent"}
        return TokenQuestion(
            realm, {}, {}, {**query, **form, "refresh_token": login.identity_token}
        )
    named = login is not None and bool(login.username)
    return TokenQuestion(realm, query, {"Authorization": basic(login)} if named and login else {})


def token(body: bytes) -> str:
    """The header with the token in a service's answer. Raises ValueError."""
    try:
        found = json.loads(body)
        text = found.get("token") or found.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str) or not text:
        raise ValueError("its token service answered without a token")
    return f"Bearer {text}"


def grants(header: str, path: str) -> bool:
    """Whether a Bearer token says of itself that it is good for pulling ``path``."""
    parts = header.removeprefix("Bearer ").split(".")
    if len(parts) != 3:
        return False
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        access = claims["access"]
        return any(each["name"] == path and "pull" in each["actions"] for each in access)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
