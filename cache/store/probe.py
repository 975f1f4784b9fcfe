"""Looks at the store's disk, in a process of its own that may hang: ``main`` serves one store.

A look costs a few system calls: is the same file system still there and writable, does the disk
answer a read that no cache answers, and has the kernel said that it fails.
"""

import errno
import mmap
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import kit.errors
import kit.files
import kit.messages
from cache.store import disk
from linux import kmsg

_BLOCK = 4096
_TRIAL = ".trial"
# What the block layer, ext4, jbd2 and XFS say of a device that fails (kernel 5.15 to 6.18).
_SAYS = re.compile(
    r"(?:I/O|medium|target|protection|timeout) error(?: on)?,? dev (?P<a>[\w!/-]+)"
    r"|EXT4-fs error \(device (?P<b>[\w!/-]+)\)"
    r"|EXT4-fs \((?P<c>[\w!/-]+)\): .*(?:[Rr]emounting filesystem read-only|shut down)"
    r"|Aborting journal on device (?P<d>[\w!/-]+?)-\d+"
    r"|XFS \((?P<e>[\w!/-]+)\): .*(?:error|orruption|[Ss]hut(?:ting)? ?down)"
    r"|(?P<f>nvme\d+n\d+|sd[a-z]+): .*(?:removed|offline|capacity change .* to 0)"
)


@dataclass(frozen=True)
class Look:
    store: str
    state_dir: str
    disk: str | None  # of the settings
    device: int  # that the store lay on at the last look; 0: not known
    thorough: bool  # write as well: it failed before
    heard: int = -1  # the last line of the kernel's log that was read; -1: what comes from now on


@dataclass(frozen=True)
class Seen:
    fault: str = ""
    gone: bool = False
    missing: bool = False  # as in health.Sign
    device: int = 0
    heard: int = -1  # as in Look; -1: the log cannot be read
    errors: int | None = None  # that ext4 has counted, over all its mounts
    size: int = 0  # of the file system, bytes; 0: not known
    free: int = 0  # bytes that programs other than root's may use
    inodes: int = 0  # 0: it does not count them
    free_inodes: int = 0


def names_of(device: int, sys: Path = Path("/sys")) -> set[str]:
    """The kernel's names of a device number and of all that it lies on."""
    found: set[str] = set()
    waiting = [sys / f"dev/block/{os.major(device)}:{os.minor(device)}"]
    while waiting:
        path = waiting.pop()
        try:
            real = path.resolve(strict=True)
        except OSError:
            continue
        if real.name in found:
            continue
        found.add(real.name)
        if (real / "partition").exists():
            waiting.append(real.parent)
        if (real / "slaves").is_dir():
            waiting += list((real / "slaves").iterdir())
    return found


def named(text: str) -> str:
    """The device that a line of the kernel's log says fails, '' for any other line."""
    match = _SAYS.search(text)
    return next((name for name in match.groups() if name), "") if match else ""


class Probe:
    def __init__(self) -> None:
        self._device = 0
        self._names: set[str] = set()
        self._log: kmsg.Kmsg | None = None
        self._heard = -1
        self._lines: list[str] = []

    def look(self, wanted: Look) -> Seen:
        seen = self._look(wanted)
        errors = None if self._device == 0 else _errors_of(self._names)
        return replace(seen, heard=self._heard, errors=errors)

    def _look(self, wanted: Look) -> Seen:
        said = self._said(wanted.heard)
        try:
            device = os.stat(wanted.store).st_dev
            if device != wanted.device:  # mount tables are long: not at each look
                _check(wanted)
            if device != self._device:
                self._device, self._names = device, names_of(device)
                said = self._named() if wanted.device == device else ""
            space = os.statvfs(wanted.store)
            if space.f_flag & os.ST_RDONLY:
                return Seen("it has become read-only")
            _read(f"{wanted.store}/{disk.MARKER}")
            if wanted.thorough:
                _write(f"{wanted.store}/{_TRIAL}")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return Seen(said, device=device)
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return _missing(wanted)
            gone = error.errno in (errno.ENODEV, errno.ENXIO)
            return Seen(f"its disk fails ({error.strerror})", gone=gone)
        except kit.errors.HostError as error:
            return Seen(error.cause, gone=True)
        return Seen(
            said, device=device, size=space.f_blocks * space.f_frsize,
            free=space.f_bavail * space.f_frsize, inodes=space.f_files,
            free_inodes=space.f_favail,
        )  # fmt: skip

    def _said(self, heard: int) -> str:
        """What the kernel has said of the disk since the last look."""
        if self._log is None:
            try:
                self._log = kmsg.Kmsg()
            except OSError:
                return ""  # not allowed: the other signs remain
        first, self._lines = heard < 0, []
        self._heard = max(self._heard, heard, 0)
        while records := self._log.read():
            # A probe that follows one which hung tells what that one missed, and no more.
            if not first:
                self._lines += [each.text for each in records if each.sequence > heard]
            self._heard = max(self._heard, records[-1].sequence)
        return self._named()

    def _named(self) -> str:
        for text in self._lines:
            if named(text) in self._names:
                return f"the kernel says: {text[:160]}"
        return ""


def _check(wanted: Look) -> None:
    """HostError unless the store's disk is mounted."""
    named_disk = None if wanted.disk is None else Path(wanted.disk)
    disk.check(wanted.store, named_disk, Path(wanted.state_dir))


def _missing(wanted: Look) -> Seen:
    """Nothing fails: somebody deleted the store, mounted a new disk, or unmounted the disk."""
    try:
        _check(wanted)
        if disk.has_generations(Path(wanted.store)):  # 'rm -rf STORE/*' is perhaps under way
            return Seen(f"its {disk.MARKER} is gone, and generations are left", gone=True)
    except kit.errors.HostError as error:
        return Seen(error.cause, gone=True)
    except OSError as error:
        why = f"generations go while it is looked at ({error.strerror})"
        return Seen(why, gone=True)
    return Seen("no store is there", gone=True, missing=True)


def _errors_of(names: set[str], sys: Path = Path("/sys")) -> int | None:
    """Errors that an ext4 remembers in its superblock; None for another file system."""
    for name in names:
        try:
            return int((sys / "fs/ext4" / name / "errors_count").read_text())
        except (OSError, ValueError):
            continue
    return None


def _read(path: str) -> None:
    """From the disk, past the page cache where the file system allows it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with kit.files.closing(descriptor), mmap.mmap(-1, _BLOCK) as buffer:
        os.preadv(descriptor, [buffer], 0)


def _write(path: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with kit.files.closing(os.open(path, flags, 0o600)) as descriptor:
        os.write(descriptor, bytes(_BLOCK))
        os.fsync(descriptor)
    os.unlink(path)


def main() -> None:
    kit.messages.serve(Look, Probe().look)
