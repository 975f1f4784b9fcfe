"""Names of the guard's program and maps in a bpf file system, and the program that ends leases.

An attached guard stays without pins; they are for people with bpftool and for ceph-csi's wait. The
program that runs when a disk appears is traced, and without its pin it would end with the agent.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from linux import bpf, mountinfo, mounts

DISKS = "nodeagent_disks"  # that program's name, and its pin's


def keep(pins: Path, program: bpf.Program, maps: Mapping[str, bpf.Map]) -> None:
    """Pin them; the file system is mounted when missing. OSError when that is not possible."""
    file_system(pins)
    pins.mkdir(mode=0o700, exist_ok=True)
    for name, each in {"program": program, **maps}.items():
        _pin(each, pins / name)


def file_system(pins: Path) -> None:
    """Mount a bpf file system where ``pins`` are to be, when there is none. OSError."""
    mounted = mountinfo.containing(str(pins.parent), mountinfo.read())
    if mounted is None or mounted.fstype != "bpf":
        pins.parent.mkdir(parents=True, exist_ok=True)
        mounts.mount("bpf", pins.parent, "bpf", 0)


def outlive_us(pins: Path) -> bool:
    """Whether pid 1 has that bpf file system mounted. Where only our own container has it, pins end
    with the container. OSError."""
    number = pins.stat().st_dev
    own = os.major(number), os.minor(number)
    return any(mount.device == own for mount in mountinfo.of(1) if mount.fstype == "bpf")


def watch_disks(pins: Path, object_file: Path, maps: Mapping[str, bpf.Map]) -> None:
    """Have the kernel end a lease when a new disk gets its number, from now on and also without an
    agent. OSError where it cannot: the program is traced (CONFIG_BPF_EVENTS), and its pin needs
    ``keep``."""
    with bpf.loaded(object_file, DISKS, dict(maps)) as (program, made), contextlib.ExitStack() as s:
        for each in (program, *made.values()):
            s.callback(each.close)
        info = program.info()
        used = {each.info.id for each in made.values()} & set(info.map_ids)
        if not _watches(pins / DISKS, info.tag, used):
            _pin(s.enter_context(contextlib.closing(program.trace())), pins / DISKS)


@contextlib.contextmanager
def watched(pins: Path) -> Iterator[None]:
    """What watches disks now goes on until the end, also when another program gets its pin."""
    try:
        link = bpf.BpfLink.at(pins / DISKS)
    except OSError:
        yield
        return
    with contextlib.closing(link):
        yield


def _watches(pin: Path, tag: str, used: Set[int]) -> bool:
    """Whether the program pinned there is that one, with these maps: the tag says nothing about
    them."""
    try:
        with (
            contextlib.closing(bpf.BpfLink.at(pin)) as link,
            contextlib.closing(link.program()) as program,
        ):
            info = program.info()
    except OSError:
        return False
    return info.tag == tag and used <= set(info.map_ids)


def _pin(what: bpf.Descriptor, path: Path) -> None:
    """In place of what has that name: the former one is there until the new one is."""
    new = path.with_name(f"{path.name}-new")  # a bpf file system takes no dots
    new.unlink(missing_ok=True)
    what.pin(new)
    new.rename(path)


def drop(pins: Path) -> None:
    if pins.is_dir():
        for pin in pins.iterdir():
            pin.unlink()
        pins.rmdir()
