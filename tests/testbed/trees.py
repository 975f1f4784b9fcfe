"""Trees with every oddity, and a complete comparison of two trees.

Everything goes by directory descriptors: paths may be longer than 4096 bytes.
"""

import ctypes
import os
import random
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.testbed import grave, waiting

_libc = ctypes.CDLL(None, use_errno=True)
_BUFFER = memoryview(bytearray(1024 * 1024))
KEPT = ("system.posix_acl_access", "system.posix_acl_default")


@dataclass(frozen=True)
class Record:
    """All that must be equal of an entry."""

    kind: str
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    digest: str = ""
    target: bytes = b""
    xattrs: tuple[tuple[str, bytes], ...] = ()
    links: frozenset[bytes] = frozenset()  # names of the same file, its own included


def walk(root: Path | str) -> Iterator[tuple[bytes, int, bytes, os.stat_result]]:
    """(path, directory descriptor, name, stat) for everything below ``root``."""
    stack = [(b"", os.open(root, os.O_RDONLY | os.O_DIRECTORY))]
    while stack:
        path, directory = stack.pop()
        try:
            for text in os.listdir(directory):
                name = os.fsencode(text)
                status = os.stat(text, dir_fd=directory, follow_symlinks=False)
                full = path + b"/" + name if path else name
                yield full, directory, name, status
                if stat.S_ISDIR(status.st_mode):
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                    stack.append((full, os.open(text, flags, dir_fd=directory)))
        finally:
            os.close(directory)


def _xattrs(descriptor: int) -> tuple[tuple[str, bytes], ...]:
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno == 95:
            return ()
        raise
    kept = sorted(name for name in names if name.startswith("user.") or name in KEPT)
    return tuple((name, os.getxattr(descriptor, name)) for name in kept)


def _digest(descriptor: int) -> str:
    summed = xxhash.xxh3_128()
    while count := os.readv(descriptor, [_BUFFER]):
        summed.update(_BUFFER[:count])
    return summed.hexdigest()


def records(root: Path | str, *, content: bool = True) -> dict[bytes, Record]:
    """Every entry below ``root`` (the root itself as b''); sockets, fifos and devices too."""
    found: dict[bytes, Record] = {}
    groups: dict[tuple[int, int], set[bytes]] = {}
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found[b""] = _record(os.fstat(top), _xattrs(top))
    finally:
        os.close(top)
    for path, directory, name, status in walk(root):
        if stat.S_ISLNK(status.st_mode):
            link = os.readlink(name, dir_fd=directory)
            found[path] = _record(status, target=link)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
            try:
                digest = ""
                if stat.S_ISREG(status.st_mode):
                    if content:
                        digest = _digest(descriptor)
                    if status.st_nlink > 1:
                        groups.setdefault((status.st_dev, status.st_ino), set()).add(path)
                found[path] = _record(status, _xattrs(descriptor), digest)
            finally:
                os.close(descriptor)
        else:
            found[path] = _record(status)
    for group in groups.values():
        if len(group) > 1:
            for path in group:
                found[path] = Record(**{**vars(found[path]), "links": frozenset(group)})
    return found


def _record(
    status: os.stat_result,
    xattrs: tuple[tuple[str, bytes], ...] = (),
    digest: str = "",
    target: bytes = b"",
) -> Record:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    size = status.st_size if kind == "file" else 0
    return Record(
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_mtime_ns,
        size,
        digest,
        target,
        xattrs,
    )


def differences(
    here: dict[bytes, Record],
    there: dict[bytes, Record],
    *,
    without: frozenset[bytes] = frozenset(),
) -> list[str]:
    """What differs, a line each; ``without``: paths that ``there`` must not have."""
    found = []
    for path in sorted(here.keys() | there.keys()):
        a, b = here.get(path), there.get(path)
        if path in without:
            if b is not None:
                found.append(f"{path!r} is there and should not be")
        elif a is None or b is None:
            found.append(f"{path!r} is only in the {'second' if a is None else 'first'} tree")
        elif a != b:
            parts = [k for k in vars(a) if getattr(a, k) != getattr(b, k)]
            values = ", ".join(f"{k}: {getattr(a, k)!r} / {getattr(b, k)!r}" for k in parts)
            found.append(f"{path!r}: {values[:300]}")
    return found


