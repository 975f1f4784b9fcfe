"""A CephFS directory that the agent mounts read-only, in a way that outlives the agent.

The kernel client is used where the kernel has it, else ceph-fuse. ceph-fuse becomes a daemon and is
moved out of the agent's cgroup, so that neither the end of the agent nor that of its service ends
the mount: jobs read through it.

``shows.json`` beside the mount point tells which file system, path and user a mount was made for. A
mount that an agent with other settings left is detached, and nothing is read from it.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
import kit.processes
from cache.settings import CephfsSource, DatasetSettings
from cache.sources import base
from cache.store import tree
from ceph import monitors, secrets
from ceph.monitors import Address
from ceph.protocol import Access
from linux import mountinfo, mounts

log = structlog.get_logger("source")

# Inodes that ceph-fuse keeps, about 1.5 KiB each. With its default of 16,384 every walk over a
# larger tree asks the MDS for each file again.
CLIENT_CACHE_INODES = 400_000
CGROUP = "nodeagent-sources"
DETACH_SECONDS = 15.0

_CONF = """\
[global]
mon host = {monitors}
keyring = {keyring}
log file =
admin socket =
[client]
client cache size = {inodes}
client mount timeout = {timeout}
rados mon op timeout = {timeout}
# The kernel checks modes itself (default permissions). Looking up the groups of every caller would
# cost ceph-fuse a quarter of its CPU.
fuse default permissions = true
client permissions = false
fuse set user groups = false
debug client = 0/0
debug ms = 0/0
debug objecter = 0/0
debug objectcacher = 0/0
"""

SHOWN = "shows.json"


class Cephfs:
    """``folder``: mount point, ceph.conf and keyring; only root can read them."""

    def __init__(self, dataset: DatasetSettings, source: CephfsSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._target = folder / "mount"
        self._shown = folder / SHOWN
        self._thing = f"dataset {dataset.name}: CephFS {source.filesystem}:{source.path}"
        self.immutable = dataset.freshness == "snapshot"

    @property
    def identity(self) -> dict[str, Any]:
        source = self._source
        return {
            "kind": "cephfs",
            "filesystem": source.filesystem,
            "path": source.path,
            "snapshot": source.snapshot,
        }

    @property
    def _root(self) -> str:
        if self._source.snapshot is None:
            return str(self._target)
        return f"{self._target}/.snap/{self._source.snapshot}"

    @property
    def _shows(self) -> str:
        """What shows.json must contain for a mount with these settings."""
        source = self._source
        shows = {"filesystem": source.filesystem, "path": source.path, "user": source.user}
        return json.dumps(shows, sort_keys=True)

    def _is_ours(self) -> bool:
        try:
            return self._shown.read_text(encoding="ascii") == self._shows
        except (OSError, UnicodeDecodeError):
            return False

    async def _detach_another(self) -> None:
        """Detach a mount for other settings; the view keeps showing it. SourceError if it stays."""
        while _mounted_at(self._target) is not None and not self._is_ours():
            log.warning(
                "source mount was made for other settings; mounting again", source=self._thing
            )
            before = _mounted_at(self._target)
            # The mount leaves the tree at once; the child may wait for the cluster after that.
            with contextlib.suppress(OSError, kit.child.DeadlineError):
                await kit.child.call(mounts.detach, str(self._target), deadline=DETACH_SECONDS)
            if _mounted_at(self._target) == before:
                why = f"an earlier mount at {self._target} cannot be detached"
                raise self._error(why, "see the kernel log")

    async def reach(self, deadline: float) -> base.Reached:
        await self._detach_another()
        if _mounted_at(self._target) is None:
            await self._mount(deadline)
        try:
            root = base.Root(**await kit.child.call(base.look, self._root, deadline=deadline))
        except kit.child.DeadlineError as error:
            why = f"the cluster did not answer within {deadline:g}s"
            raise self._error(why, "see 'ceph status'") from error
        except OSError as error:
            if error.errno in tree.SOURCE_GONE:  # its daemon died, or the cluster shut it out
                log.warning("source mount is dead; mounting again", source=self._thing)
                mounts.detach(self._target)
            if error.errno == errno.ENOENT and self._source.snapshot is not None:
                why = f"it has no snapshot {self._source.snapshot!r}"
                raise self._error(why, "make it, or set another one") from error
            raise base.explain(self._thing, error) from error
        mounted = _mounted_at(self._target)
        kernel = mounted is not None and mounted.fstype == "ceph"
        device = ""
        if mounted is not None:
            device = f"{mounted.major}:{mounted.minor} {self._root} {self._shows}"
        return base.Reached(
            root=self._root,
            device=device,
            stamp=root.stamp,
            client="kernel" if kernel else "ceph-fuse",
            files=root.files,
            bytes=root.bytes,
            # ceph.conf and keyring are written for ceph-fuse only.
            native=self._access() if self.immutable and not kernel else None,
        )

    def _access(self) -> Access:
        return Access(
            conf=str(self._folder / "ceph.conf"),
            user=self._source.user,
            filesystem=self._source.filesystem,
            root=f"{self._source.path.rstrip('/')}/.snap/{self._source.snapshot}",
        )

    async def _mount(self, deadline: float) -> None:
        source = self._source
        secret = secrets.read(source.secret_file, source.user, self._thing)
        addresses = await monitors.resolve(source.monitors)
        if not addresses:
            raise self._explain("110")
        self._target.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        kernel_has_it = await asyncio.to_thread(mounts.kernel_has, "ceph")
        if source.client == "kernel" and not kernel_has_it:
            why = "this kernel has no CephFS client (client: kernel)"
            raise self._error(why, "load the ceph module, or set client: auto")
        # Written before the mount, so that a mount is known even if the agent is killed meanwhile.
        kit.files.save(self._shown, self._shows.encode("ascii"))
        if kernel_has_it and source.client != "fuse":
            try:
                await kit.child.call(
                    mount_kernel, str(self._target), addresses, source.filesystem,
                    source.path, source.user, secret, deadline=deadline,
                )  # fmt: skip
            except kit.child.DeadlineError as error:
                raise self._explain("110") from error
            except OSError as error:
                raise self._explain(str(error.errno)) from error
            return
        await self._mount_fuse(secret, addresses, deadline)

    async def _mount_fuse(self, secret: str, addresses: list[Address], deadline: float) -> None:
        source = self._source
        keyring, conf = self._folder / "keyring", self._folder / "ceph.conf"
        kit.files.save(keyring, f"[client.{source.user}]\nkey = {secret}\n".encode())
        text = _CONF.format(
            monitors=" ".join(map(str, addresses)), keyring=keyring, inodes=CLIENT_CACHE_INODES,
            timeout=max(1, int(deadline) - 3),
        )  # fmt: skip
        kit.files.save(conf, text.encode())
        command = (
            *("ceph-fuse", "-c", str(conf), "-n", f"client.{source.user}", str(self._target)),
            *(f"--client_mountpoint={source.path}", f"--client_fs={source.filesystem}"),
            *("-o", "ro"),
        )
        # The agent's environment may have Ceph settings or secrets.
        environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}
        try:
            ended = await kit.processes.run(
                command, about=self._thing, deadline=deadline + 5, environment=environment,
                outlives=True,
            )  # fmt: skip
        except FileNotFoundError as error:
            why = "this host has neither a CephFS kernel client nor ceph-fuse"
            raise self._error(why, "load the ceph module or install ceph-fuse") from error
        except kit.processes.DeadlineError as error:
            raise self._explain("110") from error
        if ended.code or _mounted_at(self._target) is None:
            said = (ended.out + ended.err).decode(errors="replace")
            number = re.findall(r"\((\d+)\)", said)
            # A monitor answered but did not send its settings: the user is not authorized.
            refused = "13" if "failed to fetch mon config" in said else ""
            log.error("ceph-fuse failed", dataset=self._thing, said=said.strip()[-200:])
            raise self._explain(number[-1] if number else refused)
        await asyncio.to_thread(self._move_out_of_our_cgroup)

    def _error(self, cause: str, remedy: str) -> kit.errors.SourceError:
        return kit.errors.SourceError(self._thing, cause, f"{remedy}; it is tried again")

    def _explain(self, number: str) -> kit.errors.SourceError:
        """``number``: the errno of a mount, as text; '' when there is none."""
        source = self._source
        match number:
            case "1" | "13" | "22":
                return self._error(
                    f"client.{source.user} is refused: wrong key, or no right to {source.path}",
                    "correct user and secret_file, or the user's caps",
                )
            case "2":
                return self._error(
                    f"path {source.path} or file system {source.filesystem!r} does not exist",
                    "create it, or correct the settings",
                )
            case "5" | "110" | "111" | "113":
                return self._error(
                    f"no monitor of {', '.join(source.monitors)} answers",
                    "check the addresses and the network",
                )
        return self._error(f"mounting failed ({number or 'no reason given'})", "see the log")

    def _move_out_of_our_cgroup(self) -> None:
        """A service manager kills everything in the agent's cgroup; the mount must outlive that."""
        for pid in _daemons(str(self._target)):
            for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
                if (root / "cgroup.procs").exists():
                    try:
                        (root / CGROUP).mkdir(exist_ok=True)
                        (root / CGROUP / "cgroup.procs").write_text(str(pid))
                    except OSError as error:
                        log.warning("ceph-fuse stays in the agent's cgroup", error=str(error))

    async def release(self) -> None:
        await release(self._folder)


