"""Logins for registries: docker's files and programs, and the kubelet's credential plugins.

Secrets are read at each use and kept no longer than a plugin allows. They appear in no log, no
exception and no argument list (a program gets its question on stdin). A source that cannot be used
is told with the answer: only an image that needs it fails.
"""

import asyncio
import base64
import collections
import contextlib
import fnmatch
import json
import os
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cachetools import TLRUCache

import kit.child
import kit.errors
import kit.files
import kit.processes
import kit.slips
from preheat import settings
from preheat.image import manifest
from preheat.registry.failure import Kind, PullError
from preheat.runtimes import base

LARGEST_ANSWER = 1024**2
FILE_SECONDS = 10.0  # to read a file of logins
MOST_CACHED = 256
MOST_TRIED = 8  # logins for one image
ResultT = TypeVar("ResultT")
_REQUEST_KIND = "CredentialProviderRequest"
_NOT_FOUND = b"credentials not found"  # a helper that has none says this and ends with status 1
# What a program answers instead of a user's name when it gives a token.
_TOKEN_USER = "<token>"


class CredentialError(kit.errors.AgentError):
    """A source of credentials that cannot be used."""

    exit_code = 3


# --- which logins are for an image ----------------------------------------------------------------

# As the kubelet decides (pkg/credentialprovider/keyring.go). Pure.
#
# A key is a registry with an optional path; its host may have globs for each label. Several fit:
# all are tried, the most specific first. docker's own key for its hub is Docker Hub.


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

    def troubles_of(self, ref: manifest.Reference) -> list[str]:
        """Why entries for ``ref`` cannot be used."""
        return [f"{key}: {why}" for key, why in self.troubles if matches(key, ref)]


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


def fitting(many: Iterable[Keys], ref: manifest.Reference) -> tuple[base.Login, ...]:
    """Those for ``ref``, the most specific first, each once."""
    entries = [entry for keys in many for entry in keys.entries]
    # In the kubelet's order: from behind, where a longer path comes before a shorter one.
    fitting = sorted({key for key, _ in entries if matches(key, ref)}, reverse=True)
    if not fitting and ref.host in manifest.HUB_HOSTS:
        fitting = [manifest.HUB_INDEX]
    found = [login for key in fitting for each, login in entries if each == key]
    return tuple(dict.fromkeys(found))


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


# --- where they are from --------------------------------------------------------------------------


@dataclass(frozen=True)
class Provider:
    """One plugin of the kubelet's CredentialProviderConfig."""

    name: str
    api_version: str
    matches: tuple[str, ...]  # keys
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = field(repr=False)
    cache_seconds: float
    needs_token: bool  # of a pod's account


@dataclass(frozen=True, repr=False)
class Found:
    """The logins to try for an image, in order; and what kept us from finding more."""

    logins: tuple[base.Login, ...] = ()
    troubles: tuple[str, ...] = ()


def read_providers(data: bytes) -> tuple[Provider, ...]:
    """The plugins in a CredentialProviderConfig. Raises ValueError."""
    content = kit.slips.load_yaml(data)
    listed = content.get("providers") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it has no 'providers'")
    found = []
    for entry in listed:
        name = str(entry.get("name", ""))
        if not _is_file_name(name):
            raise ValueError(f"provider {name!r} is not a file name")
        token = entry.get("tokenAttributes")
        environment = tuple((str(e["name"]), str(e["value"])) for e in entry.get("env") or [])
        found.append(
            Provider(
                name=name,
                api_version=str(entry.get("apiVersion", "")),
                matches=tuple(key_of(str(e)) for e in entry.get("matchImages") or []),
                arguments=tuple(str(each) for each in entry.get("args") or []),
                environment=environment,
                cache_seconds=_go_duration(str(entry.get("defaultCacheDuration", "0"))),
                needs_token=token is not None and token.get("requireServiceAccount") is not False,
            )
        )
    return tuple(found)


def _is_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and text == text.strip()


