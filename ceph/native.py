"""Reading CephFS past the mount: listings by libcephfs, small files by librados (``ceph.objects``).

One upcall-free listing gives names, sizes, owners and whether there are xattrs; the data of a
small file is one object, read without asking the MDS. That is correct only in a snapshot: a listing
with synchronous attributes waits until every client's dirty data of an entry is flushed, and
nothing changes afterwards. What is not plain (other pool, striping, holes, inline data, more than
one object, xattrs, hard links) shows in its attributes or by an object whose length differs from
the file's size; it has to be read through the mount.

librados and libcephfs block: only processes that may be killed import this module. Source of the
layouts: cephfs/libcephfs.h and ceph_ll_client.h of Ceph 16.
"""

import ctypes as c
import errno
import functools
import stat
from collections.abc import Iterator, Sequence
from typing import Any

from ceph import objects
from ceph.objects import Layout, Location
from ceph.protocol import Access as Access
from ceph.protocol import Entry

OBJECT_BYTES = 4 * 1024 * 1024
_SYNC_AS_STAT = 0
_WANT_BASIC = 0x17FF  # CEPH_STATX_BASIC_STATS without btime, and CEPH_STATX_VERSION
_XATTR_BYTES = 65536
# The MDS truncates objects a moment after it has truncated a file. A snapshot in between has a file
# that is cut, perhaps grown again, and an object with the bytes of before, which the mount does not
# show and an object read does. So what changed this shortly before the snapshot, by the clocks of
# clients and MDS, is read through the mount.
RECENT_SECONDS = 10


class _Time(c.Structure):
    _fields_ = (("sec", c.c_long), ("nsec", c.c_long))

    @property
    def nanoseconds(self) -> int:
        return int(self.sec) * 1_000_000_000 + int(self.nsec)


class _Statx(c.Structure):
    _fields_ = (
        ("mask", c.c_uint32),
        ("blksize", c.c_uint32),
        ("nlink", c.c_uint32),
        ("uid", c.c_uint32),
        ("gid", c.c_uint32),
        ("mode", c.c_uint16),
        ("ino", c.c_uint64),
        ("size", c.c_uint64),
        ("blocks", c.c_uint64),
        ("dev", c.c_uint64),
        ("rdev", c.c_uint64),
        ("atime", _Time),
        ("ctime", _Time),
        ("mtime", _Time),
        ("btime", _Time),
        ("version", c.c_uint64),
    )


class _Dirent(c.Structure):
    _fields_ = (
        ("ino", c.c_uint64),
        ("off", c.c_int64),
        ("reclen", c.c_uint16),
        ("type", c.c_uint8),
        ("name", c.c_char * 256),
    )


def available() -> bool:
    """Whether this host has the bindings."""
    return objects.available() and _library() is not None


@functools.cache
def _library() -> Any:
    try:
        library = c.CDLL("libcephfs.so.2", use_errno=True)
    except OSError:
        return None
    p, size_t = c.c_void_p, c.c_size_t
    library.ceph_create.argtypes = (c.POINTER(p), c.c_char_p)
    library.ceph_opendir.argtypes = (p, c.c_char_p, c.POINTER(p))
    library.ceph_readdirplus_r.argtypes = (
        *(p, p, c.POINTER(_Dirent), c.POINTER(_Statx)),
        *(c.c_uint, c.c_uint, c.POINTER(p)),
    )
    library.ceph_ll_listxattr.argtypes = (p, p, c.c_char_p, size_t, c.POINTER(size_t), p)
    library.ceph_getxattr.argtypes = (p, c.c_char_p, c.c_char_p, p, size_t)
    library.ceph_ll_put.argtypes = (p, p)
    library.ceph_mount_perms.restype = p
    for name, arguments in (
        ("ceph_conf_read_file", (p, c.c_char_p)),
        ("ceph_conf_set", (p, c.c_char_p, c.c_char_p)),
        ("ceph_select_filesystem", (p, c.c_char_p)),
        ("ceph_mount", (p, c.c_char_p)),
        ("ceph_mount_perms", (p,)),
        ("ceph_unmount", (p,)),
        ("ceph_release", (p,)),
        ("ceph_closedir", (p, p)),
        ("ceph_statx", (p, c.c_char_p, c.POINTER(_Statx), c.c_uint, c.c_uint)),
        ("ceph_get_path_pool_name", (p, c.c_char_p, c.c_char_p, size_t)),
    ):
        getattr(library, name).argtypes = arguments
    return library


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(-result, what)
    return result


