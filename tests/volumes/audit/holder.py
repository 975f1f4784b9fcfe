"""Processes that hold mounts in the ways real agents do. Run as a script; says ``ready``.

    holder.py container ROOTFS PROPAGATION KEEP   a container with the host's root at /host
    holder.py chroot DIR KEEP                     a private copy, chrooted elsewhere
    holder.py thread KEEP                         only a thread has a private copy
    holder.py fd FILE | cwd DIR                   a file or working directory on the host
    holder.py map FILE                            a mapping, the file closed

What other tests have mounted is dropped from the copy at once, as tests/testbed/apart.sh does: a
copy keeps what it holds busy, and other tests run on this machine. What is below or above KEEP
stays.
"""

import ctypes
import mmap
import os
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
NEWNS, CLONE_FS = 0x20000, 0x200
REC, PRIVATE, SLAVE, BIND = 1 << 14, 1 << 18, 1 << 19, 1 << 12


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def mount(source: str, target: str, fstype: str | None, flags: int) -> None:
    kind = fstype.encode() if fstype else None
    check(libc.mount(source.encode(), target.encode(), kind, flags, None), f"mount {target}")


def copy(propagation: int, keep: str, flags: int = NEWNS) -> None:
    check(libc.unshare(flags), "unshare")
    mount("none", "/", None, REC | propagation)
    with open(f"/proc/self/task/{threading.get_native_id()}/mountinfo") as table:
        lines = [line.split() for line in table]
    for fields in reversed(lines):
        target = fields[4].encode().decode("unicode_escape")  # \\040 is a space
        if is_of_a_test(fields) and not are_nested(target, keep):
            libc.umount2(target.encode("latin-1"), 2)


def is_of_a_test(fields: list[str]) -> bool:
    fstype, text = fields[fields.index("-") + 1], " ".join(fields[4:])
    if fstype == "bpf":
        return False
    disk = fields[2].startswith("7:") or fstype == "fuse" or fstype.startswith("fuse.")
    return disk or any(word in text for word in ("/views/", "/build/test-", "/pytest-of-"))


def are_nested(target: str, keep: str) -> bool:
    """Whether one of the two lies at or below the other."""
    return f"{target}/".startswith(f"{keep}/") or f"{keep}/".startswith(f"{target.rstrip('/')}/")


def container(rootfs: str, propagation: str, keep: str) -> None:
    copy(PRIVATE if propagation == "private" else SLAVE, keep)
    mount("tmpfs", rootfs, "tmpfs", 0)
    for name in ("host", "old"):
        os.mkdir(f"{rootfs}/{name}")
    mount("/", f"{rootfs}/host", None, BIND | REC)
    check(libc.syscall(155, rootfs.encode(), f"{rootfs}/old".encode()), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", 2), "umount old")


def main() -> None:
    how, *arguments = sys.argv[1:]
    kept: list[object] = []
    if how == "container":
        container(*arguments)
        if len(sys.argv) > 5:
            os.chdir("/host" + sys.argv[5])
    elif how == "container-cwd":
        container(*arguments[:3])
        os.chdir("/host" + arguments[3])
    elif how == "chroot":
        copy(PRIVATE, arguments[1])
        os.chroot(arguments[0])
        os.chdir("/")
    elif how == "thread":
        done = threading.Event()

        def apart() -> None:
            copy(PRIVATE, arguments[0], NEWNS | CLONE_FS)
            done.set()
            time.sleep(600)

        threading.Thread(target=apart, daemon=True).start()
        done.wait()
    elif how == "fd":
        kept.append(os.open(arguments[0], os.O_RDONLY))
    elif how == "cwd":
        os.chdir(arguments[0])
    elif how == "map":
        with open(arguments[0], "rb") as file:
            kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    print("ready", flush=True)
    time.sleep(600)


main()
