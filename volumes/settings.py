"""Settings of the volumes room."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

import ceph.settings
import kit.settings
import kube.settings
from kit.findings import Severity
from linux import blockdev

# Programs that mount, check, grow or connect; none of them makes a file system.
OPENERS = (
    *("mount", "fsck", "fsck.ext2", "fsck.ext3", "fsck.ext4", "e2fsck", "xfs_repair"),
    *("fsck.xfs", "fsck.btrfs", "resize2fs", "xfs_growfs", "rbd-nbd", "nbd-client", "qemu-nbd"),
)
# Programs that begin so destroy what a device holds: they pass with a lease alone.
FORMATTERS = ("mkfs", "mke2fs", "mkswap", "wipefs", "blkdiscard")
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
_NEEDS_LEASE = (
    "destroys what the device holds, and needs a lease: "
    "'nodeagent volume allow-format DEVICE --volume-id ID --reason TEXT'"
)
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
OWN = ("by-id", "by-path", "model", "vg", "name")
_MOST = 60  # names or pairs that fit into the kernel's tables


def of_programs(texts: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """(program, argument) pairs."""
    return [(program, text) for program, those in texts.items() for text in those]


class GuardSettings(kit.settings.Section):
    """The format guard. All but cgroup and pins changes while running."""

    mode: Annotated[Literal["off", "dry-run", "enforce"], kit.settings.OnOrOff] = "dry-run"
    """off, dry-run (only report) or enforce."""
    drivers: tuple[kit.settings.Word, ...] = Field(
        default=("rbd", "nbd"), min_length=1, max_length=_MOST
    )
    """Drivers of guarded devices, as in /proc/devices."""
    scope: Literal["ceph", "csi", "all"] = "ceph"
    """Devices, besides those of `drivers`, whose writes the guard reports. ceph: no others.
    csi: all disks except the node's own disks. all: also the node's own disks, except those of
    the root file system, those of swaps, and those that `own` names. The guard never reports
    writes to ramdisk, zram, sr, fd and mtdblock devices."""
    own: tuple[str, ...] = Field(default=(), max_length=_MOST)
    """The node's own disks, in addition to those that the agent finds: 'by-id:PATTERN',
    'by-path:PATTERN', 'model:PATTERN', 'vg:PATTERN' or 'name:PATTERN'. No pattern matches loop or
    nbd devices, or devices of `drivers` or of PersistentVolumes."""
    names: tuple[str, ...] = ("*",)
    """Guarded devices that can get automatic leases (shell patterns)."""
    openers: tuple[kit.settings.Word, ...] = Field(default=OPENERS, max_length=_MOST)
    """Programs that may write to guarded devices (first 15 bytes of the name)."""
    words: tuple[str, ...] = Field(default=WORDS, max_length=_MOST)
    """Allowed commands: 'PROGRAM COMMAND'. COMMAND is the first argument that is not an option.
    For cryptsetup and btrfs, the agent also skips the values of options."""
    lease: kit.settings.Seconds = Field(default=150.0, ge=1, le=300)
    """Length of a lease. Set it longer than 122 s, and longer than your longest mkfs."""
    settle: ClassVar[kit.settings.Seconds] = 0.1
    """Pause between the two probes that must both find a device blank. With 0.1s the lease is
    granted before kubelet's first retry, 0.5 s after the denied attempt."""
    quiet: ClassVar[kit.settings.Seconds] = 60.0
    """No lease within this time after the kernel logged an I/O error of the device or its
    client."""
    probe_timeout: kit.settings.Seconds = Field(default=3.0, gt=0, le=60)
    """Time limit of one read of a probe."""
    cluster_timeout: kit.settings.Seconds = Field(default=5.0, gt=0, le=60)
    """Time limit for an answer of Ceph. Without an answer, there is no
    automatic lease."""
    require_extents: bool = False
    """true: images of krbd whose cluster is not in `clusters` get no automatic lease."""
    raw_block: bool = True
    """A pod may write to its raw block volume."""
    cgroup: kit.settings.AbsolutePath | None = None
    """cgroup v2 directory. The guard watches only the processes in it. Default: all processes."""
    pins: kit.settings.AbsolutePath = Path("/sys/fs/bpf/nodeagent")
    """Directory of the guard in the bpf file system."""

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
                raise ValueError(f"{pair!r} {_NEEDS_LEASE}")
        return value

    @field_validator("openers")
    @classmethod
    def _no_formatters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name.startswith(FORMATTERS):
                raise ValueError(f"{name!r} {_NEEDS_LEASE}")
        return value

    @field_validator("own")
    @classmethod
    def _kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            kind, _, wanted = pattern.partition(":")
            if kind not in OWN or not wanted.strip("*? "):
                raise ValueError(
                    f"{pattern!r} names no disk of the node: write "
                    f"{', '.join(f'{each}:PATTERN' for each in OWN)}, with more than wildcards"
                )
        return value

    def examines(self, device: blockdev.BlockDevice) -> bool:
        """Whether the agent looks at the device at all, and may give it a lease."""
        lowest = device.lowest
        return lowest.driver in self.drivers and blockdev.is_named(lowest.name, self.names)


