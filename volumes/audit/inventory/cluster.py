"""What a Ceph cluster says, as a frozen model. Made by ceph.py in a child process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Watcher:
    client: str  # "client4144"
    address: str  # "10.0.0.5:0/123456"


@dataclass(frozen=True)
class Lock:
    client: str
    address: str
    cookie: str


@dataclass(frozen=True)
class ImageView:
    """One image as the cluster sees it. Readers leave no watcher: no watcher proves nothing."""

    pool: str
    namespace: str
    name: str
    features: int = 0
    watchers: tuple[Watcher, ...] = ()
    locks: tuple[Lock, ...] = ()
    error: str = ""  # why it could not be asked

    @property
    def key(self) -> tuple[str, str, str]:
        return self.pool, self.namespace, self.name


@dataclass(frozen=True)
class VersionCount:
    kind: str  # mon, mgr, osd, mds
    version: str  # "ceph version 16.2.15 (...) pacific (stable)"
    count: int


@dataclass(frozen=True)
class FeatureGroup:
    kind: str  # mon, osd, client, ...
    release: str
    features: int
    count: int


@dataclass(frozen=True)
class Check:
    code: str  # OSD_NEARFULL
    severity: str
    summary: str


def refusal(command: str) -> str:
    return f"'ceph {command}' is not allowed to this key"


@dataclass(frozen=True)
class ClusterView:
    """One look at one cluster."""

    name: str
    taken: float
    fsid: str
    versions: tuple[VersionCount, ...] = ()
    features: tuple[FeatureGroup, ...] = ()
    min_client: str = ""  # require_min_compat_client
    checks: tuple[Check, ...] = ()
    used: float = 0.0  # share of raw space
    blocklist: tuple[str, ...] = ()
    monitors_v1: tuple[str, ...] = ()
    monitors_v2: tuple[str, ...] = ()
    images: tuple[ImageView, ...] = ()
    node_client: str = ""  # version of librados here: "16.2.15"
    denied: tuple[str, ...] = ()  # commands that this key may not run: what they tell is missing

    @property
    def gaps(self) -> tuple[str, ...]:
        """The same for people."""
        return tuple(refusal(command) for command in self.denied)

    def refused(self, commands: tuple[str, ...]) -> list[str]:
        """Why what these commands tell is not known."""
        return [f"cluster {self.name}: {refusal(c)}" for c in commands if c in self.denied]

    def image(self, pool: str, namespace: str, name: str) -> ImageView | None:
        return next((i for i in self.images if i.key == (pool, namespace, name)), None)
