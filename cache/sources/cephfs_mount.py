"""One mount of a CephFS: by the kernel's client or by ceph-fuse, in a folder of its own.

The kernel client is used where the kernel has it, else ceph-fuse. ceph-fuse runs in a session and a
cgroup of its own, so that neither the end of the agent nor that of its service ends the mount: jobs
read through it.

It is started in the foreground. As a daemon it closes its stdin, stdout and stderr; libfuse's pipes
take their numbers, and what a program that it starts prints (mount, to trim the kernel's names)
becomes part of an answer to the kernel, after which every reader hangs.
"""

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

import kit.child
import kit.errors
import kit.files
import kit.redact
from cache.settings import CephfsSource
from cache.sources import cephfs_child
from ceph import monitors, secrets
from ceph.monitors import Address
from linux import mountinfo, mounts, procfs

log = structlog.get_logger("source")

# Inodes that ceph-fuse keeps, about 1.5 KiB each. With its default of 16,384 every walk over a
# larger tree asks the MDS for each file again.
CLIENT_CACHE_INODES = 400_000
CGROUP = "nodeagent-sources"
DETACH_SECONDS = 15.0
SHOWN = "shows.json"
# For a type of key that it does not know Linux 6.1.192 says EINVAL, others ENOTSUPP (their 524).
_KEY_UNKNOWN = (errno.EINVAL, 524)

_CONF = """\
[global]
mon host = {monitors}
keyring = {keyring}
log file =
# Only what keeps it from mounting is printed: it runs for months, and its log is a file of ours.
log to stderr = false
err to stderr = false
admin socket =
[client]
client cache size = {inodes}
client mount timeout = {timeout}
rados mon op timeout = {timeout}
# The kernel checks modes itself (default permissions). Looking up the groups of every caller would
# cost ceph-fuse a quarter of its CPU.
fuse default permissions = true
client permissions = false
# Without this it lists the names of ACLs and refuses to give them: no file with one could be kept.
client acl type = posix_acl
fuse set user groups = false
debug client = 0/0
debug ms = 0/0
debug objecter = 0/0
debug objectcacher = 0/0
"""

POINT = "mount"
CLAIM_KEY = "claim.key"  # beside the keyring, of a source that a claim names
_FILES = ("keyring", "ceph.conf", CLAIM_KEY, SHOWN, cephfs_child.SAID)


class MayNotError(kit.errors.SourceError):
    """The cluster refuses this mount: the key is wrong, or has no right to the directory."""


@dataclass(frozen=True)
class Way:
    """How a source's cluster is reached now."""

    source: CephfsSource
    addresses: Sequence[Address]
    secret: str = field(repr=False)
    thing: str  # what it is for, for operators

    def error(self, cause: str, remedy: str) -> kit.errors.SourceError:
        return kit.errors.SourceError(self.thing, cause, f"{remedy}; it is tried again")

    def explain(self, number: str) -> kit.errors.SourceError:
        """The error for a mount that failed. ``number``: its errno as text, or ''."""
        source = self.source
        match number:
            case "1" | "13" | "22":
                return MayNotError(
                    self.thing,
                    f"client.{source.user} is refused: wrong key, or no right to {source.path}",
                    "correct user and secret_file, or the user's caps; it is tried again",
                )
            case "2":
                return self.error(
                    f"path {source.path} or file system {source.filesystem!r} does not exist",
                    "create it, or correct the settings",
                )
            case "5" | "110" | "111" | "113":
                return self.error(
                    f"no monitor of {', '.join(source.monitors)} answers, or no MDS",
                    "check 'ceph fs status', the addresses and the network",
                )
        return self.error(f"mounting failed ({number or 'no reason given'})", "see the log")


async def way_to(source: CephfsSource, thing: str) -> Way:
    """Read the key and find the monitors. SourceError."""
    by_kernel = source.client != "fuse" and await asyncio.to_thread(mounts.kernel_has, "ceph")
    secret = await secrets.fetch(source.secret_file, source.user, thing, by_kernel=by_kernel)
    way = Way(source, await monitors.resolve(source.monitors), secret, thing)
    if not way.addresses:
        cause = f"no monitor of {', '.join(source.monitors)} answers"
        raise way.error(cause, "check the addresses and the network")
    return way


def configure(folder: Path, way: Way, deadline: float) -> Path:
    """Write what ceph-fuse, and reads past any mount, connect with; the ceph.conf."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    keyring, conf = folder / "keyring", folder / "ceph.conf"
    kit.files.save(keyring, f"[client.{way.source.user}]\nkey = {way.secret}\n".encode())
    text = _CONF.format(
        monitors=" ".join(map(str, way.addresses)), keyring=keyring, inodes=CLIENT_CACHE_INODES,
        timeout=max(1, int(deadline) - 3),
    )  # fmt: skip
    kit.files.save(conf, text.encode())
    return conf


async def uses_kernel(way: Way) -> bool:
    """Whether the kernel's client makes the mount. SourceError when it is to and cannot."""
    kernel_has_it = await asyncio.to_thread(mounts.kernel_has, "ceph")
    if way.source.client == "kernel" and not kernel_has_it:
        why = "this kernel has no CephFS client (client: kernel)"
        raise way.error(why, "load the ceph module, or set client: auto")
    return kernel_has_it and way.source.client != "fuse"