def assert_equal(source: Path, copy: Path, *, without: frozenset[bytes] = frozenset()) -> None:
    found = differences(records(source), records(copy), without=without)
    with grave.wrong_bytes():
        assert not found, "\n".join(found[:20]) + f"\n{len(found)} differences"


def write(path: Path | bytes, data: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(data)


def plain(root: Path, files: int, *, directories: int = 8, seed: int = 1, mean: int = 8000) -> None:
    """``files`` ordinary files of up to twice ``mean`` bytes in ``directories`` directories."""
    generator = random.Random(seed)
    root.mkdir(parents=True, exist_ok=True)
    for number in range(directories):
        (root / f"d{number}").mkdir(exist_ok=True)
    for number in range(files):
        data = generator.randbytes(generator.randrange(1, 2 * mean))
        write(root / f"d{number % directories}" / f"f{number:05}", data)
    settle(root, seed)


def settle(root: Path, seed: int = 1) -> None:
    """Set times in the past, with nanoseconds; the deepest entries first."""
    generator = random.Random(seed)
    entries = sorted((p for p, *_ in walk(root)), key=len, reverse=True)
    for path in [*entries, b""]:
        if len(path) < 3000:
            moment = 1_500_000_000_000_000_000 + generator.randrange(10**17)
            os.utime(os.fsencode(root) + b"/" + path, ns=(moment, moment), follow_symlinks=False)


def odd(root: Path) -> frozenset[bytes]:
    """A tree with every oddity; returns the paths that no copy may have."""
    top = os.fsencode(root)
    os.makedirs(top + b"/plain/deeper", exist_ok=True)
    write(top + b"/plain/file", b"hello")
    write(top + b"/plain/empty", b"")
    os.mkdir(top + b"/empty directory")
    write(top + b"/not utf-8 \xff\xfe", b"bytes")
    os.mkdir(top + b"/dir \x80\x81")
    write(top + b"/dir \x80\x81/new\nline\ttab \\ back", b"odd")
    write(top + b"/" + b"n" * 255, b"long name")
    os.mkdir(top + b"/" + b"\xf0" * 255)
    write(top + b"/" + b"\xf0" * 255 + b"/" + b"\n" * 255, b"longest odd name")
    for name in (b"\\344", b"\\ud800", b"a\\nb", b"\\\\", b'"quoted"', b" ", b"-rf", b"*"):
        write(top + b"/plain/" + name, b"name " + name)
        os.mkdir(top + b"/plain/deeper/" + name)
    write(top + b"/plain/.hidden", b"dot")
    write(top + b"/plain/.wh.whiteout", b"looks like a whiteout of others")
    os.symlink(b"plain/file", top + b"/link")
    os.symlink(b"/does/not/exist/\xff", top + b"/dangling")
    os.symlink(b"plain", top + b"/link to directory")
    os.symlink(b"x" * 4000, top + b"/long link")
    _hard_links(top)
    _sparse(top)
    _owners_and_modes(top)
    _xattrs_and_acls(top)
    _deep(root)
    settle(root)
    return _special(top)


def _hard_links(top: bytes) -> None:
    os.mkdir(top + b"/hard")
    write(top + b"/hard/one", b"shared" * 5000)
    os.link(top + b"/hard/one", top + b"/hard/two")
    os.link(top + b"/hard/one", top + b"/plain/deeper/three")
    write(top + b"/hard/lonely", b"its other name is outside the tree")


def _sparse(top: bytes) -> None:
    os.mkdir(top + b"/sparse")
    for name, size, islands in (
        (b"all hole", 8 * 2**20, ()),
        (b"end hole", 8 * 2**20 + 17, (0, 3 * 2**20)),
        (b"start hole", 5 * 2**20 + 1, (5 * 2**20,)),
        (b"gibibytes", 3 * 2**30 + 5, (2**30, 3 * 2**30)),
    ):
        with open(top + b"/sparse/" + name, "wb") as stream:
            for at in islands:
                stream.seek(at)
                stream.write(b"!")
            stream.truncate(size)


def _owners_and_modes(top: bytes) -> None:
    os.mkdir(top + b"/modes")
    for number, mode in enumerate((0o000, 0o400, 0o644, 0o777, 0o4755, 0o2755, 0o6711, 0o1600)):
        path = top + b"/modes/%o" % mode
        write(path, b"mode")
        os.chown(path, 1000 + number, 2000 + number)
        os.chmod(path, mode)
    for mode in (0o700, 0o1777, 0o2775, 0o555):
        path = top + b"/modes/d%o" % mode
        os.mkdir(path)
        write(path + b"/in", b"in")
        os.chown(path, 65534, 65534)
        os.chmod(path, mode)
    os.lchown(top + b"/link", 1234, 4321)


def _xattrs_and_acls(top: bytes) -> None:
    os.mkdir(top + b"/xattrs")
    write(top + b"/xattrs/file", b"x")
    os.setxattr(top + b"/xattrs/file", "user.label", b"cat\x00\xff")
    os.setxattr(top + b"/xattrs/file", "user.empty", b"")
    os.setxattr(top + b"/xattrs", "user.on directory", b"d" * 1000)
    write(top + b"/xattrs/acl", b"acl")
    command = ["setfacl", "-m", "u:1001:rwx,g:2002:r", os.fsdecode(top + b"/xattrs/acl")]
    subprocess.run(command, check=True, timeout=waiting.limit(30))
    # Its children were there before its default ACL: they have none and must not get one.
    os.makedirs(top + b"/xattrs/default/before")
    write(top + b"/xattrs/default/before/file", b"f")
    command = ["setfacl", "-d", "-m", "u:1003:rx", os.fsdecode(top + b"/xattrs/default")]
    subprocess.run(command, check=True, timeout=waiting.limit(30))
    os.makedirs(top + b"/xattrs/default/after")


def _deep(root: Path) -> None:
    """A path of about 6,000 bytes, made by descriptors."""
    current = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(30):
        name = f"deep{number:02}-" + "y" * 190
        os.mkdir(name, dir_fd=current)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=current)
        os.close(current)
        current = below
    descriptor = os.open("bottom", os.O_WRONLY | os.O_CREAT, 0o640, dir_fd=current)
    os.write(descriptor, b"at the bottom")
    os.close(descriptor)
    os.symlink("bottom", "link at the bottom", dir_fd=current)
    os.close(current)


