"""The settings file as frozen models: the process's own settings and one section for each room."""

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

import kit.room
import kit.settings
import kit.units
import kube.settings
from kube.settings import RoomSettings
from nodeagent import rooms

LONGEST_SOCKET_PATH = 107  # bytes, of the kernel's sockaddr_un
_node_name = kit.settings.matching(
    r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
    "a node's name: use lower-case letters, digits, '-' and '.'",
)


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; ValueError when it is not one."""
    host, colon, digits = text.rpartition(":")
    port = kit.units.parse_count(digits, 65535)
    if not colon or not host or port is None:
        raise ValueError(f"{text!r} is not HOST:PORT, like 127.0.0.1:9470 or [::1]:9470")
    return host.strip("[]"), port


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


def _as_text(value: object) -> object:
    """A port alone is a number; what it lacks is the host, not quotes."""
    return str(value) if isinstance(value, int) else value


HostPort = Annotated[str, BeforeValidator(_as_text), AfterValidator(_host_and_port)]


class ReviewSettings(kit.settings.Section):
    """The cluster's API server (`kubernetes`) is asked who a token belongs to and what its owner
    may do. The agent's account there may create TokenReviews and SubjectAccessReviews."""

    audiences: tuple[str, ...] = ()
    """A token must be meant for one of these. Default: for the API server itself."""


class ApiSettings(kit.settings.Section):
    """The admin API over TCP."""

    listen: HostPort
    """HOST:PORT."""
    cert_file: kit.settings.AbsolutePath
    """Certificate chain, PEM. Read again when it changes."""
    key_file: kit.settings.AbsolutePath
    """Private key, PEM. Read again when it changes."""
    tokens_file: kit.settings.AbsolutePath | None = None
    """YAML, read again when it changes: `NAME: {token: TEXT, role: ROLE}`, or `sha256: HEX` instead
    of `token`. Roles: read, operate, dangerous."""
    kubernetes: ReviewSettings | None = None
    """Ask the cluster's API server about tokens that are not in `tokens_file`. `{}` inside a
    cluster. Off when absent."""

    @model_validator(mode="after")
    def _some_callers(self) -> "ApiSettings":
        if self.tokens_file is None and self.kubernetes is None:
            raise ValueError("needs tokens_file or kubernetes, or nobody could call")
        return self


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

    @field_validator("socket")
    @classmethod
    def _fits(cls, path: Path) -> Path:
        if len(bytes(path)) > LONGEST_SOCKET_PATH:
            raise ValueError(f"a socket's path has at most {LONGEST_SOCKET_PATH} bytes")
        return path


class ClusterSettings(kube.settings.AccessSettings):
    """The cluster's API server, and what the agent does there: objects CachedDataset and ImageSet
    add to this file, and the node's own object, Events and conditions say what the agent holds and
    finds (docs/kubernetes.md)."""

    objects: bool = True
    """false: no objects are taken, and nothing is reported. The server is then asked about
    PersistentVolumes and about callers alone, where `volumes` and `admin.api` want it."""
    namespace: str | None = None
    """Where Secrets of datasets and the agents' Lease are. Default: that of the agent's account."""
    interval: kit.units.Seconds = Field(default=10.0, ge=1, le=600)
    """Least time between two writes of the node's object."""
    drop_after: kit.units.Seconds = Field(default=3600.0, ge=0, le=30 * 86400)
    """How long an object stays in force that is missing although nobody was seen to delete it, or
    whose nodeSelector fits no longer: another etcd or a lost label empties no node. What kubectl
    deletes ends at once."""
    conditions: bool = True
    """Write the conditions StorageHazard and CacheDegraded of the Node, and Events."""
    labels: int = Field(default=50, ge=0, le=200)
    """Most labels dataset.nodeagent.io/NAME of the Node, which say what is complete on it. 0: none.
    Everybody who watches Nodes gets them."""

    @property
    def own_namespace(self) -> str:
        if self.namespace is not None:
            return self.namespace
        try:
            return kube.settings.NAMESPACE_FILE.read_text(encoding="ascii").strip()
        except OSError:
            return "nodeagent"


class Process(kit.settings.Section):
    """What the process itself needs."""

    admin: AdminSettings = AdminSettings()
    """The admin API, metrics and the status page."""
    node: Annotated[str, AfterValidator(_node_name)] | None = None
    """The node's name in the cluster. Default: $NODE_NAME, or the host's."""
    kubelet: kube.settings.KubeletSettings = kube.settings.KubeletSettings()
    """This node's kubelet."""
    kubernetes: ClusterSettings | None = None
    """Take datasets and images from objects of the cluster too, and report there. `{}` inside a
    cluster. Absent: neither; a pod's own account is used where `volumes` and `admin.api` ask."""
    state_dir: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/state")
    """Small files of the agent: lock, journals, mount points of sources. Must survive reboots."""

    @property
    def this_node(self) -> kube.settings.ThisNode:
        """What the rooms' sections get of it."""
        return _this_node(vars(self))

    def room(self, room: kit.room.Room) -> kube.settings.RoomSettings:
        """The section of a room, by default where it is absent."""
        section = getattr(self, room.name)
        return section or cast(RoomSettings, room.settings()).at(self.this_node)

    def placed(self) -> Self:
        """With sections that all have this node."""
        named = {room.name: getattr(self, room.name) for room in rooms.ROOMS}
        here = self.this_node
        return self.model_copy(update={n: s.at(here) for n, s in named.items() if s is not None})


def _this_node(fields: Mapping[str, Any]) -> kube.settings.ThisNode:
    access = kube.settings.AccessSettings
    asked = fields["kubernetes"] or access()
    given = {
        "kubelet": fields["kubelet"],
        "cluster": access(**{n: getattr(asked, n) for n in access.model_fields}),
    }
    return kube.settings.ThisNode(**given, **({"name": fields["node"]} if fields["node"] else {}))


def _place(
    section: kube.settings.RoomSettings | None, info: pydantic.ValidationInfo
) -> kube.settings.RoomSettings | None:
    """A room's section with what the file says once for all rooms."""
    if section is None or not {"node", "kubelet", "kubernetes"} <= info.data.keys():
        return section  # or there are mistakes anyway
    return section.at(_this_node(info.data)).fit()


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
        __validators__={"place": field_validator(*(room.name for room in rooms.ROOMS))(_place)},
        **{
            room.name: (room.settings | None, Field(default=None, description=room.summary))
            for room in rooms.ROOMS
        },
    )
