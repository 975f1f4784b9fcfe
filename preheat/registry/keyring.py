"""Which logins are for an image, as the kubelet decides (pkg/credentialprovider/keyring.go). Pure.

A key is a registry with an optional path; its host may have globs for each label. Several fit: all
are tried, the most specific first. docker's own key for its hub is Docker Hub.
"""

import base64
import fnmatch
import json
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from preheat.image import manifest
from preheat.runtimes import base

# What a program answers instead of a user's name when it gives a token.
_TOKEN_USER = "<token>"


@dataclass(frozen=True, repr=False)
class Keys:
    """The logins of one source by key, and why entries of it cannot be used."""

    entries: tuple[tuple[str, base.Login], ...] = ()
    troubles: tuple[tuple[str, str], ...] = ()  # key, why
    helpers: tuple[tuple[str, str], ...] = ()  # host, program: docker-credential-<program>
    store: str = ""  # the program for all other hosts

    def helper(self, ref: manifest.Reference) -> str:
        """The program that docker would ask for ``ref``; empty without one."""
        for host, name in self.helpers:
            key = key_of(host)
            if key == ref.host or (key in manifest.HUB_HOSTS and ref.host in manifest.HUB_HOSTS):
                return name
        return self.store


def key_of(location: str) -> str:
    """A key without scheme and API version."""
    text = location if "://" in location else f"https://{location}"
    parts = urllib.parse.urlsplit(text)
    path = parts.path
    if path.startswith(("/v1/", "/v2/")):
        path = path[3:]
    return parts.netloc + ("" if path == "/" else path)


def matches(key: str, ref: manifest.Reference) -> bool:
    """Equal ports, as many labels, each label by its glob, and the path is a plain prefix."""
    host, slash, path = key.partition("/")
    try:
        mine, theirs = urllib.parse.urlsplit(f"//{ref.host}"), urllib.parse.urlsplit(f"//{host}")
        if mine.port != theirs.port:
            return False
    except ValueError:  # a port that is no number, a bracket without its other one
        return False
    names = (mine.hostname or "").split(".")
    globs = (theirs.hostname or "").split(".")
    if len(names) != len(globs) or not f"/{ref.path}".startswith(slash + path):
        return False
    return all(fnmatch.fnmatchcase(n, g) for n, g in zip(names, globs, strict=True))


def logins(many: Iterable[Keys], ref: manifest.Reference) -> tuple[base.Login, ...]:
    """Those for ``ref``, the most specific first, each once."""
    entries = [entry for keys in many for entry in keys.entries]
    # In the kubelet's order: from behind, where a longer path comes before a shorter one.
    fitting = sorted({key for key, _ in entries if matches(key, ref)}, reverse=True)
    if not fitting and ref.host in manifest.HUB_HOSTS:
        fitting = [manifest.HUB_INDEX]
    found = [login for key in fitting for each, login in entries if each == key]
    return tuple(dict.fromkeys(found))


def troubles(keys: Keys, ref: manifest.Reference) -> list[str]:
    """Why entries for ``ref`` cannot be used."""
    return [f"{key}: {why}" for key, why in keys.troubles if matches(key, ref)]


def from_docker_config(data: bytes) -> Keys:
    """A dockerconfigjson, or the older .dockercfg without ``auths``. Raises ValueError."""
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    helpers = content.get("credHelpers") or {}
    store = content.get("credsStore") or ""
    auths = content.get("auths")
    if auths is None and not helpers and not store:
        auths = content
    auths = auths or {}
    if not isinstance(auths, dict) or not isinstance(helpers, dict) or not isinstance(store, str):
        raise ValueError("its 'auths' are not by registry")
    keys = from_auths(auths)
    named = tuple((str(host), str(name)) for host, name in helpers.items())
    return Keys(keys.entries, keys.troubles, named, store)


def from_auths(auths: Mapping[str, Any]) -> Keys:
    """Entries by location; one that cannot be used harms no other."""
    entries, bad = [], []
    for location, entry in auths.items():
        try:
            key = key_of(location)
            login = _login(entry)
        except ValueError as error:
            bad.append((location.removeprefix("https://"), str(error)))
            continue
        if login is not None:
            entries.append((key, login))
    return Keys(tuple(entries), tuple(bad))


def _login(entry: Any) -> base.Login | None:
    """None for an empty entry, as ``docker login`` leaves them beside a credsStore."""
    if not isinstance(entry, dict):
        raise ValueError("its entry is not a JSON object")
    username, password = str(entry.get("username", "")), str(entry.get("password", ""))
    if isinstance(entry.get("auth"), str) and entry["auth"]:
        text = entry["auth"].strip()
        try:
            plain = base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode()
        except ValueError:
            raise ValueError("its 'auth' is not base64") from None
        username, colon, password = plain.partition(":")
        if not colon:
            raise ValueError("its 'auth' is not NAME:PASSWORD")
    found = base.Login(
        username=username,
        password=password.rstrip("\0"),
        identity_token=str(entry.get("identitytoken") or ""),
        registry_token=str(entry.get("registrytoken") or ""),
    )
    return None if found == base.Login() else found


def from_helper(data: bytes) -> base.Login:
    """What ``docker-credential-* get`` answers. Raises ValueError."""
    try:
        content = json.loads(data)
        username, secret = content["Username"], content["Secret"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("its answer is not a login") from None
    if username == _TOKEN_USER:
        return base.Login(identity_token=str(secret))
    return base.Login(username=str(username), password=str(secret))