class WitnessSettings(kit.settings.Section):
    """The PersistentVolume as a second witness: a volume that is marked there as holding data gets
    no automatic lease, and the first content that is seen is marked. It asks the API server of
    `kubernetes`, and in a pod with an account of its own it works by itself; without a cluster the
    guard decides by what the node and Ceph know."""

    enabled: bool = True
    """The guard reads and marks PersistentVolumes."""
    timeout: ClassVar[kit.settings.Seconds] = 3.0
    """For one request to the API server."""
    per_minute: ClassVar[int] = 60
    """Most requests of this node in a minute; half of them are kept for leases and repairs."""
    outage: ClassVar[kit.settings.Seconds] = 600.0
    """While the API server does not answer, a new volume is refused for so long; then the guard
    decides as without a cluster. With 'volumes.clusters' the cluster's 'nothing is allocated' ends
    the wait."""
    young: ClassVar[kit.settings.Seconds] = 86400.0
    """A PersistentVolume that is older and reads as blank is refused, unless its cluster says that
    nothing is allocated, or it has the annotation nodeagent.io/allow-format with its uid."""


# --- the audit

_name = kit.settings.matching(
    r"[a-z0-9][a-z0-9-]{0,62}", "a name: use lower-case letters, digits and '-'"
)
_unit = kit.settings.matching(r"[\w@.:*-]{1,255}", "a unit name")
_namespace = kit.settings.matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a namespace's name")


class ClusterSettings(ceph.settings.ClusterSettings):
    """A Ceph cluster of volumes; the guard and the audit ask the same ones."""

    expected_version: str | None = None
    """Version of all daemons and of this node's client, like '18.2' or '18.2.4'."""


class LogSource(kit.settings.Section):
    """A log to follow: files by a pattern, or units of the journal."""

    name: Annotated[str, AfterValidator(_name)]
    """Name of the log in findings."""
    files: str | None = None
    """Path of the log files. Its last two parts may contain `*`."""
    unit: Annotated[str, AfterValidator(_unit)] | None = None
    """systemd unit; `*` is allowed."""

    @model_validator(mode="after")
    def _one(self) -> "LogSource":
        if (self.files is None) == (self.unit is None):
            raise ValueError("give either 'files' or 'unit'")
        if self.files is not None:
            parts = Path(self.files).parts
            if not self.files.startswith("/") or any("*" in part for part in parts[:-2]):
                raise ValueError(
                    f"{self.files!r}: give an absolute path with '*' in its last two parts at most"
                )
        return self


