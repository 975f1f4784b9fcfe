"""The settings file as frozen models. Each room brings its own section; this joins them."""

import ipaddress
from pathlib import Path

from pydantic import Field, field_validator, model_validator

import kit.settings
from cache import settings as cache_settings
from preheat import settings as preheat_settings
from volumes import settings as volumes_settings


class AdminSettings(kit.settings.Section):
    """Where the admin API, the status page and /metrics are served."""

    listen: str = Field(
        default="127.0.0.1:9470",
        description="HOST:PORT. Loopback by default: whoever reaches the API steers the agent.",
    )
    token_file: Path | None = Field(
        default=None,
        description="A file with a bearer token that changing requests must carry. Needed when "
        "listen is not a loopback address. Default none: on loopback, being on the node is enough.",
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


class Settings(kit.settings.Section):
    """The whole file. A section that is absent leaves that part of the agent out."""

    admin: AdminSettings = Field(default_factory=AdminSettings, description="The admin API.")
    state_dir: Path = Field(
        default=Path("/var/lib/nodeagent/state"),
        description="Small state of the agent: locks, source mount points. Survives reboots.",
    )
    cache: cache_settings.CacheSettings | None = Field(
        default=None, description="The dataset cache; absent: no cache on this node."
    )
    volumes: volumes_settings.VolumesSettings | None = Field(
        default=None, description="Volumes kept safe; absent: neither guard nor audit on this node."
    )

    preheat: preheat_settings.PreheatSettings | None = Field(
        default=None, description="Images held ready; absent: none on this node."
    )

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return kit.settings.absolute(value)
