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
from nodeagent import SOCKET, rooms

LONGEST_SOCKET_PATH = 107  # bytes, of the kernel's sockaddr_un
_NO_LAYOUTS = (
    "push images to a registry or to a mirror that hosts_dir names, or import them on the node "
    "('ctr -n k8s.io images import FILE') and list them under preheat.images"
)
_REPAIR = (
    "use volumes.repair, which takes broken mappings away; a mapping that is only idle, and of "
    "which kubelet has no record: 'rbd unmap'"
)
_CONTAINERD = "the runtime is containerd; on CRI-O (OpenShift) use a PinnedImageSet"
_NO_TOKENS = (
    "the agent does not give tokens of pods' accounts: name a login in docker_config, or a "
    "provider without tokenAttributes"
)
_NOT_READ_ONLY = "use volumes.guard (enforce refuses formats) and volumes.repair (broken mappings)"
_KUBELET = "name the kubelet once for all: the section kubelet at the top of the file"
_CLUSTER = "use the section kubernetes at the top of the file (objects: false: for questions alone)"
_NODE = "name the node once for all: node at the top of the file"
_FIXED = "delete it: the agent's own value counts (tell us when it does not fit to your nodes)"
_ACCESS = "server ca_file token_file kubeconfig"
# Settings that went, and what to do instead. Older files still have them: each is refused by name.
# (what to do, the section, names in it)
_GONE = (
    ("use admin.metrics (probes, metrics and the status page) and admin.socket", "admin", "listen"),
    ("use admin.socket with admin.group, or admin.api with tokens_file", "admin", "token_file"),
    (_CLUSTER, "admin.api.kubernetes", _ACCESS),
    (_NODE, "admin.api.kubernetes", "node"),
    ("delete it: without hints a first epoch finds more files in the store", "cache", "hints"),
    (_FIXED, "cache", "follow_interval refresh_interval source_check source_timeout"),
    (_FIXED, "cache", "compare.entries csi.wait scrub.crash_bytes_per_second"),
    (_KUBELET, "cache", "csi.kubelet kubelet"),
    ("name the kubelet's file: kubelet.config", "kubelet", "api gc_high gc_low eviction_free"),
    (_NODE, "kubernetes", "node"),
    (
        "let containerd 2.1 or newer fetch in parallel: its setting concurrent_layer_fetch_buffer",
        *("preheat", "connections"),
    ),
    (_CONTAINERD, "preheat", "crio runtime"),
    (_NO_LAYOUTS, "preheat", "datasets images.source"),
    (_NO_TOKENS, "preheat", "credentials.service_account"),
    (_FIXED, "preheat", "attempt_timeout credentials.provider_timeout heal partial_keep"),
    (_FIXED, "preheat", "fleet.bytes_per_second retain.at_least"),
    (_FIXED, "preheat", "stall_timeout unknown_image"),
    (f"{_KUBELET}; kubelet.config has its thresholds", "preheat", "kubelet"),
    (_NODE, "preheat", "node"),
    (_FIXED, "volumes.audit", "actions.per_hour busy_interval clear_after cluster_interval"),
    (_FIXED, "volumes.audit", "cluster_timeout cluster_wide_interval interval logs.hold"),
    (_FIXED, "volumes.audit", "look_timeout settle"),
    (_KUBELET, "volumes.audit", "kubelet"),
    (_REPAIR, "volumes.audit.actions", "orphan_after unmap_orphan"),
    (_NOT_READ_ONLY, "volumes.audit.actions", "set_readonly"),
    ("delete it: the cluster warns of its space ('ceph health')", "volumes.audit", "near_full"),
    ("run a kernel that takes the program ('nodeagent doctor')", "volumes.guard", "fallback"),
    (_FIXED, "volumes.guard", "object_file quiet settle"),
    (_CLUSTER, "volumes.kubernetes", _ACCESS),
    (_FIXED, "volumes.kubernetes", "outage per_minute timeout young"),
    (_FIXED, "volumes.repair", "follow per_hour per_volume settle"),
)
GONE = {f"{section}.{name}": do for do, section, names in _GONE for name in names.split()}
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
    """A token must have one of these audiences. Default: the audience of the API server."""


class ApiSettings(kit.settings.Section):
    """The admin API over TCP."""

    listen: HostPort
    """HOST:PORT."""
    cert_file: kit.settings.AbsolutePath
    """Certificate chain (PEM)."""
    key_file: kit.settings.AbsolutePath
    """Private key (PEM)."""
    tokens_file: kit.settings.AbsolutePath | None = None
    """YAML file: `NAME: {token: TEXT, role: ROLE}`, or `sha256: HEX` instead of `token`."""
    kubernetes: ReviewSettings | None = None
    """If set, the API server checks tokens that are not in `tokens_file`. In a pod, write `{}`."""

    @model_validator(mode="after")
    def _some_callers(self) -> "ApiSettings":
        if self.tokens_file is None and self.kubernetes is None:
            raise ValueError("needs tokens_file or kubernetes, or nobody could call")
        return self


class AdminSettings(kit.settings.Section):
    """Where the agent listens, and who may do what (docs/security.md)."""

    socket: kit.settings.AbsolutePath = SOCKET
    """Socket of the command line, for root and `group`."""
    group: str | None = None
    """Group that may use the socket."""
    group_role: kit.room.Role = kit.room.Role.OPERATE
    """Role of `group`: read, operate or dangerous."""
    metrics: HostPort | None = "127.0.0.1:9470"
    """HOST:PORT of /metrics, /healthz and /readyz, without login. A loopback address also serves
    the status page. null: off."""
    names: tuple[str, ...] = ()
    """Other host names under which clients may call the TCP listeners."""
    api: ApiSettings | None = None
    """Admin API over TCP, with TLS and tokens."""

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
    """false: the agent reads no CachedDatasets and ImageSets, and reports nothing."""
    namespace: str | None = None
    """Namespace of the Secrets with datasets' keys, and of the agents' common Lease. Default: the
    pod's namespace; outside a pod: `nodeagent`."""
    interval: kit.settings.Seconds = Field(default=10.0, ge=1, le=600)
    """Minimum time between two writes of the NodeStorage."""
    drop_after: kit.settings.Seconds = Field(default=3600.0, ge=0, le=30 * 86400)
    """If the agent no longer gets an object that nobody deleted (restored etcd, a label that the
    node lost), it obeys the object for this time."""
    conditions: bool = True
    """Write Events and Node conditions."""
    labels: int = Field(default=50, ge=0, le=200)
    """Maximum number of Node labels dataset.nodeagent.io/NAME. 0: no labels."""

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
    """Name of this node. Default: $NODE_NAME or the host name."""
    kubelet: kube.settings.KubeletSettings = kube.settings.KubeletSettings()
    """This node's kubelet."""
    kubernetes: ClusterSettings | None = None
    """Read CachedDatasets and ImageSets, and report to the cluster. In a pod write `{}`."""
    state_dir: kit.settings.AbsolutePath = Path("/var/lib/nodeagent/state")
    """State of the agent. It must survive reboots."""

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