class LogSettings(kit.settings.Section):
    """Which logs are read, and how much of them."""

    kernel: bool = True
    """Read the kernel's log."""
    sources: tuple[LogSource, ...] = Field(
        default=(
            LogSource(name="kubelet", unit="kubelet.service"),
            LogSource(name="containerd", unit="containerd.service"),
            LogSource(name="ceph-csi", files="/var/log/containers/*csi-rbdplugin*.log"),
        ),
        max_length=32,
    )
    """Logs besides the kernel's. Each needs `files` or `unit`."""
    namespaces: tuple[Annotated[str, AfterValidator(_namespace)], ...] = Field(
        default=(
            "kube-system",
            "rook-ceph",
            "ceph-csi",
            "ceph-csi-rbd",
            "ceph-csi-operator-system",
        ),
        max_length=32,
    )
    """Read logs of containers only from these namespaces."""
    patterns: kit.settings.AbsolutePath | None = None
    """YAML file with patterns besides the built-in ones."""
    lines_per_second: int = Field(default=20_000, ge=100, le=100_000)
    """Maximum lines per second of one log."""
    hold: ClassVar[kit.settings.Seconds] = 900.0
    """A finding from a log line clears when the line stays away for so long."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, value: tuple[LogSource, ...]) -> tuple[LogSource, ...]:
        names = ["kernel", *(source.name for source in value)]
        for number, name in kit.settings.again(names):
            said = f"two logs have the name {name!r}: give each its own"
            raise kit.settings.misplaced(said, number - 1, "name")
        return value


Mode = Annotated[Literal["off", "dry-run", "on"], kit.settings.OnOrOff]


class ActionSettings(kit.settings.Section):
    """What the audit may do by itself. off: only on command; dry-run: the journal says what it
    would do."""

    detach_leaked: Mode = "off"
    """Unmount leaked private mounts: off (only on command), dry-run (only log) or on."""
    per_hour: ClassVar[int] = 10
    """Most actions in an hour."""


class RepairSettings(kit.settings.Section):
    """Repair of mappings whose Ceph client is blocklisted or whose session is broken: the mapping
    is taken away once nothing holds it, so that the next attach makes a healthy one
    (docs/audit.md)."""

    mode: Mode = "off"
    """Unmap broken mappings that nothing holds: off (only advise), dry-run (only log) or on.
    Needs the audit. It also unmaps after Ceph blocklisted this node if `clusters` is set."""
    settle: ClassVar[kit.settings.Seconds] = 60.0
    """How long nothing may have held a broken mapping before it is unmapped."""
    per_hour: ClassVar[int] = 4
    """Most mappings of this node that are unmapped in an hour."""
    per_volume: ClassVar[int] = 2
    """Most attempts for one volume in a day; a failed one counts."""
    follow: ClassVar[kit.settings.Seconds] = 900.0
    """How long a volume that was unmapped is waited for, to probe it when it is mapped again."""
    taint: bool = False
    """Taint this node (nodeagent.io/volume-repair:NoSchedule) during a repair."""


class RuleSettings(kit.settings.Section):
    """Changes to one rule."""

    enabled: bool = True
    """false: the rule is off."""
    severity: Severity | None = None
    """info, warning or critical."""
    patience: kit.settings.Seconds | None = Field(default=None, ge=0)
    """How long a problem must last before it becomes a finding."""
    ignore: tuple[str, ...] = Field(default=(), max_length=100)
    """Words. The agent drops each finding whose subject, device, cgroup, pod, command or volume
    contains one of these words."""


class RequiredMount(kit.settings.Section):
    """Options that mounts of watched devices must have."""

    target: str
    """Mount points of watched devices that need `options`. `*` is allowed."""
    options: tuple[str, ...] = Field(min_length=1)
    """Options that these mounts must have."""
    fstype: str | None = None
    """Check only mounts of this file system type."""


class AuditSettings(kit.settings.Section):
    """The volume audit: leaked mounts, bad mappings, version skew, log lines of trouble."""

    enabled: bool = True
    """false: no audit."""
    names: tuple[str, ...] = Field(default=("*",), min_length=1)
    """Watched devices (shell patterns)."""
    containers: kit.settings.AbsolutePath = Path(
        "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
    )
    """containerd's directory of running pods."""
    interval: ClassVar[kit.settings.Seconds] = 300.0
    """Between two full scans when idle."""
    busy_interval: ClassVar[kit.settings.Seconds] = 60.0
    """The same while mounts come and go."""
    settle: ClassVar[kit.settings.Seconds] = 1.0
    """Least time between two scans, however many mounts change."""
    look_timeout: ClassVar[kit.settings.Seconds] = 10.0
    """After this a scan is abandoned and its result is unknown."""
    clear_after: ClassVar[kit.settings.Seconds] = 5.0
    """A finding clears when its trouble was gone for so long."""
    cluster_interval: ClassVar[kit.settings.Seconds] = 300.0
    """Between two questions to a cluster: 7,500 nodes then ask 25 times a second."""
    cluster_wide_interval: ClassVar[kit.settings.Seconds] = 3600.0
    """Between two questions about what is the same for every node (versions, features, the least
    client): of 7,500 nodes, two each second ask three commands."""
    cluster_timeout: ClassVar[kit.settings.Seconds] = 15.0
    """After this a cluster's answer is unknown."""
    mount_options: tuple[RequiredMount, ...] = Field(default=(), max_length=100)
    """Options of mounts."""
    rules: dict[str, RuleSettings] = Field(default_factory=dict, max_length=200)
    """Changes to rules."""
    logs: LogSettings = LogSettings()
    """Logs."""
    actions: ActionSettings = ActionSettings()
    """Actions."""

    def watches(self, name: str) -> bool:
        """Whether the audit watches the device of that name, or the device of that partition."""
        whole = blockdev.whole_name(name)
        return blockdev.is_named(name, self.names) or blockdev.is_named(whole, self.names)


class VolumesSettings(kube.settings.RoomSettings):
    """Volumes kept safe: the format guard and the audit."""

    clusters: Annotated[tuple[ClusterSettings, ...], AfterValidator(ceph.settings.unique)] = Field(
        default=(), max_length=16
    )
    """Ceph clusters of the volumes."""
    guard: GuardSettings = GuardSettings()
    """Refuses mkfs on a volume that holds data."""
    kubernetes: WitnessSettings = WitnessSettings()
    """The PersistentVolume as a second witness."""
    repair: RepairSettings = RepairSettings()
    """Repair of broken mappings. Needs the audit, and 'clusters' to know of a blocklist."""
    audit: AuditSettings = AuditSettings()
    """Leaked mounts, bad mappings, version skew, log lines of trouble."""
