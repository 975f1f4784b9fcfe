"""The settings file as frozen models: the process's own settings and one section for each room."""

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import AfterValidator, Field, field_validator, model_validator

import kit.room
import kit.settings
from nodeagent import rooms

LONGEST_SOCKET_PATH = 107  # bytes, of the kernel's sockaddr_un
_REPLACED = {
    "listen": "use admin.metrics (probes, metrics and the status page) and admin.socket (the API)",
    "token_file": "use admin.socket with admin.group, or admin.api with tokens_file",
}


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; ValueError when it is not one."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, like 127.0.0.1:9470 or [::1]:9470")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``. A name other than localhost: False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_and_port(text: str) -> str:
    address(text)
    return text


HostPort = Annotated[str, AfterValidator(_host_and_port)]


class ApiSettings(kit.settings.Section):
    """The admin API over TCP."""

    listen: HostPort
    """HOST:PORT."""
    cert_file: kit.settings.AbsolutePath
    """Certificate chain, PEM. Read again when it changes."""
    key_file: kit.settings.AbsolutePath
    """Private key, PEM. Read again when it changes."""
    tokens_file: kit.settings.AbsolutePath
    """YAML, read again when it changes: `NAME: {token: TEXT, role: ROLE}`, or `sha256: HEX` instead
    of `token`. Roles: read, operate, dangerous."""


class AdminSettings(kit.settings.Section):
    """Where the agent listens, and who may do what (docs/security.md)."""

    socket: kit.settings.AbsolutePath = Path("/run/nodeagent/admin.sock")
    """Unix socket of the admin API, for root alone unless `group` is set. The command line uses
    it."""
    group: str | None = None
    """Group of this host whose members may use the socket too."""
    group_role: kit.room.Role = kit.room.Role.OPERATE
    """What members of `group` may do: read, operate or dangerous. Root may do all."""
    metrics: HostPort | None = "127.0.0.1:9470"
    """HOST:PORT of /metrics, /healthz and /readyz, and on a loopback address of the status page.
    Needs no login; changes nothing. null: off."""
    names: tuple[str, ...] = ()
    """Host names under which clients ask the TCP listeners, besides their own address. A request
    for another name is refused (DNS rebinding)."""
    api: ApiSettings | None = None
    """The admin API over TCP, with TLS and tokens. Off when absent."""

    @model_validator(mode="before")
    @classmethod
    def _name_successors(cls, given: Any) -> Any:
        for name in _REPLACED.keys() & (given if isinstance(given, dict) else {}):
            raise ValueError(f"admin.{name} does not exist any more; {_REPLACED[name]}")
        return given

    @field_validator("socket")
    @classmethod
    def _fits(cls, path: Path) -> Path:
        if len(bytes(path)) > LONGEST_SOCKET_PATH:
            raise ValueError(f"a socket's path has at most {LONGEST_SOCKET_PATH} bytes")
        return path


class Process(kit.settings.Section):
    """What the process itself needs."""

    admin: AdminSettings = AdminSettings()
    """The admin API, metrics and the status page."""
    state_dir: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/state")
    """Small files of the agent: lock, journals, mount points of sources. Must survive reboots."""


if TYPE_CHECKING:

    class Settings(Process):
        """The whole file; a room's section is the attribute of its name, None when absent."""

        def __getattr__(self, name: str) -> Any: ...

else:
    # pydantic makes the model from the registry: a room's section exists because the room does.
    Settings = pydantic.create_model(
        "Settings",
        __base__=Process,
        __doc__="The whole file. A section that is absent leaves that room out of the agent.",
        **{
            room.name: (room.settings | None, Field(default=None, description=room.summary))
            for room in rooms.ROOMS
        },
    )
