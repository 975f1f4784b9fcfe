"""Settings of image preheating."""

import re
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

import kit.settings
import kit.units
from preheat import manifest

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?")


class KeepFor(kit.settings.Section):
    """``pin: {for: 72h}``."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: kit.units.Seconds = Field(
        alias="for", gt=0, description="How long after its last use (or pull) it stays pinned."
    )


Pin = Literal["always", "never"] | KeepFor


class ImageSettings(kit.settings.Section):
    """One image that is to be on the node before a job asks for it."""

    ref: str = Field(
        description="HOST/PATH:TAG or HOST/PATH@sha256:…, its registry named. No tag: latest."
    )
    pin: Pin = Field(
        default="always",
        description="always; never (fetched once, garbage collection may take it); or "
        "{for: 72h} after its last use.",
    )
    priority: int = Field(
        default=0, ge=-1000, le=1000, description="Higher is pulled first and released last."
    )
    share_private: bool = Field(
        default=False,
        description="Allow an image that cannot be pulled without credentials. Default no: once on "
        "the node, any pod of any tenant can run it without credentials unless the kubelet "
        "verifies them again (docs/preheat.md).",
    )
    nodes: dict[str, str] = Field(
        default_factory=dict,
        description="Node labels that must all be there (see node_labels); empty: every node.",
    )

    @field_validator("ref")
    @classmethod
    def _full(cls, value: str) -> str:
        return manifest.parse(value).text


class RetainSettings(kit.settings.Section):
    """Images that pods use are kept for a while after their last use (delayed deletion)."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: kit.units.Seconds = Field(
        alias="for", gt=0, description="How long after the last container that used the image."
    )
    at_least: kit.units.Bytes = Field(
        default=1024**3,
        description="Smaller images are not worth a pin: they are back in seconds.",
    )


