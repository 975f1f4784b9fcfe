"""Settings of image preheating, and what they mean on this node."""

import hashlib
import platform
import socket
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, ConfigDict, Field, model_validator

import kit.errors
import kit.settings
import kit.units
from preheat import manifest

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_window = kit.settings.matching(
    r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", "a time window like 22:00-06:00 (UTC)"
)
_platform = kit.settings.matching(
    r"([a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?)?", "a platform like linux/amd64"
)


class KeepFor(kit.settings.Section):
    """``pin: {for: 72h}``."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: kit.units.Seconds = Field(alias="for", gt=0)
    """How long it stays pinned after its last use (or its pull)."""


Pin = Literal["always", "never"] | KeepFor


class ImageSettings(kit.settings.Section):
    """One image that must be on the node before a job asks for it."""

    ref: Annotated[str, AfterValidator(lambda text: manifest.parse(text).text)]
    """HOST/PATH:TAG or HOST/PATH@sha256:…; HOST is the registry. No tag: latest."""
    pin: Pin = "always"
    """always; never (pulled once, garbage collection may delete it); or {for: 72h} after its last
    use."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher is pulled first and released last."""
    share_private: bool = False
    """Allow an image that cannot be pulled without credentials. Default no: once it is on the node,
    any pod of any tenant can run it without credentials, unless the kubelet verifies them again
    (docs/preheat.md)."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Only on nodes with all these labels (see node_labels); empty: every node."""


class RetainSettings(kit.settings.Section):
    """Keep images that pods used for a while after their last use (delayed deletion)."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: kit.units.Seconds = Field(alias="for", gt=0)
    """How long after the last container that used the image."""
    at_least: kit.units.Bytes = 1024**3
    """Smaller images are not pinned: pulling them again takes seconds."""


class CredentialSettings(kit.settings.Section):
    """Where logins for registries come from. Read at each use, so that secrets can be rotated."""

    docker_config: kit.settings.AbsolutePath | None = None
    """A dockerconfigjson file, e.g. a mounted imagePullSecret."""
    provider_config: kit.settings.AbsolutePath | None = None
    """The kubelet's --image-credential-provider-config file."""
    provider_dir: kit.settings.AbsolutePath | None = None
    """The kubelet's --image-credential-provider-bin-dir."""
    provider_timeout: kit.units.Seconds = Field(default=30.0, gt=0, le=300)
    """How long a provider plugin may take."""

    @model_validator(mode="after")
    def _both(self) -> "CredentialSettings":
        if (self.provider_config is None) != (self.provider_dir is None):
            raise ValueError("give both provider_config and provider_dir, or neither")
        return self


class KubeletSettings(kit.settings.Section):
    """The kubelet's thresholds for image garbage collection and eviction; no pull crosses them."""

    config: Path | None = None
    """The kubelet's configuration file; its values override the three below."""
    gc_high: kit.units.Share = Field(default=0.85, gt=0)
    """imageGCHighThresholdPercent: above it images are deleted."""
    gc_low: kit.units.Share = Field(default=0.80, gt=0)
    """imageGCLowThresholdPercent: images are deleted down to it."""
    eviction_free: kit.units.Share = 0.15
    """evictionHard imagefs.available: below it, DiskPressure."""

    @model_validator(mode="after")
    def _ordered(self) -> "KubeletSettings":
        if self.gc_low > self.gc_high:
            raise ValueError("gc_low is above gc_high")
        return self


class HealSettings(kit.settings.Section):
    """Restoring pinned images that garbage collection or somebody else removed."""

    per_hour: int = Field(default=30, ge=0, le=100_000)
    """Most heals of one image in an hour. The kubelet collects every 5 minutes, 12 times an hour;
    at the limit healing stops and a finding says so. 0: never heal."""


class CrioSettings(kit.settings.Section):
    """Only for runtime: crio."""

    drop_in: kit.settings.AbsolutePath = Path(
        "/etc/crio/crio.conf.d/50-nodeagent-pinned-images.conf"
    )
    """The file that lists pinned images for CRI-O. The agent overwrites it."""


