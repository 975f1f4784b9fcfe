"""How settings name a Ceph cluster: its monitors, a user and the user's key.

Every room that reaches a cluster uses these types, so that an operator learns them once.
"""

from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, model_validator

import kit.settings

_address = kit.settings.matching(r"[\w.:,\[\]/-]+", "a monitor address, like 10.0.0.1:6789")


def _user(name: str) -> str:
    return kit.settings.word(name).removeprefix("client.")


Monitors = tuple[Annotated[str, AfterValidator(_address)], ...]
User = Annotated[str, AfterValidator(_user)]
USER = "nodeagent"  # unless settings name one; never admin, whose key would be on every node

# What settings say of these fields.
MONITORS = "HOST:PORT of each monitor, or [v2:HOST:PORT,v1:HOST:PORT]."
SECRET_FILE = "Key of the user: bare secret or keyring file."


class ClusterSettings(kit.settings.Section):
    """One Ceph cluster, and a user of it."""

    name: kit.settings.Word = Field(max_length=63)
    """Name of the cluster in findings."""
    monitors: Monitors = Field(default=(), description=MONITORS)
    conf: kit.settings.AbsolutePath | None = None
    """A ceph.conf, instead of `monitors`."""
    user: User = USER
    """cephx user without 'client.'. Caps: mon 'profile rbd', osd 'profile rbd'. With osd 'profile
    rbd-read-only', the agent keeps the ledger only on this node."""
    secret_file: kit.settings.AbsolutePath | None = Field(
        default=None, description=f"{SECRET_FILE} Default: the keyring in `conf`."
    )

    @model_validator(mode="after")
    def _reachable(self) -> "ClusterSettings":
        if (self.conf is None) == (not self.monitors):
            raise ValueError("give either 'monitors' or 'conf'")
        if self.conf is None and self.secret_file is None:
            raise ValueError("'monitors' need a 'secret_file'")
        return self


ClusterT = TypeVar("ClusterT", bound=ClusterSettings)


def unique(clusters: tuple[ClusterT, ...]) -> tuple[ClusterT, ...]:
    """``clusters`` when each has a name of its own, else ValueError."""
    for number, name in kit.settings.again(cluster.name for cluster in clusters):
        raise kit.settings.misplaced(
            f"cluster {name!r} is there twice; names are unique", number, "name"
        )
    return clusters
