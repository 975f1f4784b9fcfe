"""Settings of the volumes room."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

import ceph.settings
import kit.settings
import kit.units
import kube.settings
from linux import blockdev
from volumes.audit.settings import AuditSettings, ClusterSettings, RepairSettings
from volumes.ledger.settings import WitnessSettings

# Programs that mount, check, grow or connect; none of them makes a file system.
OPENERS = (
    *("mount", "fsck", "fsck.ext2", "fsck.ext3", "fsck.ext4", "e2fsck", "xfs_repair"),
    *("fsck.xfs", "fsck.btrfs", "resize2fs", "xfs_growfs", "rbd-nbd", "nbd-client", "qemu-nbd"),
)
# Programs that may also format: allowed only with this command.
WORDS = (
    *("cryptsetup luksOpen", "cryptsetup open", "cryptsetup luksResume", "cryptsetup resize"),
    *("cryptsetup luksAddKey", "cryptsetup luksChangeKey", "cryptsetup luksKillSlot"),
    *("btrfs check", "btrfs rescue"),
)
# Commands that destroy what a device holds: they pass with a lease alone, wherever they stand among
# the arguments, be it as the value of an option.
NEVER = {
    "cryptsetup": (
        *("luksFormat", "reencrypt", "erase", "luksErase", "repair", "luksHeaderRestore"),
        "convert",
    ),
}
_CRYPTSETUP = """
-B -I -M -S -T -b -c -d -h -i -l -o -p -s -t
--active-name --align-payload --block-size --cipher --device-size --external-tokens-path --hash
--header --header-backup-file --hotzone-size --integrity --integrity-key-size --iter-time
--json-file --key-description --key-file --key-size --key-slot --keyfile-offset --keyfile-size
--keyslot-cipher --keyslot-key-size --label --link-vk-to-keyring --luks2-keyslots-size
--luks2-metadata-size --master-key-file --new-key-description --new-key-slot --new-keyfile
--new-keyfile-offset --new-keyfile-size --new-token-id --offset --pbkdf --pbkdf-force-iterations
--pbkdf-memory --pbkdf-parallel --priority --progress-frequency --reduce-device-size --resilience
--resilience-hash --sector-size --size --skip --subsystem --timeout --token-id --token-type --tries
--type --uuid --veracrypt-pim --volume-key-file --volume-key-keyring
"""
# Options before a command, each with its value as the next argument; of cryptsetup 2.4 to 2.8 and
# btrfs-progs 6. What is not named here counts as one without a value, so its value is taken for
# the command, and is refused.
TAKE_VALUE = {"cryptsetup": tuple(_CRYPTSETUP.split()), "btrfs": ("--format", "--log")}
_MOST = 60  # names or pairs that fit into the kernel's tables


def of_programs(texts: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """(program, argument) pairs."""
    return [(program, text) for program, those in texts.items() for text in those]


class GuardSettings(kit.settings.Section):
    """The format guard. All but cgroup and pins changes while running."""

    mode: Literal["off", "dry-run", "enforce"] = "dry-run"
    """off: not attached. dry-run: reports what it would deny. enforce: denies. Begin with dry-run
    and watch 'nodeagent volume guard status' for a week."""
    drivers: tuple[kit.settings.Word, ...] = Field(
        default=("rbd", "nbd"), min_length=1, max_length=_MOST
    )
    """Block drivers whose devices are guarded, named as in /proc/devices."""
    names: tuple[str, ...] = ("*",)
    """Devices of those drivers that the agent examines, as shell patterns. The others are guarded
    too, but never get an automatic lease."""
    openers: tuple[kit.settings.Word, ...] = Field(default=OPENERS, max_length=_MOST)
    """Programs that may always open a guarded device for writing (process names, of which the first
    15 bytes count)."""
    words: tuple[str, ...] = Field(default=WORDS, max_length=_MOST)
    """'PROGRAM ARGUMENT': PROGRAM may open a guarded device for writing when ARGUMENT is its
    command: its first argument that is neither an option nor the value of one. With a word that
    destroys data (cryptsetup luksFormat) anywhere among its arguments it may not."""
    lease: kit.units.Seconds = Field(default=150.0, ge=1, le=300)
    """How long a device found blank may be formatted. Longer than kubelet's longest pause between
    two tries (122 s) and than one mkfs takes; after an unused lease the next attempt to write gets
    a new one."""
    settle: ClassVar[kit.units.Seconds] = 0.1
    """Pause between the two probes that must both find a device blank. With 0.1s the lease is
    granted before kubelet's first retry, 0.5 s after the denied attempt."""
    quiet: ClassVar[kit.units.Seconds] = 60.0
    """No lease within this time after the kernel logged an I/O error of the device or its
    client."""
    probe_timeout: kit.units.Seconds = Field(default=3.0, gt=0, le=60)
    """A device that does not answer within this time gets the verdict 'timeout'."""
    cluster_timeout: kit.units.Seconds = Field(default=5.0, gt=0, le=60)
    """A cluster that does not answer within this time is 'unknown': no lease."""
    require_extents: bool = False
    """Refuse every automatic lease for an RBD image whose cluster is not among 'volumes.clusters'.
    Off by default, because then no new volume could be formatted without credentials on the
    node."""
    raw_block: bool = True
    """A volume that kubelet publishes as a raw block device (volumeMode: Block) may be written by
    its pod, as its user asked for."""
    cgroup: kit.settings.AbsolutePath | None = None
    """cgroup v2 directory to guard; default: the root of the hierarchy, all processes of the
    node."""
    pins: kit.settings.AbsolutePath = Path("/sys/fs/bpf/nodeagent")
    """Directory in a bpf file system for the program and its maps."""

    @field_validator("words")
    @classmethod
    def _pairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pair in value:
            parts = pair.split()
            if len(parts) != 2 or len(parts[1].encode()) > 31:
                raise ValueError(
                    f"{pair!r} is not 'PROGRAM ARGUMENT' with an argument of at most 31 bytes"
                )
            if parts[1] in NEVER.get(parts[0], ()):
                raise ValueError(
                    f"{pair!r} destroys what the device holds, and needs a lease: "
                    "'nodeagent volume allow-format'"
                )
        return value

    def examines(self, driver: str, name: str) -> bool:
        """Whether the agent looks at the device at all, and may give it a lease."""
        return driver in self.drivers and blockdev.is_named(name, self.names)


class VolumesSettings(kube.settings.RoomSettings):
    """Volumes kept safe: the format guard and the audit."""

    clusters: Annotated[tuple[ClusterSettings, ...], AfterValidator(ceph.settings.unique)] = Field(
        default=(), max_length=16
    )
    """Ceph clusters of the volumes. The guard asks them what an image holds and keeps its ledger
    there too; the audit asks them about their state. Without any, the guard decides by what this
    node knows."""
    guard: GuardSettings = GuardSettings()
    """Refuses mkfs on a volume that holds data."""
    kubernetes: WitnessSettings = WitnessSettings()
    """The PersistentVolume as a second witness."""
    repair: RepairSettings = RepairSettings()
    """Repair of broken mappings. Needs the audit, and 'clusters' to know of a blocklist."""
    audit: AuditSettings = AuditSettings()
    """Leaked mounts, bad mappings, version skew, log lines of trouble."""
