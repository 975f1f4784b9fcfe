"""Logins for registries: dockerconfigjson files and the kubelet's credential provider plugins.

Secrets are read at each use and kept no longer than a plugin allows. They appear in no log, no
exception and no argument list (a plugin gets its question on stdin).
"""

import asyncio
import base64
import fnmatch
import json
import os
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cachetools import TLRUCache

import kit.errors
import kit.processes
from preheat import manifest, settings
from preheat.runtimes import base

LARGEST_ANSWER = 1024**2
MOST_CACHED = 256
_REQUEST_KIND = "CredentialProviderRequest"


class CredentialError(kit.errors.AgentError):
    """A source of credentials that cannot be used."""

    exit_code = 3


@dataclass(frozen=True)
class Provider:
    """One plugin of the kubelet's CredentialProviderConfig."""

    name: str
    api_version: str
    matches: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    cache_seconds: float


def matches(pattern: str, ref: manifest.Reference) -> bool:
    """``*`` stands for a label of the host, ports are equal, the path is a prefix by its parts.

    The kubelet compares paths letter by letter: for it ``team`` is a prefix of ``teammate``.
    """
    pattern = pattern.removeprefix("https://").removeprefix("http://").rstrip("/")
    host, _, path = pattern.partition("/")
    path = path.removeprefix("v1").removeprefix("v2").strip("/")
    mine, theirs = urllib.parse.urlsplit(f"//{ref.host}"), urllib.parse.urlsplit(f"//{host}")
    if mine.port != theirs.port:
        return False
    names = (mine.hostname or "").split(".")
    globs = (theirs.hostname or "").split(".")
    if len(names) != len(globs):
        return False
    if not all(fnmatch.fnmatchcase(n, g) for n, g in zip(names, globs, strict=True)):
        return False
    return not path or ref.path == path or ref.path.startswith(f"{path}/")


def _best(entries: Mapping[str, Any], ref: manifest.Reference) -> Any:
    """The most specific entry, as the kubelet picks it."""
    fitting = [key for key in entries if matches(key, ref)]
    return entries[max(fitting, key=lambda key: (len(key), key))] if fitting else None


def from_docker_config(data: bytes, ref: manifest.Reference) -> base.Login | None:
    """The login for ``ref`` in a dockerconfigjson. Raises ValueError."""
    content = json.loads(data)
    auths = content.get("auths") if isinstance(content, dict) else None
    if not isinstance(auths, dict):
        raise ValueError("it has no 'auths'")
    entry = _best(auths, ref)
    if not isinstance(entry, dict):
        return None
    username, password = str(entry.get("username", "")), str(entry.get("password", ""))
    if not username and isinstance(entry.get("auth"), str) and entry["auth"]:
        try:
            plain = base64.b64decode(entry["auth"], validate=True).decode()
        except ValueError:
            raise ValueError("an 'auth' that is not base64") from None
        username, _, password = plain.partition(":")
    return base.Login(
        username=username,
        password=password.rstrip("\0"),
        identity_token=str(entry.get("identitytoken", "")),
        registry_token=str(entry.get("registrytoken", "")),
    )


def read_providers(data: bytes) -> tuple[Provider, ...]:
    """The plugins in a CredentialProviderConfig. Raises ValueError."""
    content = yaml.safe_load(data)
    listed = content.get("providers") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it has no 'providers'")
    found = []
    for entry in listed:
        name = str(entry.get("name", ""))
        if not name or "/" in name or name in (".", "..") or name != name.strip():
            raise ValueError(f"provider {name!r} is not a file name")
        environment = tuple((str(e["name"]), str(e["value"])) for e in entry.get("env") or [])
        found.append(
            Provider(
                name=name,
                api_version=str(entry.get("apiVersion", "")),
                matches=tuple(str(each) for each in entry.get("matchImages") or []),
                arguments=tuple(str(each) for each in entry.get("args") or []),
                environment=environment,
                cache_seconds=_go_duration(str(entry.get("defaultCacheDuration", "0"))),
            )
        )
    return tuple(found)


