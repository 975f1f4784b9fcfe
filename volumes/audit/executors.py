"""Carry out one action, or a repair's unmap. Each function runs in a child process (kit.child),
because it can hang.

Each checks again that the device is still the same and still unused: between the plan and this
moment another attach may have taken its name or number. All raise OSError, RefusedError when the
state changed, HostError when a program fails.
"""

import os

import kit.errors
from linux import blockdev, krbd, loop, mount_namespaces, mountinfo, rbd_sysfs
from volumes.audit.inventory import holders
from volumes.audit.inventory.model import User

DEADLINE_SECONDS = 30.0  # of each function
_UNMAP_SECONDS = 20.0


def detach(way: str, namespace_id: int, inode: int, copies: list[tuple[int, int, str]]) -> int:
    """Lazily unmount ``copies`` in a mount namespace; the number of unmounts, 0 if none was left.

    ``way`` is the path of the namespace, empty to enter it by its id. ``copies`` are major and
    minor of each mount (not of the device below it) and its path in the namespace.
    """
    wanted = [mount_namespaces.MountCopy((major, minor), target) for major, minor, target in copies]
    numbers = {copy.device for copy in wanted}
    if any(mount.device in numbers for mount in mountinfo.of(1)):
        raise kit.errors.RefusedError(
            "detach-leaked", "the host has the device mounted again", "nothing was done"
        )
    if way:
        return mount_namespaces.detach(way, inode, wanted)
    return mount_namespaces.detach_by_id(namespace_id, inode, wanted)


def unmap(
    name: str, driver: str, device: list[int], diskseq: int | None, mapping: str,
    backings: list[loop.Backing],
) -> int:  # fmt: skip
    """Unmap a device. The kernel refuses with EBUSY while anything has it open. ``backings``: what
    loop devices lie on, for nbd: to ask them may hang."""
    number = device[0], device[1]
    found = blockdev.identify(name)
    if found is None or (found.number, found.diskseq) != (number, diskseq):
        raise kit.errors.RefusedError(
            f"unmap {name}", "the name belongs to another device now", "nothing was done"
        )
    if found.partitions or blockdev.in_use(found):
        raise kit.errors.RefusedError(f"unmap {name}", "it is in use again", "nothing was done")
    if driver == "rbd":
        # Without 'force', which would unmap a device that somebody writes to.
        krbd.unmap(mapping)
    elif driver == "nbd":
        # Unlike the kernel, rbd-nbd unmaps a device that somebody has open.
        loops = holders.loops(backings, {number})
        with blockdev.claimed(f"/dev/{name}", number):
            _refuse_users(name, number, loops)
            _rbd_nbd_unmap(name)
    elif driver == "loop":
        blockdev.detach_loop(f"/dev/{name}", number)
    else:
        raise kit.errors.RefusedError(
            f"unmap {name}",
            f"the agent cannot unmap devices of driver {driver}",
            "unmap it yourself",
        )
    return 1


def _rbd_nbd_unmap(name: str) -> None:
    import asyncio  # only this one driver needs the event loop

    import kit.processes

    argv, about = ("rbd-nbd", "unmap", f"/dev/{name}"), f"rbd-nbd unmap {name}"
    ended = asyncio.run(kit.processes.run(argv, about=about, deadline=_UNMAP_SECONDS))
    if ended.code:
        said = ended.err.decode(errors="replace").strip()
        raise kit.errors.HostError(
            f"unmap {name}", f"rbd-nbd ended with {ended.code}: {said}", "see what holds the device"
        )


def _refuse_users(name: str, number: tuple[int, int], loops: list[User]) -> None:
    servers = {number: rbd_sysfs.nbd_server(name, blockdev.SYSFS)}
    users = holders.users(holders.Processes("/proc", ""), "/proc", {number}, set(), servers)
    for user in users + loops:
        if user.owner.pid != os.getpid():  # our own claim
            raise kit.errors.RefusedError(
                f"unmap {name}",
                f"{user.owner.label} has it open ({', '.join(user.ways)})",
                "nothing was done",
            )
