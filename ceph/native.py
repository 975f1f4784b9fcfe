"""Reading CephFS past the mount: listings by libcephfs, small files by librados.

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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ceph.protocol import Access as Access
from ceph.protocol import Entry

try:
    import rados
except ImportError:  # no bindings on this host; available() says so
    rados = None

OBJECT_BYTES = 4 * 1024 * 1024
_IN_FLIGHT = 16
_SYNC_AS_STAT = 0
_WANT_BASIC = 0x7FF  # CEPH_STATX_BASIC_STATS without btime
_XATTR_BYTES = 65536


class _Time(c.Structure):
    _fields_ = (("sec", c.c_long), ("nsec", c.c_long))


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


FileT = TypeVar("FileT", bound=Entry)


class Location(NamedTuple):
    """Where the objects of a snapshot's files lie; travels as a JSON list."""

    pool: str
    snapshot: int


def available() -> bool:
    """Whether this host has the bindings."""
    return rados is not None and _library() is not None


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
    library.ceph_ll_put.argtypes = (p, p)
    library.ceph_mount_perms.restype = p
    for name, arguments in (
        ("ceph_conf_read_file", (p, c.c_char_p)),
        ("ceph_conf_set", (p, c.c_char_p, c.c_char_p)),
        ("ceph_select_filesystem", (p, c.c_char_p)),
        ("ceph_mount", (p, c.c_char_p)),
        ("ceph_mount_perms", (p,)),
        ("ceph_unmount", (p,)),
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
    """Directories of a snapshot by libcephfs."""

    def __init__(self, access: Access) -> None:
        """Connects. OSError when the cluster does not answer or refuses the user."""
        self._lib = _library()
        self._root = access.root.encode("utf-8", "surrogateescape").rstrip(b"/")
        self._mount = c.c_void_p()
        lib = self._lib
        _checked(lib.ceph_create(c.byref(self._mount), access.user.encode()), "ceph_create")
        conf = access.conf.encode("utf-8", "surrogateescape")
        _checked(lib.ceph_conf_read_file(self._mount, conf), "ceph_conf_read_file")
        for key, value in ((b"client_cache_size", b"100000"), (b"client_mount_timeout", b"15")):
            _checked(lib.ceph_conf_set(self._mount, key, value), "ceph_conf_set")
        name = access.filesystem.encode()
        _checked(lib.ceph_select_filesystem(self._mount, name), "ceph_select_filesystem")
        _checked(lib.ceph_mount(self._mount, b"/"), "ceph_mount")
        self._perms = lib.ceph_mount_perms(self._mount)

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
        if status.dev >= 2**63:
            raise OSError(errno.EINVAL, "not in a snapshot")
        pool = c.create_string_buffer(256)
        _checked(self._lib.ceph_get_path_pool_name(self._mount, full, pool, len(pool)), "pool name")
        return Location(pool.value.decode(), int(status.dev))

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
                    lib.ceph_ll_put(mount, inode)
                    inode.value = None
                if item.name not in (b".", b".."):
                    yield Entry(
                        item.name.decode("utf-8", "surrogateescape"),
                        status.mode,
                        status.uid,
                        status.gid,
                        0 if stat.S_ISDIR(status.mode) else status.size,
                        status.mtime.sec * 1_000_000_000 + status.mtime.nsec,
                        status.ino,
                        1 if stat.S_ISDIR(status.mode) else status.nlink,
                        has_xattrs,
                    )
        finally:
            lib.ceph_closedir(mount, handle)


def is_plain(item: Entry) -> bool:
    """Whether its data is one object and nothing else has to be asked for."""
    if not stat.S_ISREG(item.mode) or item.xattrs or item.nlink != 1:
        return False
    return 0 < item.size <= OBJECT_BYTES


class Reader:
    """Objects of snapshots by librados, several in flight."""

    def __init__(self, access: Access) -> None:
        """Connects. OSError when the cluster does not answer or refuses the user."""
        try:
            self._cluster = rados.Rados(
                conffile=access.conf,
                name=f"client.{access.user}",
                conf={"rados_mon_op_timeout": "15"},
            )
            self._cluster.connect(timeout=15)
        except rados.Error as error:
            raise OSError(getattr(error, "errno", None) or errno.EIO, str(error)) from error
        self._pools: dict[Location, Any] = {}

    def _objects(self, location: Location) -> Any:
        if location not in self._pools:
            try:
                objects = self._cluster.open_ioctx(location.pool)
                objects.set_read(location.snapshot)
            except rados.Error as error:
                raise OSError(getattr(error, "errno", None) or errno.EIO, str(error)) from error
            self._pools[location] = objects
        return self._pools[location]

    def read(
        self,
        location: Location,
        items: Sequence[FileT],
        each: Callable[[FileT, bytes | None], None],
        deadline: float,
    ) -> Sequence[FileT]:
        """Call ``each(item, bytes)`` for every item, None where its object is not the whole file.

        ``each`` runs in librados' own thread, one at a time. What it raises ends the read once
        everything in flight has arrived, and is raised here. No read starts after ``deadline``
        (monotonic); returns the items whose read did not start. OSError when the pool cannot be
        opened.
        """
        objects = self._objects(location)
        free = threading.Semaphore(_IN_FLIGHT)
        errors: list[BaseException] = []

        def finished(item: FileT) -> Callable[[Any, bytes | None], None]:
            def callback(_: Any, data: bytes | None) -> None:
                try:
                    if not errors:
                        each(item, data if data is not None and len(data) == item.size else None)
                except BaseException as error:
                    errors.append(error)
                finally:
                    free.release()

            return callback

        asked = 0
        for item in items:
            free.acquire()
            if errors or time.monotonic() >= deadline:
                free.release()
                break
            asked += 1
            objects.aio_read(f"{item.ino:x}.00000000", item.size, 0, finished(item))
        for _ in range(_IN_FLIGHT):
            free.acquire()
        if errors:
            raise errors[0]
        return items[asked:]
