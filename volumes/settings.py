"""Settings of the volumes room."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

import ceph.settings
import kit.settings
import kit.units
from volumes.audit.settings import AuditSettings, ClusterSettings

# Programs that mount, check, grow or connect; none of them makes a file system.
OPENERS = (
    *("mount", "fsck", "fsck.ext2", "fsck.ext3", "fsck.ext4", "e2fsck", "xfs_repair"),
    *("fsck.xfs", "fsck.btrfs", "resize2fs", "xfs_growfs", "rbd-nbd", "nbd-client", "qemu-nbd"),
)
# Programs that do both: allowed only with this first argument.
WORDS = (
    *("cryptsetup luksOpen", "cryptsetup open", "cryptsetup luksResume", "cryptsetup resize"),
    *("btrfs check", "btrfs rescue"),
)


class GuardSettings(kit.settings.Section):
    """The format guard. All but cgroup, pins and object_file changes while running."""

    mode: Literal["off", "dry-run", "enforce"] = Field(
        default="dry-run",
        description="off: not attached. dry-run: reports what it would deny. enforce: denies. "
        "Begin with dry-run and look at 'nodeagent volume guard status' for a week.",
    )
    drivers: tuple[str, ...] = Field(
        default=("rbd", "nbd"),
        min_length=1,
        description="Block drivers whose devices are guarded, named as in /proc/devices.",
    )
    names: tuple[str, ...] = Field(
        default=("*",),
        description="Devices of those drivers that the agent looks at, as shell patterns. The "
        "others are guarded all the same and never leased automatically.",
    )
    openers: tuple[str, ...] = Field(
        default=OPENERS,
        description="Programs that may always open a guarded device for writing (process names, "
        "15 bytes count).",
    )
    words: tuple[str, ...] = Field(
        default=WORDS,
        description="'PROGRAM ARGUMENT': may open for writing when ARGUMENT is its first argument. "
        "Needs a kernel with BTF.",
    )
    lease: kit.units.Seconds = Field(
        default=90.0,
        ge=1,
        le=120,
        description="How long a device found blank may be formatted. Longer than one mkfs takes; "
        "a lease that ran out unused is given again when asked for.",
    )
    settle: kit.units.Seconds = Field(
        default=0.1,
        ge=0.05,
        le=60,
        description="Between the two probes that must both find a device blank. 0.1s: a lease is "
        "there before kubelet's first retry, 0.5 s after the attempt that was denied.",
    )
    quiet: kit.units.Seconds = Field(
        default=60.0,
        ge=0,
        le=3600,
        description="No lease while the kernel logged an I/O error of the device or its client in "
        "this time.",
    )
    probe_timeout: kit.units.Seconds = Field(
        default=3.0, gt=0, le=60, description="After this a device that does not answer is TIMEOUT."
    )
    cluster_timeout: kit.units.Seconds = Field(
        default=5.0,
        gt=0,
        le=60,
        description="After this a cluster's answer is 'unknown': no lease.",
    )
    require_extents: bool = Field(
        default=False,
        description="Refuse every automatic lease for an RBD image whose cluster is not among "
        "'volumes.clusters'. Off by default, because then no new volume could be formatted without "
        "credentials on the node.",
    )
    raw_block: bool = Field(
        default=True,
        description="A volume that kubelet publishes as a raw block device (volumeMode: Block) may "
        "be written by its pod, as its user asked for.",
    )
    fallback: bool = Field(
        default=True,
        description="Where the kernel does not take the program: flag unreadable devices read-only "
        "and watch formatters being executed (weaker; status says so).",
    )
    cgroup: Path | None = Field(
        default=None,
        description="cgroup v2 directory to guard; default: the root of the hierarchy, all "
        "processes of the node.",
    )
    object_file: Path | None = Field(
        default=None,
        description="The compiled program; default: the one that came with the agent.",
    )
    pins: Path = Field(
        default=Path("/sys/fs/bpf/nodeagent"),
        description="Directory in a bpf file system for the program and its maps.",
    )

    @field_validator("cgroup", "pins", "object_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else kit.settings.absolute(value)

    @field_validator("drivers", "openers")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[\w.+-]+", name):
                raise ValueError(f"{name!r} is not a plain name")
        if len(value) > 60:
            raise ValueError(f"{len(value)} names; at most 60 fit into the kernel's table")
        return value

    @field_validator("words")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pair in value:
            parts = pair.split()
            if len(parts) != 2 or len(parts[1].encode()) > 15:
                raise ValueError(
                    f"{pair!r} is not 'PROGRAM ARGUMENT' with an argument of at most 15 bytes"
                )
        if len(value) > 60:
            raise ValueError(f"{len(value)} pairs; at most 60 fit into the kernel's table")
        return value


class VolumesSettings(kit.settings.Section):
    """Volumes kept safe: the format guard and the audit."""

    clusters: Annotated[tuple[ClusterSettings, ...], AfterValidator(ceph.settings.unique)] = Field(
        default=(),
        description="Ceph clusters of the volumes. The guard asks them what an image holds and "
        "keeps its ledger there too; the audit asks them about their state. Without any, the guard "
        "decides by what this node knows.",
    )
    guard: GuardSettings = Field(
        default_factory=GuardSettings, description="No mkfs on a volume that holds data."
    )
    audit: AuditSettings = Field(
        default_factory=AuditSettings,
        description="Leaked mounts, bad mappings, version skew, telling log lines.",
    )