def _special(top: bytes) -> frozenset[bytes]:
    os.mkdir(top + b"/special")
    os.mkfifo(top + b"/special/fifo")
    os.mknod(top + b"/special/socket", stat.S_IFSOCK | 0o600)
    os.mknod(top + b"/special/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(top + b"/special/loop", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    # overlayfs takes a 0:0 character device in an upper layer for a whiteout
    os.mknod(top + b"/special/whiteout", stat.S_IFCHR | 0o600, os.makedev(0, 0))
    names = (b"fifo", b"socket", b"null", b"loop", b"whiteout")
    os.utime(top + b"/special", ns=(10**18, 10**18))
    os.utime(top, ns=(11 * 10**17, 11 * 10**17))
    return frozenset(b"special/" + name for name in names)


def sync(path: Path) -> None:
    """Flush the file system of ``path``.

    Not sync(2): that waits for every file system of the machine, and for ever if one of them hangs.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _libc.syncfs(descriptor):
            raise OSError(ctypes.get_errno(), "syncfs", str(path))
    finally:
        os.close(descriptor)


def drop_caches() -> None:
    """Page cache, dentries and inodes of the whole machine."""
    Path("/proc/sys/vm/drop_caches").write_text("3")


def allocated(root: Path) -> int:
    """Bytes of the disk that a tree takes, each file once, its directories included."""
    seen: dict[tuple[int, int], int] = {}
    top = os.stat(root)
    seen[top.st_dev, top.st_ino] = top.st_blocks
    for _, _, _, status in walk(root):
        seen[status.st_dev, status.st_ino] = status.st_blocks
    return sum(seen.values()) * 512