def _go_duration(text: str) -> float:
    """Seconds of Go's ``12h`` or ``1h30m0s``; an unknown unit counts 0."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    parts = re.findall(r"(\d+(?:\.\d*)?)([^\d.]+)", text)
    return sum(float(number) * units.get(unit, 0.0) for number, unit in parts)


@dataclass(frozen=True, repr=False)
class _Answer:
    seconds: float
    keys: Keys


async def attempt(
    find: Callable[[bool], Awaitable[Found]],
    ask: Callable[[base.Login | None], Awaitable[ResultT]],
) -> tuple[ResultT, base.Login | None]:
    """Ask with each login, then without one: the first answer, and the login that got it.

    When none of the logins is good, plugins are asked for new ones: theirs may have expired since,
    in the middle of a pull too. Raises the PullError of the login that fits best.
    """
    tried: list[base.Login | None] = []
    first: PullError | None = None
    for fresh in (False, True):
        found = await find(fresh)
        for login in (*found.logins[:MOST_TRIED], None):
            if login in tried:
                continue
            tried.append(login)
            try:
                return await ask(login), login
            except PullError as error:
                if error.kind not in (Kind.AUTH, Kind.NOT_FOUND):
                    raise
                first = first or error
        if len(tried) == 1:
            break  # there is nothing that could have expired
    assert first is not None
    if found.troubles:
        cause = first.cause.removeprefix(f"{first.kind}: ")
        raise PullError(first.thing, first.kind, "; ".join([cause, *found.troubles])) from first
    raise first


@contextlib.contextmanager
def _telling(troubles: list[str]) -> Iterator[None]:
    """A source that cannot be used is told, and the others are asked."""
    try:
        yield
    except CredentialError as error:
        troubles.append(str(error))


class Credentials:
    """Finds the logins for an image."""

    def __init__(self) -> None:
        # Answers of plugins by name and what they are good for, each for as long as it says.
        self._cache: TLRUCache[tuple[str, str], _Answer] = TLRUCache(
            MOST_CACHED, ttu=lambda _, answer, now: now + answer.seconds, timer=time.monotonic
        )
        # One question at a time to each plugin: its answer may serve the next image.
        self._asking: dict[str, asyncio.Lock] = collections.defaultdict(asyncio.Lock)

    async def find(
        self,
        ref: manifest.Reference,
        where: settings.CredentialSettings,
        *,
        fresh: bool = False,
    ) -> Found:
        """What all sources have for ``ref``: files, their programs, then the kubelet's plugins.

        ``fresh``: ask plugins again whose answers are kept; they may have been withdrawn.
        """
        sources: list[Keys] = []
        helped: list[base.Login] = []
        plugged: list[Keys] = []
        troubles: list[str] = []
        for file in where.docker_configs:
            with _telling(troubles):
                keys = await self._docker_config(file)
                troubles += [f"{file}: {why}" for why in keys.troubles_of(ref)]
                sources.append(keys)
                login = await self._helped(file, keys.helper(ref), ref, where)
                helped += [login] if login is not None else []
        providers: tuple[Provider, ...] = ()
        with _telling(troubles):
            providers = await self._providers(where)
        for provider in providers:
            if any(matches(each, ref) for each in provider.matches):
                with _telling(troubles):
                    plugged.append(await self._plugged(provider, ref, where, fresh))
        found = [*fitting(sources, ref), *helped, *fitting(plugged, ref)]
        return Found(tuple(dict.fromkeys(found)), tuple(troubles))

    # --- docker -----------------------------------------------------------------------------------

    async def _docker_config(self, file: Path) -> Keys:
        try:
            return from_docker_config(await self._file(file))
        except ValueError as error:
            raise self._unusable(file, str(error)) from None

    async def _helped(
        self,
        file: Path,
        name: str,
        ref: manifest.Reference,
        where: settings.CredentialSettings,
    ) -> base.Login | None:
        """What the program has that the file names for this registry."""
        if not name:
            return None
        program = f"docker-credential-{name}"
        if where.helper_dir is None or not _is_file_name(program):
            why = f"it names {program}, which preheat.credentials.helper_dir does not have"
            raise self._unusable(file, why)
        server = manifest.HUB_LOGIN_KEY if ref.host in manifest.HUB_HOSTS else ref.host
        ended = await self._run(where.helper_dir / program, ["get"], server.encode(), where)
        if ended.code != 0:
            if _NOT_FOUND in ended.out:
                return None
            raise self._failed(program, f"it ended with status {ended.code}")
        try:
            return from_helper(ended.out)
        except ValueError as error:
            raise self._failed(program, str(error)) from None

    # --- the kubelet's plugins --------------------------------------------------------------------

    async def _providers(self, where: settings.CredentialSettings) -> tuple[Provider, ...]:
        if where.provider_config is None or where.provider_dir is None:
            return ()
        try:
            return read_providers(await self._file(where.provider_config))
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise self._unusable(where.provider_config, str(error)[:200]) from None

    async def _plugged(
        self,
        provider: Provider,
        ref: manifest.Reference,
        where: settings.CredentialSettings,
        fresh: bool,
    ) -> Keys:
        if provider.needs_token:
            raise CredentialError(
                f"credential provider {provider.name}",
                "was passed over: it wants the token of a service account (tokenAttributes), and "
                "the agent does not give tokens of pods' accounts",
                "give a login in preheat.credentials.docker_config, or a provider without "
                "tokenAttributes",
            )
        # By cacheKeyType: good for the image, its registry, or everything.
        scopes = {"Image": ref.repository, "Registry": ref.host, "Global": ""}
        async with self._asking[provider.name]:
            for scope in scopes.values():
                known = self._cache.get((provider.name, scope))
                if known is not None:
                    if not fresh:
                        return known.keys
                    del self._cache[provider.name, scope]
            return await self._ask(provider, ref, where, scopes)

    async def _ask(
        self,
        provider: Provider,
        ref: manifest.Reference,
        where: settings.CredentialSettings,
        scopes: dict[str, str],
    ) -> Keys:
        assert where.provider_dir is not None
        image = ref.repository  # without tag, as the kubelet asks
        question: dict[str, Any] = {
            "kind": _REQUEST_KIND,
            "apiVersion": provider.api_version,
            "image": image,
        }
        program, data = where.provider_dir / provider.name, json.dumps(question).encode()
        environment = dict(provider.environment)
        ended = await self._run(program, provider.arguments, data, where, environment)
        if ended.code != 0:
            raise self._failed(provider.name, f"it ended with status {ended.code}")
        answer = self._checked(provider, ended.out)
        auth = answer.get("auth") or {}
        kept = str(answer.get("cacheKeyType", ""))
        if not isinstance(auth, dict) or kept not in scopes:
            raise self._failed(provider.name, f"its answer has the cacheKeyType {kept[:40]!r}")
        keys = from_auths(auth)
        duration = answer.get("cacheDuration")
        seconds = provider.cache_seconds if duration is None else _go_duration(str(duration))
        if seconds > 0:
            self._cache[provider.name, scopes[kept]] = _Answer(seconds, keys)
        return keys

    def _checked(self, provider: Provider, data: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            raise self._failed(provider.name, "its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise self._failed(provider.name, "its answer is not a JSON object")
        if answer.get("kind") != "CredentialProviderResponse":
            raise self._failed(provider.name, "its answer is not a CredentialProviderResponse")
        return answer

    # --- files and programs -----------------------------------------------------------------------

    @staticmethod
    def _unusable(file: Path, why: str) -> CredentialError:
        return CredentialError(
            str(file), f"cannot be used ({why})", "correct it (preheat.credentials)"
        )

    @staticmethod
    def _failed(name: str, why: str) -> CredentialError:
        remedy = "run it yourself with the same question"
        return CredentialError(f"credential provider {name}", why, remedy)

    async def _file(self, file: Path) -> bytes:
        try:
            return await kit.child.read_small(file, kit.files.LARGEST_SMALL, FILE_SECONDS)
        except OSError as error:
            raise self._unusable(file, error.strerror or str(error)) from None
        except kit.processes.DeadlineError as error:
            raise self._unusable(file, error.cause) from None
        except RuntimeError as error:
            raise self._unusable(file, f"a helper process failed: {error}") from None

    async def _run(
        self,
        program: Path,
        arguments: list[str] | tuple[str, ...],
        question: bytes,
        where: settings.CredentialSettings,
        environment: dict[str, str] | None = None,
    ) -> kit.processes.Ended:
        """Ask a program; at the deadline it is killed with its children."""
        try:
            return await kit.processes.run(
                [str(program), *arguments],
                about=f"credential provider {program.name}",
                deadline=where.provider_timeout,
                input=question,
                environment={**os.environ, **(environment or {})},
                largest=LARGEST_ANSWER,
            )
        except OSError as error:
            raise self._failed(program.name, error.strerror or str(error)) from None
        except kit.processes.DeadlineError as error:
            raise self._failed(program.name, error.cause) from None
