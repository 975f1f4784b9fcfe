"""The settings file as frozen models: the process's own settings and one section for each room."""

import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic import Field, field_validator, model_validator

import kit.settings
from nodeagent import rooms


class AdminSettings(kit.settings.Section):
    """Where the admin API, the status page and /metrics are served."""

    listen: str = Field(
        default="127.0.0.1:9470",
        description="HOST:PORT. Loopback by default: who reaches the API controls the agent.",
    )
    token_file: Path | None = Field(
        default=None,
        description="File with the bearer token that requests need unless they only read. Required "
        "when 'listen' is not a loopback address. Without it everybody on the node may change "
        "things.",
    )

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"{value!r} is not HOST:PORT, like 127.0.0.1:9470 or [::1]:9470")
        return value

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> "AdminSettings":
        if not self.is_loopback and self.token_file is None:
            raise ValueError(
                f"{self.listen} can be reached from other machines; set token_file, "
                "or listen on 127.0.0.1"
            )
        return self


class Process(kit.settings.Section):
    """What the process itself needs."""

    admin: AdminSettings = Field(
        default_factory=AdminSettings, description="The admin API and the status page."
    )
    state_dir: kit.settings.AbsolutePath = Field(
        default=Path("/var/lib/nodeagent/state"),
        description="Small files of the agent: lock, journals, mount points of sources. "
        "Must survive reboots.",
    )


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
