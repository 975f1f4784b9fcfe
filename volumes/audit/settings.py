"""Settings of the volume audit (``volumes.audit``)."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

import ceph.settings
import kit.settings
import kit.units
from kit.findings import Severity
from linux import blockdev

_name = kit.settings.matching(
    r"[a-z0-9][a-z0-9-]{0,62}", "a name: use lower-case letters, digits and '-'"
)
_unit = kit.settings.matching(r"[\w@.:*-]{1,255}", "a unit name")
_namespace = kit.settings.matching(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "a namespace's name")


class ClusterSettings(ceph.settings.ClusterSettings):
    """A Ceph cluster of volumes; the guard and the audit ask the same ones."""

    expected_version: str | None = None
    """The version that every daemon of it and this node's client should have, like '18.2' or
    '18.2.4'. Default: all alike, the node at most two releases apart."""


class LogSource(kit.settings.Section):
    """A log to follow: files by a pattern, or units of the journal."""

    name: Annotated[str, AfterValidator(_name)]
    """Its name in findings: kubelet, ceph-csi, containerd."""
    files: str | None = None
    """Absolute path, '*' allowed in its last two parts. Followed across rotation."""
    unit: Annotated[str, AfterValidator(_unit)] | None = None
    """A systemd unit, read with journalctl; '*' allowed, for units of which a node has one."""

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
    """Follow the kernel's log."""
    sources: tuple[LogSource, ...] = Field(
        default=(
            LogSource(name="kubelet", unit="kubelet.service"),
            LogSource(name="containerd", unit="containerd.service"),
            LogSource(name="ceph-csi", files="/var/log/containers/*csi-rbdplugin*.log"),
        ),
        max_length=32,
    )
    """Logs other than the kernel's. A missing source is tried again."""
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
    """Namespaces of the cluster whose containers' logs are believed: of files in a directory named
    'containers' only those of pods in them are read. Anybody can name a pod like ceph-csi's."""
    patterns: kit.settings.AbsolutePath | None = None
    """A YAML file with more patterns; the id of a built-in one replaces that one."""
    lines_per_second: int = Field(default=20_000, ge=100, le=100_000)
    """Most lines matched per second and source; more are counted as dropped. 20000 a second cost 2
    % of a core while they last."""
    hold: ClassVar[kit.units.Seconds] = 900.0
    """A finding from a log line clears when the line stays away for so long."""

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, value: tuple[LogSource, ...]) -> tuple[LogSource, ...]:
        names = ["kernel", *(source.name for source in value)]
        if (name := kit.settings.twice(names)) is not None:
            raise ValueError(f"two logs have the name {name!r}: give each its own")
        return value


Mode = Literal["off", "dry-run", "on"]


class ActionSettings(kit.settings.Section):
    """What the audit may do by itself. off: only on command; dry-run: the journal says what it
    would do."""

    detach_leaked: Mode = "off"
    """Unmount a private leaked copy inside its holder's namespace."""
    per_hour: ClassVar[int] = 10
    """Most actions in an hour."""


class RepairSettings(kit.settings.Section):
    """Repair of mappings whose Ceph client is blocklisted or whose session is broken: the mapping
    is taken away once nothing holds it, so that the next attach makes a healthy one
    (docs/audit.md)."""

    mode: Mode = "off"
    """off: only what an operator would do is said. dry-run: the journal says what would be done."""
    settle: ClassVar[kit.units.Seconds] = 60.0
    """How long nothing may have held a broken mapping before it is unmapped."""
    per_hour: ClassVar[int] = 4
    """Most mappings of this node that are unmapped in an hour."""
    per_volume: ClassVar[int] = 2
    """Most attempts for one volume in a day; a failed one counts."""
    follow: ClassVar[kit.units.Seconds] = 900.0
    """How long a volume that was unmapped is waited for, to probe it when it is mapped again."""
    taint: bool = False
    """Taint this node (nodeagent.io/volume-repair:NoSchedule) while a repair is under way. The
    agent's account in the cluster needs to get and patch this node."""


class RuleSettings(kit.settings.Section):
    """Changes to one rule."""

    enabled: bool = True
    """false: the rule is off."""
    severity: Severity | None = None
    """Replaces the rule's own."""
    patience: kit.units.Seconds | None = Field(default=None, ge=0)
    """How long a trouble must last before it is a finding; replaces the rule's own."""
    ignore: tuple[str, ...] = Field(default=(), max_length=100)
    """No finding whose subject, device, cgroup, pod, command or volume contains one of these
    words."""


class RequiredMount(kit.settings.Section):
    """Options that mounts of watched devices must have."""

    target: str
    """Mount points, '*' allowed."""
    options: tuple[str, ...] = Field(min_length=1)
    """Required options."""
    fstype: str | None = None
    """Only mounts of this file system type."""


class AuditSettings(kit.settings.Section):
    """The volume audit: leaked mounts, bad mappings, version skew, log lines of trouble."""

    enabled: bool = True
    """false: no audit."""
    names: tuple[str, ...] = Field(default=("*",), min_length=1)
    """Devices of the guarded drivers that the audit watches, as shell patterns, with what lies on
    them. The others have no findings, and nothing is done to them."""
    containers: kit.settings.AbsolutePath = Path(
        "/run/containerd/io.containerd.runtime.v2.task/k8s.io"
    )
    """containerd's bundles, which hold the pods' names."""
    interval: ClassVar[kit.units.Seconds] = 300.0
    """Between two full scans when idle."""
    busy_interval: ClassVar[kit.units.Seconds] = 60.0
    """The same while mounts come and go."""
    settle: ClassVar[kit.units.Seconds] = 1.0
    """Least time between two scans, however many mounts change."""
    look_timeout: ClassVar[kit.units.Seconds] = 10.0
    """After this a scan is abandoned and its result is unknown."""
    clear_after: ClassVar[kit.units.Seconds] = 5.0
    """A finding clears when its trouble was gone for so long."""
    cluster_interval: ClassVar[kit.units.Seconds] = 300.0
    """Between two questions to a cluster: 7,500 nodes then ask 25 times a second."""
    cluster_wide_interval: ClassVar[kit.units.Seconds] = 3600.0
    """Between two questions about what is the same for every node (versions, features, the least
    client): of 7,500 nodes, two each second ask three commands."""
    cluster_timeout: ClassVar[kit.units.Seconds] = 15.0
    """After this a cluster's answer is unknown."""
    mount_options: tuple[RequiredMount, ...] = Field(default=(), max_length=100)
    """Options that mounts must have."""
    rules: dict[str, RuleSettings] = Field(default_factory=dict, max_length=200)
    """Changes to rules, by rule name."""
    logs: LogSettings = LogSettings()
    """Logs."""
    actions: ActionSettings = ActionSettings()
    """Actions."""

    def watches(self, name: str) -> bool:
        """Whether the audit watches the device of that name, or the device of that partition."""
        whole = blockdev.whole_name(name)
        return blockdev.is_named(name, self.names) or blockdev.is_named(whole, self.names)
