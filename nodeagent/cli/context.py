"""What every command gets: where the settings are and which agent to talk to."""

from dataclasses import dataclass
from pathlib import Path

from nodeagent import client, configfile


@dataclass(frozen=True)
class Context:
    config: Path
    api: str | None

    def client(self) -> client.Client:
        """A client of the agent; SettingsError when nothing says where it is."""
        if self.api is not None:
            return client.Client(self.api, token_file=None)
        admin = configfile.load(self.config).admin
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
        url = f"http://[{host}]:{admin.port}" if ":" in host else f"http://{host}:{admin.port}"
        return client.Client(url, token_file=admin.token_file)
