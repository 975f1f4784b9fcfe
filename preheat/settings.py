"""Settings of image preheating, and what they mean on this node."""

import platform
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

import kit.errors
import kit.settings
import kube.settings
from preheat.image import manifest

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_window = kit.settings.matching(
    r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", "a time window like 22:00-06:00 (UTC)"
)
_platform = kit.settings.matching(
    r"([a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?)?", "a platform like linux/amd64"
)


def _directories(text: str) -> str:
    for each in text.split(":"):
        if not Path(each).is_absolute():
            raise ValueError(f"{each!r} is not an absolute path")
    return text


class KeepFor(kit.settings.Section):
    """``pin: {for: 72h}``."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: kit.settings.Seconds = Field(alias="for", gt=0)
    """The long form of `pin: 72h` is `pin: {for: 72h}`."""


def _pin(value: object) -> object:
    """``72h`` is short for ``{for: 72h}``."""
    if isinstance(value, str) and value not in ("always", "never"):
        if not re.fullmatch(SHORT_PIN, value):
            raise ValueError(f"{value!r} is none of always, never, or a time like 72h")
        return {"for": value}
    return value


# Every pin as one word: in objects of the cluster a field has one type.
SHORT_PIN = r"[0-9]+(\.[0-9]+)?(ms|s|m|h|d)"
Pin = Annotated[Literal["always", "never"] | KeepFor, BeforeValidator(_pin)]


class ImageSettings(kit.settings.Section):
    """One image that must be on the node before a job asks for it."""

    ref: Annotated[str, AfterValidator(lambda text: manifest.parse(text).text)]
    """HOST/PATH:TAG or HOST/PATH@sha256:…. Default tag: latest."""
    pin: Pin = "always"
    """always, never (pulled once, not pinned), or a time like 72h (pinned for this time after its
    last use)."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """An image with a higher priority is pulled first and released last."""
    share_private: bool = False
    """true: also pull images that need credentials. Any pod on the node can then run them,
    unless the kubelet verifies credentials."""
    nodes: dict[str, str] = Field(default_factory=dict)
    """Only nodes whose `preheat.node_labels` have all these labels keep the image."""


class RetainSettings(kit.settings.Section):
    """Keep images that pods used for a while after their last use (delayed deletion)."""

    model_config = ConfigDict(serialize_by_alias=True)

    duration: kit.settings.Seconds = Field(alias="for", gt=0)
    """How long to keep an image after its last container ended. Images below 1 GiB are not kept."""
    at_least: ClassVar[kit.settings.Bytes] = 1024**3
    """Smaller images are not pinned: pulling them again takes seconds."""


class CredentialSettings(kit.settings.Section):
    """Where logins for registries come from. Read at each use, so that secrets can be rotated."""

    docker_config: kit.settings.AbsolutePath | tuple[kit.settings.AbsolutePath, ...] | None = None
    """dockerconfigjson or .dockercfg file, or a list."""
    helper_dir: kit.settings.AbsolutePath | None = None
    """Directory of the docker-credential-* programs."""
    provider_config: kit.settings.AbsolutePath | None = None
    """The kubelet's --image-credential-provider-config file. If you set it, set `provider_dir`
    too."""
    provider_dir: kit.settings.AbsolutePath | None = None
    """The kubelet's --image-credential-provider-bin-dir."""
    provider_timeout: ClassVar[kit.settings.Seconds] = 30.0
    """How long a provider plugin or a helper program may take."""

    @property
    def docker_configs(self) -> tuple[Path, ...]:
        found = self.docker_config
        return found if isinstance(found, tuple) else () if found is None else (found,)

    @model_validator(mode="after")
    def _both(self) -> "CredentialSettings":
        if (self.provider_config is None) != (self.provider_dir is None):
            raise ValueError("give both provider_config and provider_dir, or neither")
        return self