def _go_duration(text: str) -> float:
    """Seconds of Go's ``12h`` or ``1h30m0s``; an unknown unit counts 0."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    parts = re.findall(r"(\d+(?:\.\d*)?)([^\d.]+)", text)
    return sum(float(number) * units.get(unit, 0.0) for number, unit in parts)


@dataclass(frozen=True)
class _Answer:
    seconds: float
    login: base.Login | None


class Credentials:
    """Finds the login for an image."""

    def __init__(self) -> None:
        # Answers of plugins, each for as long as its plugin allows.
        self._cache: TLRUCache[tuple[str, str], _Answer] = TLRUCache(
            MOST_CACHED, ttu=lambda _, answer, now: now + answer.seconds, timer=time.monotonic
        )

    async def login(
        self, ref: manifest.Reference, where: settings.CredentialSettings
    ) -> base.Login | None:
        """None when no source has one. Raises CredentialError for a source that cannot be used."""
        if where.docker_config is not None:
            data = await self._file(where.docker_config)
            try:
                found = from_docker_config(data, ref)
            except (ValueError, AttributeError) as error:
                raise self._unusable(where.docker_config, str(error)) from None
            if found is not None:
                return found
        if where.provider_config is None or where.provider_dir is None:
            return None
        try:
            providers = read_providers(await self._file(where.provider_config))
        except (ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
            raise self._unusable(where.provider_config, str(error)[:200]) from None
        for provider in providers:
            if any(matches(pattern, ref) for pattern in provider.matches):
                found = await self._ask(provider, ref, where)
                if found is not None:
                    return found
        return None

    @staticmethod
    def _unusable(file: Path, why: str) -> CredentialError:
        return CredentialError(
            str(file), f"cannot be used ({why})", "correct it (preheat.credentials)"
        )

    async def _file(self, file: Path) -> bytes:
        try:
            return await asyncio.to_thread(file.read_bytes)
        except OSError as error:
            raise self._unusable(file, error.strerror or str(error)) from None

    async def _ask(
        self, provider: Provider, ref: manifest.Reference, where: settings.CredentialSettings
    ) -> base.Login | None:
        key = (provider.name, ref.repository)
        known = self._cache.get(key)
        if known is not None:
            return known.login
        answer = await self._run(provider, ref, where)
        if answer.get("kind") != "CredentialProviderResponse":
            raise self._failed(provider, "its answer is not a CredentialProviderResponse")
        auth = answer.get("auth") or {}
        entry = _best(auth, ref) if isinstance(auth, dict) else None
        login = None
        if isinstance(entry, dict):
            login = base.Login(
                username=str(entry.get("username", "")),
                password=str(entry.get("password", "")),
            )
        duration = answer.get("cacheDuration")
        seconds = provider.cache_seconds if duration is None else _go_duration(str(duration))
        if seconds > 0:
            self._cache[key] = _Answer(seconds, login)
        return login

    @staticmethod
    def _failed(provider: Provider, why: str) -> CredentialError:
        return CredentialError(
            f"credential provider {provider.name}", why, "run it yourself with the same question"
        )

    async def _run(
        self, provider: Provider, ref: manifest.Reference, where: settings.CredentialSettings
    ) -> dict[str, Any]:
        """Ask the plugin; at the deadline it is killed with its children."""
        assert where.provider_dir is not None
        question = {"kind": _REQUEST_KIND, "apiVersion": provider.api_version, "image": ref.text}
        try:
            ended = await kit.processes.run(
                [str(where.provider_dir / provider.name), *provider.arguments],
                about=f"credential provider {provider.name}",
                deadline=where.provider_timeout,
                input=json.dumps(question).encode(),
                environment={**os.environ, **dict(provider.environment)},
                largest=LARGEST_ANSWER,
            )
        except OSError as error:
            raise self._failed(provider, error.strerror or str(error)) from None
        except kit.processes.DeadlineError as error:
            raise self._failed(provider, error.cause) from None
        if ended.code != 0:
            raise self._failed(provider, f"it ended with status {ended.code}")
        try:
            answer = json.loads(ended.out)
        except ValueError:
            raise self._failed(provider, "its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise self._failed(provider, "its answer is not a JSON object")
        return answer
