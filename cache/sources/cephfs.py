"""A CephFS directory, mounted read-only by the agent in a way that outlives it.

The kernel client where there is one; else ceph-fuse, which becomes a daemon of its own and is moved
out of the agent's cgroup, so that neither the agent's end nor its service's takes it away.
"""

import asyncio
import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import structlog

import kit.child
import kit.errors
import kit.files
from cache.settings import CephfsSource, DatasetSettings
from cache.sources import monitors, reach
from linux import mountinfo, mounts

log = structlog.get_logger("source")

# Inodes that ceph-fuse keeps. Its default of 16,384 makes every walk over a larger tree ask the MDS
# for each file again; one inode costs it about 1.5 KiB.
CLIENT_CACHE_INODES = 400_000
_CGROUP = "nodeagent-sources"
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
# The kernel checks modes itself (default permissions): ceph-fuse need not look up the groups of
# every caller, which costs a quarter of its CPU.
fuse default permissions = true
client permissions = false
fuse set user groups = false
debug client = 0/0
debug ms = 0/0
debug objecter = 0/0
debug objectcacher = 0/0
"""

SHOWN = "shows.json"
_SECRET = re.compile(r"^[A-Za-z0-9+/]{20,}={0,2}$")


def read_secret(path: Path, user: str, thing: str) -> str:
    """The key in a bare secret file or in a keyring. SourceError; the key is never in the text."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise kit.errors.SourceError(
            thing, f"secret_file {path} cannot be read ({what})", "put the user's key there"
        ) from error
    if "[" in text:
        section = ""
        for line in text.splitlines():
            stripped = line.strip()
            if stripped.startswith("["):
                section = stripped.strip("[]")
            key, equals, value = stripped.partition("=")
            if equals and key.strip() == "key" and section == f"client.{user}":
                text = value.strip()
                break
        else:
            raise kit.errors.SourceError(
                thing,
                f"secret_file {path} has no key for client.{user}",
                "add it, or name the user",
            )
    if not _SECRET.match(text):
        raise kit.errors.SourceError(
            thing,
            f"secret_file {path} holds no Ceph key",
            "put the output of 'ceph auth print-key' there",
        )
    return text