async def make(folder: Path, way: Way, root: str, deadline: float) -> None:
    """Mount ``root``, a directory of the source's file system, in ``folder``. SourceError."""
    target = folder / POINT
    by_kernel = await uses_kernel(way)
    conf = await asyncio.to_thread(configure, folder, way, deadline)
    await asyncio.to_thread(target.mkdir, exist_ok=True, mode=0o700)
    if not by_kernel:
        await _mount_fuse(target, way, root, conf, deadline)
        return
    try:
        strings = kernel_options(way, root)
        await kit.child.call(cephfs_child.mount_kernel, str(target), strings, deadline=deadline)
    except kit.child.DeadlineError as error:
        raise way.explain("110") from error
    except OSError as error:
        if error.errno in _KEY_UNKNOWN and secrets.is_aes256k(way.secret):
            kernel = f"this kernel's client ({os.uname().release})"
            raise secrets.unknown(way.source.user, way.thing, kernel) from error
        raise way.explain(str(error.errno)) from error


def kernel_options(way: Way, root: str) -> dict[str, str]:
    """What the kernel's client is told. The key goes through fsconfig, which no process list
    shows."""
    protocol, hosts = monitors.one_protocol(way.addresses)
    strings = {
        "source": f"{','.join(hosts)}:{root}",
        "name": way.source.user,
        "secret": way.secret,
        "mds_namespace": way.source.filesystem,
        "mount_timeout": "10",
        # A client that the cluster shut out would answer EACCES until somebody unmounts it.
        "recover_session": "clean",
    }
    return strings | ({"ms_mode": "prefer-crc"} if protocol == "v2" else {})


async def _mount_fuse(target: Path, way: Way, root: str, conf: Path, deadline: float) -> None:
    source = way.source
    command = (
        *("ceph-fuse", "-f", "-c", str(conf), "-n", f"client.{source.user}", str(target)),
        *(f"--client_mountpoint={root}", f"--client_fs={source.filesystem}"),
        *("-o", "ro"),
    )
    try:
        mounted, said = await kit.child.call(
            cephfs_child.mount_fuse, str(target), command, deadline, deadline=deadline + 5
        )
    except FileNotFoundError as error:
        why = "this host has neither a CephFS kernel client nor ceph-fuse"
        raise way.error(why, "load the ceph module or install ceph-fuse") from error
    except (kit.child.DeadlineError, TimeoutError) as error:
        raise way.explain("110") from error
    if not mounted:
        number = re.findall(r"\((\d+)\)", said)
        # A monitor answered but did not send its settings: the user is not authorized.
        refused = "13" if "failed to fetch mon config" in said else ""
        failure = way.explain(number[-1] if number else refused)
        # A narrower directory may be tried after a refusal, and is no trouble then.
        tell = log.info if isinstance(failure, MayNotError) else log.error
        last = kit.redact.last(said.strip(), 200)
        tell("ceph-fuse failed", dataset=way.thing, root=root, said=last)
        raise failure
    await asyncio.to_thread(_move_out_of_our_cgroup, target)


def _move_out_of_our_cgroup(target: Path) -> None:
    """Whoever ends the agent kills everything in its cgroup; the mount must outlive that."""
    for pid in _daemons(str(target)):
        failed: list[str] = []
        for folder in cgroups():
            try:
                folder.mkdir(exist_ok=True)
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError as error:
                failed.append(str(error))
        if failed:
            log.warning("ceph-fuse stays in the agent's cgroup", error=kit.errors.some(failed))


def cgroups(top: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Where it goes: a cgroup of its own in the hierarchy of v2 and in each of v1; of cpuset the
    root, because one of its own would need settings. Whether or not they are there."""
    try:
        roots = [top] if (top / "cgroup.procs").exists() else sorted(top.iterdir())
    except OSError:
        return []
    roots = [each for each in roots if (each / "cgroup.procs").exists() and not each.is_symlink()]
    v2 = [each for each in roots if (each / "cgroup.controllers").exists()]
    rooted = [each for each in roots if (each / "cpuset.cpus").exists() and each not in v2]
    return [each if each in rooted else each / CGROUP for each in roots]


async def detach(target: Path) -> bool:
    """Detach the uppermost mount at ``target``; who reads through it goes on. Whether it left.

    It leaves the tree at once; the child may wait for the cluster after that.
    """
    before = mountinfo.top(target)
    with contextlib.suppress(OSError, kit.child.DeadlineError):
        await kit.child.call(mounts.detach, str(target), deadline=DETACH_SECONDS)
    now = mountinfo.top(target)
    return now is None or before is None or now.mount_id != before.mount_id


async def release(folder: Path) -> bool:
    """Unmount what is mounted in ``folder`` and delete its key; whether anything was mounted.

    InUseError while it is used: nothing is deleted then.
    """
    target = folder / POINT
    unmounted = False
    try:
        while mountinfo.top(target) is not None:  # several mounts may be stacked
            await kit.child.call(mounts.unmount, str(target), deadline=DETACH_SECONDS)
            unmounted = True
    except OSError as error:
        raise kit.errors.InUseError(
            f"source mount {target}", f"it cannot be unmounted ({error.strerror})",
            "end the processes that use it; it is tried again",
        ) from error  # fmt: skip
    await asyncio.to_thread(delete, folder, _FILES)
    return unmounted


def delete(folder: Path, names: Iterable[str]) -> None:
    """Files of a source and, once they are empty, its mount point and folder. OSError."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for made in (folder / POINT, folder):
        with contextlib.suppress(OSError):
            made.rmdir()


def _daemons(target: str) -> list[int]:
    found = []
    for pid in procfs.pids():
        with contextlib.suppress(OSError):  # just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"ceph-fuse") and os.fsencode(target) in words:
                found.append(pid)
    return found