class CredentialSettings(kit.settings.Section):
    """Where logins for registries come from. Read at each use, so a rotated secret is taken."""

    docker_config: Path | None = Field(
        default=None, description="A dockerconfigjson file (an imagePullSecret as a mounted file)."
    )
    provider_config: Path | None = Field(
        default=None, description="The kubelet's --image-credential-provider-config file."
    )
    provider_dir: Path | None = Field(
        default=None, description="The kubelet's --image-credential-provider-bin-dir."
    )
    provider_timeout: kit.units.Seconds = Field(
        default=30.0, gt=0, le=300, description="How long a provider plugin may take."
    )

    @field_validator("docker_config", "provider_config", "provider_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else kit.settings.absolute(value)

    @model_validator(mode="after")
    def _both(self) -> "CredentialSettings":
        if (self.provider_config is None) != (self.provider_dir is None):
            raise ValueError("provider_config and provider_dir go together; give both or neither")
        return self


class KubeletSettings(kit.settings.Section):
    """The kubelet's image garbage collection and eviction, so that nothing here triggers them."""

    config: Path | None = Field(
        default=None,
        description="The kubelet's configuration file; what it says comes before the three below.",
    )
    gc_high: kit.units.Share = Field(
        default=0.85, gt=0, description="imageGCHighThresholdPercent: above it images are deleted."
    )
    gc_low: kit.units.Share = Field(
        default=0.80, gt=0, description="imageGCLowThresholdPercent: down to it."
    )
    eviction_free: kit.units.Share = Field(
        default=0.15, description="evictionHard imagefs.available: below it, DiskPressure."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "KubeletSettings":
        if self.gc_low > self.gc_high:
            raise ValueError("gc_low is above gc_high")
        return self


class HealSettings(kit.settings.Section):
    """Putting back what garbage collection took although it is pinned."""

    per_hour: int = Field(
        default=30,
        ge=0,
        le=100_000,
        description="Most heals of one image in an hour. The kubelet looks every 5 minutes, which "
        "makes 12; more is a fight, and ends as a finding. 0: never heal.",
    )


class CrioSettings(kit.settings.Section):
    """Only for runtime: crio."""

    drop_in: Path = Field(
        default=Path("/etc/crio/crio.conf.d/50-nodeagent-pinned-images.conf"),
        description="The file that tells CRI-O what is pinned; it is ours alone.",
    )

    @field_validator("drop_in")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return kit.settings.absolute(value)


class PreheatSettings(kit.settings.Section):
    """Images held ready on the node."""

    runtime: Literal["containerd", "crio"] = Field(
        default="containerd", description="Which container runtime the kubelet uses."
    )
    socket: Path = Field(
        default=Path("/run/containerd/containerd.sock"), description="The runtime's unix socket."
    )
    pin_budget: kit.units.Bytes = Field(
        default=200 * 1024**3,
        gt=0,
        description="Most bytes that pins may keep, layers they share counted once. Keep it well "
        "below the kubelet's gc_low of the disk.",
    )
    images: tuple[ImageSettings, ...] = Field(
        default=(), max_length=500, description="What is to be here."
    )
    retain: RetainSettings | None = Field(
        default=None, description="Keep images that pods used; absent: not done."
    )
    platform: str = Field(
        default="", description="os/architecture[/variant]; default: this machine's."
    )
    credentials: CredentialSettings = Field(
        default_factory=CredentialSettings, description="Logins for registries."
    )
    hosts_dir: Path = Field(
        default=Path("/etc/containerd/certs.d"),
        description="containerd's registry configuration (hosts.toml per registry): mirrors, CAs "
        "and plain http are taken from there, so that the agent asks whom the runtime asks.",
    )
    refresh: kit.units.Seconds = Field(
        default=3600.0, ge=10, description="How often a tag is looked up again for a moved digest."
    )
    spread: kit.units.Seconds = Field(
        default=300.0,
        ge=0,
        le=86400,
        description="Each node begins a new image at its own moment in this window (by a hash of "
        "node and image), so that thousands do not ask the registry at once.",
    )
    concurrency: int = Field(default=2, ge=1, le=16, description="Pulls at a time on this node.")
    bytes_per_second: kit.units.Bytes | None = Field(
        default=None,
        ge=64 * 1024,
        description="Limit for the layers' download, all pulls together; the agent then fetches "
        "them itself. Default none: the runtime downloads as fast as it can.",
    )
    windows: tuple[str, ...] = Field(
        default=(),
        max_length=24,
        description="HH:MM-HH:MM in UTC, in which pulls of the policy may run; default always. "
        "What was asked for by hand runs at any time.",
    )
    attempt_timeout: kit.units.Seconds = Field(
        default=7200.0, ge=60, le=86400, description="Longest single attempt of a pull."
    )
    stall_timeout: kit.units.Seconds = Field(
        default=120.0,
        ge=1,
        description="An attempt without progress for so long is ended and goes on in a new one. "
        "containerd shows progress in steps of 1 MiB a layer.",
    )
    partial_keep: kit.units.Seconds = Field(
        default=86400.0, ge=14400, description="How long bytes of an unfinished pull stay."
    )
    kubelet: KubeletSettings = Field(
        default_factory=KubeletSettings, description="Thresholds of the kubelet."
    )
    heal: HealSettings = Field(default_factory=HealSettings, description="Healing of pins.")
    crio: CrioSettings = Field(default_factory=CrioSettings, description="CRI-O only.")
    node: str = Field(
        default="", description="This node's name, for the spread; default: the host name."
    )
    node_labels: dict[str, str] = Field(
        default_factory=dict, description="This node's labels, for images[].nodes."
    )

    @field_validator("socket", "hosts_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return kit.settings.absolute(value)

    @field_validator("platform")
    @classmethod
    def _platform(cls, value: str) -> str:
        if value and not _PLATFORM.fullmatch(value):
            raise ValueError(f"{value!r} is no platform, like linux/amd64")
        return value

    @field_validator("windows")
    @classmethod
    def _windows(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for window in value:
            if not _WINDOW.fullmatch(window):
                raise ValueError(f"{window!r} is no window, like 22:00-06:00 (UTC)")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "PreheatSettings":
        refs = [each.ref for each in self.images]
        for ref in refs:
            if refs.count(ref) > 1:
                raise ValueError(f"image {ref!r} is there twice")
        if self.runtime == "crio" and self.bytes_per_second is not None:
            raise ValueError(
                "bytes_per_second needs containerd: CRI-O takes no layers from anybody else"
            )
        if self.partial_keep < self.attempt_timeout + 3600:
            raise ValueError("partial_keep must exceed attempt_timeout by at least an hour")
        return self


def in_window(windows: tuple[str, ...], minute: int) -> bool:
    """Whether ``minute`` of the (UTC) day is inside one; a window may cross midnight."""
    for window in windows:
        match = _WINDOW.fullmatch(window)
        assert match is not None
        start, end = int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])
        inside = start <= minute < end if start < end else minute >= start or minute < end
        if inside:
            return True
    return not windows
