"""Which devices of a node the guard judges, beside those of its drivers.

``decide`` is a pure function of one ``Stack`` and the settings. A device is

* **guarded**: of a driver in ``drivers``, staged or published by kubelet, or made of such devices;
* **own**: the node's own. It was in use at the first attach, or carries what was; it is below the
  root file system or a swap; or the setting ``own`` names it;
* **unproven**: all else, above all a disk that appears. The guard judges it like a guarded one.

What was own at the first attach is written down by identity: a name and a number mean another disk
after a reboot.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from linux.stack import Stack, StackedDevice, named
from volumes import settings
from volumes.node import raw_block

# Memory and removable media: nothing there outlives a reboot, or no driver makes volumes of it.
NEVER = frozenset({"ramdisk", "zram", "sr", "fd", "mtdblock"})
# Their disk and its number stay when another medium comes.
STAYS = frozenset({"loop", "nbd"})
# In the path of what kubelet or a driver mounts for a PersistentVolume, wherever kubelet's folder
# is: plugins/kubernetes.io/, plugins/DRIVER.COM/, pods/UID/volumes/kubernetes.io~csi/.
_STAGED = re.compile(r"/plugins/[^/]+\.[^/]+/|/volumes/kubernetes\.io~")
RAW_BLOCK = "/volumeDevices/"
# Such a program works on kubelet's volumes as well as on the node's disks, and ends.
_BRIEF = re.compile(
    r"mkfs|mke2fs|mkswap|fsck|e2fsck|resize2fs|tune2fs|xfs_|blkid|mount$|cryptsetup|wipefs|dd$"
    r"|sgdisk|sfdisk|parted|lvm$|(pv|vg|lv)(create|change|extend|resize|remove)|blkdiscard"
)
_SUBPATH = "/volume-subpaths/"  # shows a part of another mount, and says nothing of a device


class Whose(StrEnum):
    OWN = "own"
    GUARDED = "guarded"
    UNPROVEN = "unproven"


class Why(StrEnum):
    """The words are in the file of what is own: changed ones are not known any more."""

    DRIVER = "driver"
    NEVER = "holds no volumes"
    PATTERN = "named by volumes.guard.own"
    ROOT = "root file system"
    SWAP = "swap"
    MOUNTED = "mounted at the first attach"
    OPENED = "open at the first attach"
    KUBELET = "used by kubelet"
    STAYS = "takes one medium after the other"
    NEW = "not in use at the first attach"


_SYSTEM = frozenset({Why.ROOT, Why.SWAP})
_KEPT = frozenset({*_SYSTEM, Why.MOUNTED, Why.OPENED})


@dataclass(frozen=True)
class Judgement:
    """``of``: the driver, the path or the program; of what is made of others, the device that
    decided."""

    whose: Whose
    why: Why
    of: str = ""

    def __str__(self) -> str:
        return f"{self.whose}: {self.why}" + (f" ({self.of})" if self.of else "")


def identity(device: StackedDevice) -> str:
    """What stays the same over reboots, the surest that there is; empty: nothing does."""
    links = [link for link in device.links if link.startswith("by-path/")]
    ids = [link for link in device.links if link.startswith("by-id/")]
    raid = [link for link in ids if link.startswith("by-id/md-uuid-")]
    slot = device.model.startswith("IET ")  # tgt: these name its target, and the next volume there
    said = (
        ("dm", device.uuid or device.mapping),
        ("md", raid[0] if raid else ""),
        ("part", device.partuuid if _tells(device.partuuid[:-3]) else ""),
        ("wwid", device.wwid if _tells(device.wwid) and not slot else ""),
        ("serial", device.serial if _tells(device.serial) and not slot else ""),
        ("file", device.backing),
        ("path", links[0].partition("/")[2] if links else ""),
        ("id", ids[0].partition("/")[2] if ids and not slot else ""),
    )
    return next((f"{kind}:{text}" for kind, text in said if text), "")


def _tells(text: str) -> bool:
    """Some disks say nothing but zeros."""
    return bool(set(text.rpartition(".")[2]) - set("0-: "))


def group(device: StackedDevice) -> str:
    """The volume group of a logical volume: LVM doubles the dashes of names and joins by one."""
    if not device.uuid.startswith("LVM-"):
        return ""
    return device.mapping.replace("--", "\0").partition("-")[0].replace("\0", "-")


def names(pattern: str, device: StackedDevice) -> bool:
    """Whether a pattern of the setting ``own`` means the device."""
    kind, _, wanted = pattern.partition(":")
    said: Iterable[str]
    if kind == "name":
        said = (device.name,)
    elif kind == "model":
        said = (device.model,)
    elif kind == "vg":
        said = (group(device),)
    else:
        said = (link.partition("/")[2] for link in device.links if link.startswith(f"{kind}/"))
    return any(text and fnmatch.fnmatchcase(text, wanted) for text in said)


def decide(
    stack: Stack, wanted: settings.GuardSettings, known: Mapping[str, str]
) -> dict[str, Judgement]:
    """Of each device by its name. ``known``: what ``first`` said at the first attach."""
    return _Decision(stack, wanted, known).found


def first(stack: Stack, wanted: settings.GuardSettings) -> dict[str, str]:
    """What is own at the first attach: its identity and why, to be written down. ``stack`` must
    tell what programs have open.

    Of a disk and its partitions the disk says it, for a copy of a disk has the same partitions. A
    disk that only its place tells leaves it to its partitions, for another may come to that place.
    What scope ``all`` leaves out is written down as well: the scope may change."""
    found = _Decision(stack, wanted, None).found
    told = {
        device.name: identity(device)
        for device in stack.devices
        if found[device.name].whose is Whose.OWN
        and found[device.name].why in _KEPT
        and identity(device)
    }
    for device in stack.devices:
        disk = device.below[0] if device.partition else ""
        if disk in told and device.name in told:
            del told[disk if _is_place(told[disk]) and device.partuuid else device.name]
    return {text: str(found[name].why) for name, text in told.items()}


def _is_place(text: str) -> bool:
    return text.startswith("path:")


class _Decision:
    """One run of ``decide``: ``found`` fills step by step, and what is found stays."""

    def __init__(
        self, stack: Stack, wanted: settings.GuardSettings, known: Mapping[str, str] | None
    ) -> None:
        """``known``: None at the first attach."""
        self.stack, self.wanted, self.known = stack, wanted, known
        self.found: dict[str, Judgement] = {}
        self.devices = {device.name: device for device in stack.devices}
        self.above: dict[str, list[str]] = {}
        for device in stack.devices:
            for lower in device.below:
                self.above.setdefault(lower, []).append(device.name)
        own_mounts, self.staged = self._mounts()
        for device in stack.devices:
            if device.driver in wanted.drivers:
                self._up(device.name, Judgement(Whose.GUARDED, Why.DRIVER, device.driver))
        for name, why, of in [*self._system(own_mounts), *self._in_use(own_mounts)]:
            self._down(name, Judgement(Whose.OWN, why, of))
        for name, path in self.staged.items():
            self._down(name, Judgement(Whose.GUARDED, Why.KUBELET, path))
        for name, why, of in self._by_settings():
            self._down(name, Judgement(Whose.OWN, why, of))
        for device in stack.devices:
            self._settle(device.name, set())

    def _mounts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Names of devices with a path: the node's own mounts, and what only kubelet mounted."""
        by_number = {device.number: device.name for device in self.stack.devices}
        mapped = {device.mapping: device.name for device in self.stack.devices if device.mapping}
        own: dict[str, str] = {}
        staged: dict[str, str] = {}
        for mount in self.stack.mounts:
            target = mount.target
            name = by_number.get(mount.device) or named(mount.source, mapped)  # btrfs: by source
            if raw_block.is_published(mount):
                name = self.stack.nodes.get(target) or mount.root.lstrip("/")  # as in devtmpfs
            if name not in self.devices or _SUBPATH in target:
                continue
            by_kubelet = raw_block.is_published(mount) or bool(_STAGED.search(target))
            (staged if by_kubelet else own).setdefault(name, target)
            if target == "/":
                own[name] = target
        for device in self.stack.devices:
            if RAW_BLOCK in device.backing:  # kubelet's loop device over a raw block volume
                staged.update(dict.fromkeys(device.below, device.backing))
        for pool in self.stack.pools:
            for paths in (own, staged):
                if at := next((paths[name] for name in pool if name in paths), ""):
                    paths.update(dict.fromkeys(pool, at))
        return own, {name: at for name, at in staged.items() if name not in own}

    def _system(self, mounts: Mapping[str, str]) -> Iterator[tuple[str, Why, str]]:
        """A stack that carries the node itself, whatever was written down."""
        for name, target in mounts.items():
            if target == "/":
                yield name, Why.ROOT, target
        for name in self.stack.swaps:
            yield name, Why.SWAP, ""

    def _in_use(self, mounts: Mapping[str, str]) -> Iterator[tuple[str, Why, str]]:
        if self.known is not None:
            yield from self._written_down()
        else:
            for name, target in mounts.items():
                yield name, Why.MOUNTED, target
            for name, programs in (self.stack.opened or {}).items():
                lasting = [program for program in programs if not _BRIEF.match(program)]
                if lasting and name not in self.staged:
                    yield name, Why.OPENED, lasting[0]

    def _written_down(self) -> Iterator[tuple[str, Why, str]]:
        """An identity of two devices proves neither: a copy of a disk has that of its model."""
        assert self.known is not None
        many = Counter(identity(device) for device in self.stack.devices)
        enough = _SYSTEM if self.wanted.scope == "all" else _KEPT
        for device in self.stack.devices:
            why = self.known.get(identity(device))
            if why in enough and many[identity(device)] == 1 and device.name not in self.staged:
                yield device.name, Why(why), ""

    def _by_settings(self) -> Iterator[tuple[str, Why, str]]:
        for device in self.stack.devices:
            if device.driver in NEVER:
                yield device.name, Why.NEVER, device.driver
            for pattern in self.wanted.own:
                if names(pattern, device):
                    yield device.name, Why.PATTERN, pattern

    def _down(self, name: str, judged: Judgement) -> None:
        """It, and all that carries it. What was found before stays, and so does what is below."""
        if name in self.found or name not in self.devices:
            return
        self.found[name] = self._lasting(name, judged)
        for lower in self.devices[name].below:
            self._down(lower, Judgement(judged.whose, judged.why, judged.of or name))

    def _lasting(self, name: str, judged: Judgement) -> Judgement:
        if judged.whose is Whose.OWN and self.devices[name].driver in STAYS:
            return Judgement(Whose.UNPROVEN, Why.STAYS, self.devices[name].driver)
        return judged

    def _up(self, name: str, judged: Judgement) -> None:
        """It, and all that is made of it."""
        if name not in self.found:
            self.found[name] = judged
            for upper in self.above.get(name, ()):
                self._up(upper, Judgement(judged.whose, judged.why, name))

    def _settle(self, name: str, ahead: set[str]) -> Judgement:
        """What nothing above decided is as what it lies on. But a logical volume says nothing by
        the disks of its group: drivers make theirs there, too."""
        found = self.found.get(name)
        if found is None:
            device = self.devices[name]
            below = [
                (lower, self._settle(lower, ahead | {name}))
                for lower in device.below
                if lower in self.devices and lower not in ahead
            ]
            found = Judgement(Whose.UNPROVEN, Why.NEW)
            for whose in (Whose.GUARDED, Whose.UNPROVEN, Whose.OWN):
                first = next(((each, it) for each, it in below if it.whose is whose), None)
                if first is not None:
                    if whose is not Whose.OWN or not group(device):
                        found = Judgement(whose, first[1].why, first[0])
                    break
            self.found[name] = found = self._lasting(name, found)
        return found