class FleetSettings(kit.settings.Section):
    """How many nodes ask the same registries, so that they never ask them all at once."""

    nodes: int = Field(ge=1, le=1_000_000)
    """Number of nodes that use the same `preheat` settings."""
    per_registry: int = Field(default=50, ge=1, le=100_000)
    """Maximum number of nodes per registry at the same time. If necessary, the agent lengthens
    `spread` and `refresh`."""
    bytes_per_second: ClassVar[kit.settings.Bytes] = 100_000_000
    """How fast one node pulls, at the least: it says for how long a pull keeps the registry
    busy."""


class PreheatSettings(kube.settings.RoomSettings):
    """Images held ready on the node."""

    socket: kit.settings.AbsolutePath = Path("/run/containerd/containerd.sock")
    """containerd's unix socket."""
    pin_budget: kit.settings.Bytes = Field(default=200 * 1024**3, gt=0)
    """Maximum bytes of pinned images."""
    unknown_image: ClassVar[kit.settings.Bytes] = 20 * 1024**3
    """What an image is taken to need on disk when its registry lookup failed, so that only the
    runtime can find out how large it is."""
    images: tuple[ImageSettings, ...] = Field(default=(), max_length=500)
    """Images to keep."""
    drop_after: kit.settings.Seconds = Field(default=86400.0, ge=0)
    """Maximum time that an image stays pinned after you remove it from `images`."""
    release_after: kit.settings.Seconds | None = Field(default=None, ge=14400)
    """If no agent ran for this time (minimum 4h), containerd ends all pins. Not set:
    containerd never ends pins. If you set it, the kubelet's garbage collection can delete pinned
    images at any time. While the agent runs, it restores them without the registry."""
    retain: RetainSettings | None = None
    """Also pin images that pods use and that `images` does not list."""
    platform: Annotated[str, AfterValidator(_platform)] = ""
    """os/architecture[/variant]. Default: this machine's."""
    credentials: CredentialSettings = CredentialSettings()
    """Logins for registries."""
    hosts_dir: Annotated[str, AfterValidator(_directories)] = "/etc/containerd/certs.d"
    """containerd's registry configuration. Separate directories with ':'."""
    refresh: kit.settings.Seconds = Field(default=3600.0, ge=10)
    """How often the agent looks up a tag."""
    spread: kit.settings.Seconds = Field(default=300.0, ge=0, le=86400)
    """Longest random delay before the pull of a new image."""
    fleet: FleetSettings | None = None
    """Limits how many nodes use one registry at the same time."""
    concurrency: int = Field(default=2, ge=1, le=16)
    """Parallel pulls on this node."""
    bytes_per_second: kit.settings.Bytes | None = Field(default=None, ge=64 * 1024)
    """Maximum download rate of all pulls."""
    windows: tuple[Annotated[str, AfterValidator(_window)], ...] = Field(default=(), max_length=24)
    """Hours in which the agent may start pulls by itself: HH:MM-HH:MM (UTC)."""
    attempt_timeout: ClassVar[kit.settings.Seconds] = 7200.0
    """Longest single attempt of a pull."""
    stall_timeout: ClassVar[kit.settings.Seconds] = 120.0
    """A pull without progress for so long is cancelled and continued by a new attempt. containerd
    shows progress in steps of 1 MiB a layer."""
    partial_keep: ClassVar[kit.settings.Seconds] = 86400.0
    """How long the bytes of an unfinished pull stay."""
    heals_per_hour: ClassVar[int] = 30
    """Most heals of one image in an hour: restoring a pinned image that garbage collection or
    somebody else removed. The kubelet collects every 5 minutes, 12 times an hour; a finding tells
    of half as many, and at the limit healing stops."""
    node_labels: dict[str, str] = Field(default_factory=dict)
    """Labels of this node. `images[].nodes` selects by these labels."""

    @model_validator(mode="after")
    def _consistent(self) -> "PreheatSettings":
        for number, ref in kit.settings.again(each.ref for each in self.images):
            raise kit.settings.misplaced(f"image {ref!r} is listed twice", "images", number)
        return self


def complete(section: PreheatSettings) -> PreheatSettings:
    """With this node's platform where the settings leave it out."""
    machine = _MACHINES.get(platform.machine(), platform.machine())
    return section.model_copy(update={"platform": section.platform or f"linux/{machine}"})