class Listing:
    def __init__(self, access: Access) -> None:
        """Connects. OSError when the cluster does not answer or refuses the user."""
        self._lib = _library()
        self._snapshot = access.snapshot
        # A user of ``ceph fs authorize FS USER /data r`` may mount /data, and nothing above it.
        top = access.top.encode("utf-8", "surrogateescape").rstrip(b"/")
        self._root = access.root.encode("utf-8", "surrogateescape").rstrip(b"/").removeprefix(top)
        self._mount = c.c_void_p()
        _checked(self._lib.ceph_create(c.byref(self._mount), access.user.encode()), "ceph_create")
        try:
            self._connect(access, top)
        except OSError:
            self._lib.ceph_release(self._mount)
            raise
        self._perms = self._lib.ceph_mount_perms(self._mount)
        self._recent_ns = self._snapped_ns() - RECENT_SECONDS * 1_000_000_000

    def _snapped_ns(self) -> int:
        """When the snapshot was made, in Unix time; 0 when the cluster does not tell."""
        value = c.create_string_buffer(64)
        path = self._root or b"/"
        length = self._lib.ceph_getxattr(self._mount, path, b"ceph.snap.btime", value, len(value))
        if length <= 0:
            return 0  # then all of it counts as recent
        seconds, _, nanoseconds = value.raw[:length].rstrip(b"\0").partition(b".")
        return int(seconds) * 1_000_000_000 + int(nanoseconds or b"0")

    def _connect(self, access: Access, top: bytes) -> None:
        lib = self._lib
        conf = access.conf.encode("utf-8", "surrogateescape")
        _checked(lib.ceph_conf_read_file(self._mount, conf), "ceph_conf_read_file")
        for key, value in ((b"client_cache_size", b"100000"), (b"client_mount_timeout", b"15")):
            _checked(lib.ceph_conf_set(self._mount, key, value), "ceph_conf_set")
        name = access.filesystem.encode()
        _checked(lib.ceph_select_filesystem(self._mount, name), "ceph_select_filesystem")
        _checked(lib.ceph_mount(self._mount, top or b"/"), "ceph_mount")

    def close(self) -> None:
        """Return the capabilities to the MDS. Those of a client that merely ends stay for a minute,
        and whoever creates something in these directories waits for them."""
        self._lib.ceph_unmount(self._mount)

    def location(self, path: Sequence[str], name: str) -> Location:
        """Where the objects of the file ``name`` lie, and most likely its neighbours'. OSError.

        A neighbour in another pool shows by an object that is not there.
        """
        full = self._full((*path, name))
        status = _Statx()
        _checked(
            self._lib.ceph_statx(self._mount, full, c.byref(status), _WANT_BASIC, _SYNC_AS_STAT),
            "ceph_statx",
        )
        if status.dev >= 2**63 or self._snapshot not in (0, status.dev):
            raise OSError(errno.EINVAL, "not in the snapshot")
        pool = c.create_string_buffer(256)
        _checked(self._lib.ceph_get_path_pool_name(self._mount, full, pool, len(pool)), "pool name")
        return Location(pool.value.decode(), int(status.dev))

    def layout(self, path: Sequence[str], name: str) -> tuple[Location, Layout]:
        """Where the objects of one file lie, exactly. OSError, EINVAL for an unknown layout."""
        location = self.location(path, name)
        value = c.create_string_buffer(1024)
        full = self._full((*path, name))
        length = self._lib.ceph_getxattr(self._mount, full, b"ceph.file.layout", value, len(value))
        _checked(length, "ceph.file.layout")
        try:
            found = objects.parse_layout(value.raw[:length].rstrip(b"\0").decode())
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from error
        if found.namespace or found.pool != location.pool:
            raise OSError(errno.EINVAL, "its objects are in a namespace of their pool")
        return location, found

    def _full(self, path: Sequence[str]) -> bytes:
        return b"/".join((self._root, *(p.encode("utf-8", "surrogateescape") for p in path)))

    def entries(self, path: Sequence[str]) -> Iterator[Entry]:
        """Entries of the directory ``path`` below the root, in the MDS's order. OSError."""
        lib, mount = self._lib, self._mount
        handle = c.c_void_p()
        _checked(lib.ceph_opendir(mount, self._full(path) or b"/", c.byref(handle)), "ceph_opendir")
        item, status, inode = _Dirent(), _Statx(), c.c_void_p()
        names, length = c.create_string_buffer(_XATTR_BYTES), c.c_size_t()
        try:
            while _checked(
                lib.ceph_readdirplus_r(
                    *(mount, handle, c.byref(item), c.byref(status)),
                    *(_WANT_BASIC, _SYNC_AS_STAT, c.byref(inode)),
                ),
                "ceph_readdirplus_r",
            ):
                has_xattrs = True
                if inode.value:
                    listed = lib.ceph_ll_listxattr(
                        mount, inode, names, _XATTR_BYTES, c.byref(length), self._perms
                    )
                    has_xattrs = listed < 0 or length.value > 0
                    has_xattrs |= status.ctime.nanoseconds >= self._recent_ns
                    lib.ceph_ll_put(mount, inode)
                    inode.value = None
                if self._snapshot and status.dev != self._snapshot and item.name != b"..":
                    # The path leads to another snapshot now: this one was made again.
                    raise OSError(errno.ESHUTDOWN, "the snapshot is not the one that was reached")
                if item.name not in (b".", b".."):
                    yield Entry(
                        item.name.decode("utf-8", "surrogateescape"),
                        status.mode,
                        status.uid,
                        status.gid,
                        0 if stat.S_ISDIR(status.mode) else status.size,
                        status.mtime.nanoseconds,
                        status.ino,
                        1 if stat.S_ISDIR(status.mode) else status.nlink,
                        has_xattrs,
                        status.ctime.nanoseconds,
                        status.version,
                    )
        finally:
            lib.ceph_closedir(mount, handle)


def is_plain(item: Entry) -> bool:
    """Whether its data is one object and nothing else has to be asked for."""
    if not stat.S_ISREG(item.mode) or item.xattrs or item.nlink != 1:
        return False
    return 0 < item.size <= OBJECT_BYTES