class Cephfs:
    """``folder`` holds the mount point and, readable by root only, what ceph-fuse reads."""

    def __init__(self, dataset: DatasetSettings, source: CephfsSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._target = folder / "mount"
        self._shown = folder / SHOWN  # what was asked of the mount at the target
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

    def _mounted(self) -> mountinfo.Mount | None:
        return _mounted_at(self._target)

    @property
    def _shows(self) -> str:
        """What a mount of ours is of: one line of JSON. An adopted mount must say the same."""
        source = self._source
        shows = {"filesystem": source.filesystem, "path": source.path, "user": source.user}
        return json.dumps(shows, sort_keys=True)

    def _is_ours(self) -> bool:
        """Whether the mount at the target was made for these settings."""
        try:
            return self._shown.read_text(encoding="ascii") == self._shows
        except (OSError, UnicodeDecodeError):
            return False

    async def _let_go_of_another(self) -> None:
        """Detach a mount that an agent with other settings left; its view keeps what it shows.

        SourceError while it does not go: nothing may be read from it as if it were ours.
        """
        while self._mounted() is not None and not self._is_ours():
            log.warning("source mount is of other settings, mounting anew", source=self._thing)
            before = self._mounted()
            # Out of the tree at once; what waits for the cluster after that waits in the child.
            with contextlib.suppress(OSError, kit.child.DeadlineError):
                await kit.child.call(mounts.detach, str(self._target), deadline=DETACH_SECONDS)
            if self._mounted() == before:
                raise kit.errors.SourceError(
                    self._thing,
                    f"an earlier mount at {self._target} does not go",
                    "see the kernel log; it is tried again",
                )

    async def reach(self, deadline: float) -> reach.Reached:
        await self._let_go_of_another()
        if self._mounted() is None:
            await self._mount(deadline)
        try:
            found = await kit.child.call(reach.look, self._root, deadline=deadline)
        except kit.child.DeadlineError as error:
            raise kit.errors.SourceError(
                self._thing,
                f"the cluster did not answer within {deadline:g}s",
                "see 'ceph status'; it is tried again",
            ) from error
        except OSError as error:
            if error.errno in (107, 108):  # ENOTCONN, ESHUTDOWN: its daemon died, or it is fenced
                log.warning("source mount is dead, mounting anew", source=self._thing)
                mounts.detach(self._target)
            if error.errno == 2 and self._source.snapshot is not None:
                raise kit.errors.SourceError(
                    self._thing,
                    f"it has no snapshot {self._source.snapshot!r}",
                    "make it, or name another; it is tried again",
                ) from error
            raise reach.explain(self._thing, error) from error
        mounted = self._mounted()
        kernel = mounted is not None and mounted.fstype == "ceph"
        native = None
        if self.immutable and not kernel:
            native = {
                "conf": str(self._folder / "ceph.conf"),
                "user": self._source.user,
                "filesystem": self._source.filesystem,
                "root": f"{self._source.path.rstrip('/')}/.snap/{self._source.snapshot}",
            }
        device = ""
        if mounted is not None:
            device = f"{mounted.major}:{mounted.minor} {self._root} {self._shows}"
        client = "kernel" if kernel else "ceph-fuse"
        return reach.Reached(
            self._root, device, found["stamp"], client, found["files"], found["bytes"], native
        )

    async def _mount(self, deadline: float) -> None:
        source = self._source
        secret = read_secret(source.secret_file, source.user, self._thing)
        addresses = await monitors.resolve(source.monitors)
        if not addresses:
            raise self._explain("110", deadline)
        self._target.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.chmod(0o700)
        kernel_has_it = await asyncio.to_thread(has_kernel_client)
        if source.client == "kernel" and not kernel_has_it:
            raise kit.errors.SourceError(
                self._thing,
                "this kernel has no CephFS client (client: kernel)",
                "load the ceph module, or set client: auto",
            )
        # Before the mount: one whose maker was killed in between is known for what it is.
        kit.files.save(self._shown, self._shows.encode("ascii"))
        if kernel_has_it and source.client != "fuse":
            try:
                await kit.child.call(
                    mount_kernel, str(self._target), addresses, source.filesystem,
                    source.path, source.user, secret, deadline=deadline,
                )  # fmt: skip
            except kit.child.DeadlineError as error:
                raise self._explain("110", deadline) from error
            except OSError as error:
                raise self._explain(str(error.errno), deadline) from error
            return
        await self._mount_fuse(secret, addresses, deadline)

    async def _mount_fuse(
        self, secret: str, addresses: list[tuple[str, str, int]], deadline: float
    ) -> None:
        source = self._source
        keyring, conf = self._folder / "keyring", self._folder / "ceph.conf"
        kit.files.save(keyring, f"[client.{source.user}]\nkey = {secret}\n".encode())
        text = _CONF.format(
            monitors=" ".join(monitors.written(*address) for address in addresses),
            keyring=keyring,
            inodes=CLIENT_CACHE_INODES,
            timeout=max(1, int(deadline) - 3),
        )
        kit.files.save(conf, text.encode())
        command = (
            *("ceph-fuse", "-c", str(conf), "-n", f"client.{source.user}", str(self._target)),
            *(f"--client_mountpoint={source.path}", f"--client_fs={source.filesystem}"),
            *("-o", "ro"),
        )
        # Neither the caller's Ceph settings nor anything secret comes along.
        environment = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                cwd="/",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise kit.errors.SourceError(
                self._thing,
                "neither a CephFS kernel client nor ceph-fuse is on this host",
                "load the ceph module or install ceph-fuse",
            ) from error
        try:
            async with asyncio.timeout(deadline + 5):
                out, _ = await process.communicate()
        except TimeoutError as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            raise self._explain("110", deadline) from error
        if process.returncode or self._mounted() is None:
            said = out.decode(errors="replace")
            number = re.findall(r"\((\d+)\)", said)
            # A monitor answered, yet would not tell its settings: we were not let in.
            refused = "13" if "failed to fetch mon config" in said else ""
            log.error("ceph-fuse failed", dataset=self._thing, said=said.strip()[-200:])
            raise self._explain(number[-1] if number else refused, deadline)
        await asyncio.to_thread(self._move_out_of_our_cgroup)

    def _explain(self, number: str, deadline: float) -> kit.errors.SourceError:
        source = self._source
        asked = ", ".join(source.monitors)
        again = "it is tried again"
        causes = {
            "1": (
                f"client.{source.user} is refused: wrong key, or no right to {source.path}",
                f"correct user and secret_file, or the user's caps; {again}",
            ),
            "2": (
                f"there is no path {source.path} or no file system {source.filesystem!r}",
                f"create it, or correct the settings; {again}",
            ),
            "110": (
                f"no monitor of {asked} answers",
                f"check the addresses and the network; {again}",
            ),
        }
        causes["13"] = causes["22"] = causes["1"]
        causes["5"] = causes["111"] = causes["113"] = causes["110"]
        cause, remedy = causes.get(
            number, (f"mounting failed ({number or 'no reason given'})", f"see the log; {again}")
        )
        return kit.errors.SourceError(self._thing, cause, remedy)

    def _move_out_of_our_cgroup(self) -> None:
        """A service manager ends what is in the agent's cgroup; the mount must outlive that."""
        for pid in _daemons(str(self._target)):
            for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
                if (root / "cgroup.procs").exists():
                    try:
                        (root / _CGROUP).mkdir(exist_ok=True)
                        (root / _CGROUP / "cgroup.procs").write_text(str(pid))
                    except OSError as error:
                        log.warning("ceph-fuse stays in the agent's cgroup", error=str(error))

    async def release(self) -> None:
        """Unmount all that is there; who reads through a view of it is InUseError's business."""
        await let_go(self._folder)


def _mounted_at(target: Path) -> mountinfo.Mount | None:
    """What shows at ``target``."""
    stacked = mountinfo.at(str(target), mountinfo.read())
    return stacked[-1] if stacked else None


async def let_go(folder: Path) -> None:
    """Unmount what a source mounted in its folder, and delete the key with it."""
    target = folder / "mount"
    with contextlib.suppress(OSError):
        while _mounted_at(target) is not None:  # mounts that were made at one time are stacked
            await kit.child.call(unmount, str(target), deadline=DETACH_SECONDS)
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


def has_kernel_client() -> bool:
    """Whether the kernel has CephFS, by module if need be."""
    if "\tceph\n" in Path("/proc/filesystems").read_text():
        return True
    modules = Path("/lib/modules") / os.uname().release / "modules.dep"
    try:
        known = "/ceph.ko" in modules.read_text()
    except OSError:
        return False
    if known and os.spawnlp(os.P_WAIT, "modprobe", "modprobe", "-q", "ceph") == 0:
        return "\tceph\n" in Path("/proc/filesystems").read_text()
    return False


def mount_kernel(
    target: str,
    addresses: list[tuple[str, str, int]],
    filesystem: str,
    path: str,
    user: str,
    secret: str,
) -> None:
    """Mount by the kernel client; the key goes through fsconfig, which no process list shows."""
    # The kernel speaks one protocol to all monitors; the old one where any of them has it.
    protocol = "v1" if any(address[0] == "v1" for address in addresses) else "v2"
    hosts = [monitors.written(*a).partition(":")[2] for a in addresses if a[0] == protocol]
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
    try:
        mounts.attach(tree, target)
    finally:
        os.close(tree)


def unmount(target: str) -> None:
    """Runs in a child. OSError EBUSY while it is used."""
    mounts.unmount(target)
