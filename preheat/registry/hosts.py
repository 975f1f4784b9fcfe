"""Which servers containerd asks for a registry's images, and how: its hosts.toml directories.

Read as containerd 2 reads them (core/remotes/docker/config/hosts.go): the first directory that
exists of HOST_PORT_, HOST:PORT and _default, in the first of several roots that has one; in it
hosts.toml, or certificates in Docker's layout. ``dial_timeout`` is not used: the agent has its own
deadline.
"""

import dataclasses
import os
import re
import ssl
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit.files
import kit.slips
from preheat.image import manifest

_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::(\d+))?")
_DOCKER_HUB = {manifest.HUB: manifest.HUB_SERVER}
_ABILITIES = frozenset({"pull", "resolve", "push"})


@dataclass(frozen=True)
class Host:
    """One server to ask for a registry's images."""

    url: str  # with scheme and path: .../v2, or what override_path says
    namespace: str = ""  # what a mirror gets as ?ns=: the registry that is meant
    cas: tuple[str, ...] = ()  # trusted beside the system's
    clients: tuple[tuple[str, str], ...] = ()  # client certificate and key; "": in one file
    verify: bool = True
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    abilities: frozenset[str] = _ABILITIES
    origin: bool = False  # the registry's own server, or what hosts.toml calls ``server``

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.cas, *(file for pair in self.clients for file in pair if file))


def roots(config_path: str) -> tuple[Path, ...]:
    """The directories of containerd's ``config_path``, which separates several with ``:``."""
    return tuple(Path(each) for each in config_path.split(":") if each)


def of(directories: Iterable[Path], name: str) -> list[Host]:
    """The servers for registry ``name`` in the order of its hosts.toml, its own server last.

    Blocking (small files). Raises ValueError for what cannot be read or is not understood.
    """
    folder = _folder(directories, name)
    if folder is None:
        return [_own(name, {}, Path())]
    file = folder / "hosts.toml"
    try:
        text = kit.files.read_small(file).decode("utf-8")
        content = kit.slips.load_toml(text)
    except FileNotFoundError:
        text, content = "", {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    try:
        return _listed(content, name, folder) if text else [_from_certificates(folder, name)]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error


def _folder(directories: Iterable[Path], name: str) -> Path | None:
    host, colon, port = name.rpartition(":")
    names = [name, "_default"] if not colon or name.endswith("]") else [f"{host}_{port}_"]
    if names[-1] != "_default":
        names += [name, "_default"]
    for root in directories:
        for each in names:
            if os.path.exists(root / each):
                return root / each
    return None


def _own(name: str, table: Mapping[str, Any], folder: Path) -> Host:
    """The registry's own server when hosts.toml names none."""
    local = _LOOPBACK.fullmatch(name)
    plain = local is not None and local[2] not in (None, "443")
    url = f"{'http' if plain else 'https'}://{_DOCKER_HUB.get(name, name)}"
    made = _host(url, {**table, "override_path": False, "capabilities": []}, name, folder)
    verify = made.verify and local is None
    return dataclasses.replace(made, origin=True, verify=verify)


def _listed(content: Mapping[str, Any], name: str, folder: Path) -> list[Host]:
    tables = content.get("host", {})
    if not isinstance(tables, dict):
        raise ValueError("[host] is not a table")
    found = [_host(str(url), table, name, folder) for url, table in tables.items()]
    server = content.get("server", "")
    last = _host(str(server), content, name, folder) if server else _own(name, content, folder)
    for index, each in enumerate(found):
        if dataclasses.replace(each, abilities=last.abilities, origin=last.origin) == last:
            found[index] = dataclasses.replace(each, origin=True)  # asked once is enough
            return found
    return [*found, dataclasses.replace(last, origin=True)]


def _host(url: str, table: Mapping[str, Any], name: str, folder: Path) -> Host:
    url = url if url.startswith("http") else f"https://{url}"
    parts = urllib.parse.urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url!r} names no server")
    path = os.path.normpath(parts.path) if parts.path else ""
    path = "" if path == "/" else path
    if not path.endswith("/v2") and not table.get("override_path", False):
        path += "/v2"
    abilities = frozenset(str(each).lower() for each in table.get("capabilities") or _ABILITIES)
    if not abilities <= _ABILITIES:
        raise ValueError(f"unknown capability {', '.join(sorted(abilities - _ABILITIES))}")
    server = parts.netloc.rpartition("@")[2]
    return Host(
        url=f"{parts.scheme}://{server}{path}",
        namespace="" if server in (name, _DOCKER_HUB.get(name)) else name,
        cas=tuple(_paths(table.get("ca"), "ca", folder)),
        clients=tuple(_pairs(table.get("client"), folder)),
        verify=not table.get("skip_verify", False),
        headers=tuple(_headers(table.get("header") or {})),
        abilities=abilities,
    )


def _paths(value: Any, what: str, folder: Path) -> Iterator[str]:
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if not isinstance(each, str):
            raise ValueError(f"{what} is neither a file nor a list of files")
        yield str(folder / each)


def _pairs(value: Any, folder: Path) -> Iterator[tuple[str, str]]:
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        files = list(_paths(each, "client", folder))
        if len(files) not in (1, 2) or (isinstance(each, list) and len(files) != 2):
            raise ValueError("client is not a pair of certificate and key")
        yield files[0], files[1] if len(files) == 2 else ""


def _headers(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, str):
                raise ValueError(f"header {key} is not text")
            yield key, each


def _from_certificates(folder: Path, name: str) -> Host:
    """Docker's layout: *.crt are CAs, *.cert with *.key are client certificates."""
    files = sorted(each for each in folder.iterdir() if each.is_file())
    clients = []
    for each in files:
        if each.suffix == ".cert":
            key = each.with_suffix(".key")
            clients.append((str(each), str(key) if key.exists() else ""))
    cas = tuple(str(each) for each in files if each.suffix == ".crt")
    return dataclasses.replace(_own(name, {}, folder), cas=cas, clients=tuple(clients))


# --- TLS ------------------------------------------------------------------------------------------

# What TLS with one server depends on: the host's part, and the state of each file.
Seen = tuple[tuple[str, int, int, int], ...]


def seen(host: Host) -> Seen:
    """The state of the files that TLS with ``host`` depends on, the system's CAs too. Blocking."""
    paths = ssl.get_default_verify_paths()
    system = [each for each in (paths.cafile, paths.capath) if each]
    found = []
    for file in (*host.files, *system):
        try:
            state = os.stat(file)
            found.append((file, state.st_mtime_ns, state.st_size, state.st_ino))
        except OSError:
            found.append((file, 0, 0, 0))
    return tuple(found)


def context(host: Host) -> ssl.SSLContext:
    """TLS as containerd does it: private CAs beside the system's. Blocking. Raises ValueError."""
    made = ssl.create_default_context()
    # As Go checks: any certificate among the CAs is trusted, and old private CAs lack what the
    # strict mode of newer Pythons asks for.
    made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    made.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        for ca in host.cas:
            file = ca
            with kit.files.small(ca) as shown:
                made.load_verify_locations(cafile=shown)
        for certificate, key in host.clients:
            file = certificate
            with kit.files.small(certificate) as shown, kit.files.small(key or certificate) as own:
                made.load_cert_chain(shown, own)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{file}: {error.strerror or error}") from error
    if not host.verify:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    return made