def _mounted_at(target: Path) -> mountinfo.Mount | None:
    stacked = mountinfo.at(str(target), mountinfo.read())
    return stacked[-1] if stacked else None


async def release(folder: Path) -> None:
    """Unmount what a source mounted in its folder and delete its key."""
    target = folder / "mount"
    with contextlib.suppress(OSError):
        while _mounted_at(target) is not None:  # several mounts may be stacked
            await kit.child.call(mounts.unmount, str(target), deadline=DETACH_SECONDS)
    if _mounted_at(target) is None:
        for name in ("keyring", "ceph.conf", SHOWN):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            target.rmdir()
            folder.rmdir()


def _daemons(target: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"ceph-fuse") and os.fsencode(target) in words:
                found.append(int(entry.name))
    return found


def mount_kernel(
    target: str, given: list[list[Any]], filesystem: str, path: str, user: str, secret: str
) -> None:
    """Mount with the kernel client. The key goes through fsconfig, which no process list shows."""
    addresses = [Address(*each) for each in given]
    # The kernel speaks one protocol to all monitors: v1 when any of them does.
    protocol = "v1" if any(address.protocol == "v1" for address in addresses) else "v2"
    hosts = [str(a).partition(":")[2] for a in addresses if a.protocol == protocol]
    strings = {
        "source": f"{','.join(hosts)}:{path}",
        "name": user,
        "secret": secret,
        "mds_namespace": filesystem,
        "mount_timeout": "10",
    }
    if protocol == "v2":
        strings["ms_mode"] = "prefer-crc"
    tree = mounts.new_filesystem("ceph", strings, ("ro",), mounts.READ_ONLY_DATA)
    with kit.files.closing(tree):
        mounts.attach(tree, target)