class PreheatSettings(kit.settings.Section):
    """Images held ready on the node."""

    runtime: Literal["containerd", "crio"] = "containerd"
    """Which container runtime the kubelet uses."""
    socket: kit.settings.AbsolutePath = Path("/run/containerd/containerd.sock")
    """The runtime's unix socket."""
    pin_budget: kit.units.Bytes = Field(default=200 * 1024**3, gt=0)
    """Most bytes that pins may keep; shared layers count once. Keep it well below the kubelet's
    gc_low of the disk."""
    images: tuple[ImageSettings, ...] = Field(default=(), max_length=500)
    """Images that must be on the node."""
    retain: RetainSettings | None = None
    """Keep images that pods used; absent: off."""
    platform: Annotated[str, AfterValidator(_platform)] = ""
    """os/architecture[/variant]; default: this machine's."""
    credentials: CredentialSettings = CredentialSettings()
    """Logins for registries."""
    hosts_dir: kit.settings.AbsolutePath = Path("/etc/containerd/certs.d")
    """containerd's registry configuration (a hosts.toml per registry). The agent takes mirrors, CAs
    and plain http from it, so that it asks the servers that containerd asks."""
    refresh: kit.units.Seconds = Field(default=3600.0, ge=10)
    """How often a tag is looked up, in case it names another digest."""
    spread: kit.units.Seconds = Field(default=300.0, ge=0, le=86400)
    """Each node starts a new image at its own moment in this time (a hash of node and image), so
    that thousands of nodes do not pull at once."""
    concurrency: int = Field(default=2, ge=1, le=16)
    """Pulls at a time on this node."""
    bytes_per_second: kit.units.Bytes | None = Field(default=None, ge=64 * 1024)
    """Limit for downloading layers, all pulls together; the agent then fetches them itself.
    Default: no limit, the runtime downloads as fast as it can."""
    windows: tuple[Annotated[str, AfterValidator(_window)], ...] = Field(default=(), max_length=24)
    """HH:MM-HH:MM in UTC: when pulls of these settings may start; default: always. Pulls that an
    operator requests start at any time."""
    attempt_timeout: kit.units.Seconds = Field(default=7200.0, ge=60, le=86400)
    """Longest single attempt of a pull."""
    stall_timeout: kit.units.Seconds = Field(default=120.0, ge=1)
    """A pull without progress for so long is cancelled and continued by a new attempt. containerd
    shows progress in steps of 1 MiB a layer."""
    partial_keep: kit.units.Seconds = Field(default=86400.0, ge=14400)
    """How long the bytes of an unfinished pull stay."""
    kubelet: KubeletSettings = KubeletSettings()
    """Thresholds of the kubelet."""
    heal: HealSettings = HealSettings()
    """Healing of pins."""
    crio: CrioSettings = CrioSettings()
    """CRI-O only."""
    node: str = ""
    """This node's name, for the spread; default: the host name."""
    node_labels: dict[str, str] = Field(default_factory=dict)
    """This node's labels, for images[].nodes."""

    @model_validator(mode="after")
    def _consistent(self) -> "PreheatSettings":
        refs = [each.ref for each in self.images]
        for ref in refs:
            if refs.count(ref) > 1:
                raise ValueError(f"image {ref!r} is listed twice")
        if self.runtime == "crio" and self.bytes_per_second is not None:
            raise ValueError(
                "bytes_per_second needs containerd: the agent cannot give layers to CRI-O"
            )
        if self.partial_keep < self.attempt_timeout + 3600:
            raise ValueError("partial_keep must exceed attempt_timeout by at least an hour")
        return self


def in_window(windows: tuple[str, ...], minute: int) -> bool:
    """Whether ``minute`` of the UTC day is in a window; windows may cross midnight."""
    for window in windows:
        hours = [time.split(":") for time in window.split("-")]
        start, end = (int(hour) * 60 + int(past) for hour, past in hours)
        if start <= minute < end if start < end else minute >= start or minute < end:
            return True
    return not windows


def complete(section: PreheatSettings) -> PreheatSettings:
    """With this node's name and platform where the settings leave them out."""
    machine = platform.machine()
    return section.model_copy(
        update={
            "platform": section.platform or f"linux/{_MACHINES.get(machine, machine)}",
            "node": section.node or socket.gethostname(),
        }
    )


def turn(section: PreheatSettings, ref: str) -> float:
    """Seconds that this node waits before it starts with ``ref``: its own moment in ``spread``."""
    key = hashlib.sha256(f"{section.node}\n{ref}".encode()).digest()
    return int.from_bytes(key[:8], "big") / 2**64 * section.spread


def thresholds(section: KubeletSettings) -> KubeletSettings:
    """What the kubelet's own file says, else the settings. Blocking. Raises SettingsError."""
    if section.config is None:
        return section
    try:
        content = yaml.safe_load(section.config.read_bytes()) or {}
        eviction = (content.get("evictionHard") or {}).get("imagefs.available")
        update = {
            name: int(content[key]) / 100
            for name, key in (
                ("gc_high", "imageGCHighThresholdPercent"),
                ("gc_low", "imageGCLowThresholdPercent"),
            )
            if content.get(key) is not None
        }
        if isinstance(eviction, str) and eviction.endswith("%"):
            update["eviction_free"] = float(eviction[:-1]) / 100
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise kit.errors.SettingsError(
            f"preheat.kubelet.config {section.config}",
            f"cannot be used ({error})",
            "name the kubelet's configuration file, or leave it out and set the thresholds",
        ) from error
    return section.model_copy(update=update)
