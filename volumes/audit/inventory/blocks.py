"""Guarded block devices from sysfs. Runs in the scan child only."""

import os
import re
from pathlib import Path

from volumes.audit.inventory import nbd
from volumes.audit.inventory.model import Client, Device, Image, Layer, Number

_SECTOR = 512
MOST_DEVICES = 4096
MOST_LAYERS = 256  # of one device


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
            return stream.read().strip()
    except OSError:
        return ""


def _number(text: str, base: int = 10) -> int:
    try:
        return int(text, base)
    except ValueError:
        return 0


def majors(drivers: list[str], proc: str) -> dict[int, str]:
    """Major numbers of the drivers. rbd without single_major registers rbd0, rbd1, ... each."""
    found: dict[int, str] = {}
    block = False
    for line in _text(f"{proc}/devices").splitlines():
        if line.endswith(":"):
            block = line.startswith("Block")
        elif block and line.strip():
            major, name = line.split(None, 1)
            base = re.sub(r"\d+$", "", name)
            if name in drivers or base in drivers:
                found[int(major)] = name if name in drivers else base
    return found


def devices(drivers: list[str], sys: str, proc: str) -> list[Device]:
    """Every device of these drivers that has a size, in the order of their names."""
    wanted = majors(drivers, proc)
    if not wanted:
        return []
    live = _live(sys)
    mapped = _mapped(sys)
    found: list[Device] = []
    for name in sorted(os.listdir(f"{sys}/block")):
        home = f"{sys}/block/{name}"
        number = _device_number(_text(f"{home}/dev"))
        if number is None or number[0] not in wanted or len(found) >= MOST_DEVICES:
            continue
        size = _number(_text(f"{home}/size")) * _SECTOR
        if size == 0:
            continue  # a free loop or nbd minor
        backing = _text(f"{home}/loop/backing_file")
        diskseq = _number(_text(f"{home}/diskseq"))
        image, client = mapped.get(number, (None, None))
        if wanted[number[0]] == "nbd":
            image = nbd.image(proc, home, diskseq)
        holders, layers = _stacked(sys, name, live)
        active = (*live.get(name, ()), *(fs for layer in layers for fs in layer.active))
        found.append(
            Device(
                name=name,
                number=number,
                driver=wanted[number[0]],
                size=size,
                read_only=_text(f"{home}/ro") == "1",
                diskseq=diskseq,
                active=tuple(dict.fromkeys(active)),
                holders=holders,
                backing=backing,
                backing_id=_identity(backing),
                image=image,
                client=client,
                layers=layers,
            )
        )
    return found


def _device_number(text: str) -> Number | None:
    major, colon, minor = text.partition(":")
    return (int(major), int(minor)) if colon and major.isdigit() and minor.isdigit() else None


def _stacked(
    sys: str, name: str, live: dict[str, list[str]]
) -> tuple[tuple[str, ...], tuple[Layer, ...]]:
    """What lies right on top of a device, and every layer above it, each once."""
    first: list[str] = []
    found: dict[str, Layer] = {}
    ahead = [(name, f"{sys}/block/{name}")]
    for below, home in ahead:
        for above, its_home in _on_top(sys, below, home):
            if below == name:
                first.append(above)
            number = _device_number(_text(f"{its_home}/dev"))
            if above == name or above in found or number is None or len(found) >= MOST_LAYERS:
                continue
            found[above] = Layer(above, number, tuple(live.get(above, ())))
            ahead.append((above, its_home))
    return tuple(first), tuple(found.values())


def _on_top(sys: str, name: str, home: str) -> list[tuple[str, str]]:
    """(name, directory) of the holders and partitions of a disk, the holders of a partition."""
    try:
        stacked = [(h, f"{sys}/block/{h}") for h in sorted(os.listdir(f"{home}/holders"))]
        if home != f"{sys}/block/{name}":
            return stacked
        parts = [
            part
            for part in os.listdir(home)
            if part.startswith(name) and part.removeprefix(name).removeprefix("p").isdecimal()
        ]
    except OSError:
        return []  # it went
    return stacked + [(part, f"{home}/{part}") for part in sorted(parts)]


def _live(sys: str) -> dict[str, list[str]]:
    """Kernel name -> file systems with a superblock on it, in whatever namespace or descriptor."""
    found: dict[str, list[str]] = {}
    for fstype in ("ext4", "xfs", "f2fs"):
        try:
            names = os.listdir(f"{sys}/fs/{fstype}")
        except OSError:
            continue
        for name in names:
            if name != "features" and name != "stats":
                found.setdefault(name, []).append(fstype)
    try:
        for uuid in os.listdir(f"{sys}/fs/btrfs"):
            home = f"{sys}/fs/btrfs/{uuid}/devices"
            for name in os.listdir(home) if Path(home).is_dir() else ():
                found.setdefault(name, []).append("btrfs")
    except OSError:
        pass  # no btrfs in this kernel, or one that is just going
    return found


def _identity(backing: str) -> str:
    """The file behind a loop device, by its path only.

    Its inode would say more, but asking for it hangs when the file system below hangs, and then
    nothing of the node could be seen any more.
    """
    return "" if backing.endswith(" (deleted)") else backing


def _mapped(sys: str) -> dict[Number, tuple[Image, Client]]:
    """Kernel RBD mappings by device number (Documentation/ABI/testing/sysfs-bus-rbd)."""
    found: dict[Number, tuple[Image, Client]] = {}
    try:
        ids = os.listdir(f"{sys}/bus/rbd/devices")
    except OSError:
        return found
    for mapping in ids[:MOST_DEVICES]:
        home = f"{sys}/bus/rbd/devices/{mapping}"
        major, minor = _text(f"{home}/major"), _text(f"{home}/minor")
        if not major.isdigit():
            continue
        snapshot = _text(f"{home}/current_snap")
        image = Image(
            pool=_text(f"{home}/pool"),
            name=_text(f"{home}/name"),
            namespace=_text(f"{home}/pool_ns"),
            snapshot="" if snapshot == "-" else snapshot,
            image_id=_text(f"{home}/image_id"),
            fsid=_text(f"{home}/cluster_fsid"),
        )
        client = Client(
            mapping_id=mapping,
            client=_text(f"{home}/client_id"),
            address=_text(f"{home}/client_addr"),
            features=_number(_text(f"{home}/features"), 16),
            config=_config(_text(f"{home}/config_info")),
        )
        # without single_major there is no minor file before 3.14: 0
        found[int(major), int(minor) if minor.isdigit() else 0] = (image, client)
    return found


def _config(text: str) -> str:
    """config_info begins with addresses and the user's name and holds the key's place: hidden."""
    return re.sub(r"(secret|key)=[^, ]*", r"\1=<hidden>", text)


def supported_features(sys: str) -> int:
    return _number(_text(f"{sys}/bus/rbd/supported_features"), 16)
