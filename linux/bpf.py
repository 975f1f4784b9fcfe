"""BPF through libbpf (Debian: libbpf1): load an object file, attach to a cgroup, read maps.

Only what a cgroup-device program and a traced one need. Every call raises OSError with the kernel's
errno; a program that the verifier refuses raises OSError whose text ends with the verifier's last
words. Structure layouts are those of <linux/bpf.h>, program type 15, attach type 6.
"""

import contextlib
import ctypes
import errno
import functools
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import kit.files

CGROUP_DEVICE, _TRACE_ITER = 6, 28  # enum bpf_attach_type
ALLOW_MULTI = 2  # other programs, above and below, are asked too; all must agree
MOST_PROGRAMS = 64  # BPF_CGROUP_MAX_PROGS of the kernel
IF_NEW, IF_THERE = 1, 2  # BPF_NOEXIST, BPF_EXIST
_LOG_KEPT, _READ_BYTES = 4096, 65536

_Print = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_Sample = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@functools.cache
def _library() -> ctypes.CDLL:
    """libbpf with its prototypes. OSError when it is not installed."""
    lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    pointer, text, number, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32
    prototypes: dict[str, tuple[object, list[object]]] = {
        "bpf_object__open_file": (pointer, [text, pointer]),
        "bpf_object__load": (number, [pointer]),
        "bpf_object__close": (None, [pointer]),
        "bpf_object__next_program": (pointer, [pointer, pointer]),
        "bpf_object__next_map": (pointer, [pointer, pointer]),
        "bpf_program__name": (text, [pointer]),
        "bpf_program__fd": (number, [pointer]),
        "bpf_program__set_autoload": (number, [pointer, ctypes.c_bool]),
        "bpf_map__name": (text, [pointer]),
        "bpf_map__fd": (number, [pointer]),
        "bpf_map__reuse_fd": (number, [pointer, number]),
        "bpf_map__type": (number, [pointer]),
        "bpf_map__key_size": (size, [pointer]),
        "bpf_map__value_size": (size, [pointer]),
        "bpf_map__max_entries": (size, [pointer]),
        "bpf_prog_attach": (number, [number, number, number, size]),
        "bpf_prog_detach2": (number, [number, number, number]),
        "bpf_prog_query": (number, [number, number, size, pointer, pointer, pointer]),
        "bpf_prog_get_fd_by_id": (number, [size]),
        "bpf_map_get_fd_by_id": (number, [size]),
        "bpf_obj_get_info_by_fd": (number, [number, pointer, pointer]),
        "bpf_obj_pin": (number, [number, text]),
        "bpf_obj_get": (number, [text]),
        "bpf_raw_tracepoint_open": (number, [text, number]),
        "bpf_link_create": (number, [number, number, number, pointer]),
        "bpf_iter_create": (number, [number]),
        "bpf_map_update_elem": (number, [number, pointer, pointer, ctypes.c_uint64]),
        "bpf_map_lookup_elem": (number, [number, pointer, pointer]),
        "bpf_map_delete_elem": (number, [number, pointer]),
        "bpf_map_get_next_key": (number, [number, pointer, pointer]),
        "ring_buffer__new": (pointer, [number, _Sample, pointer, pointer]),
        "ring_buffer__consume": (number, [pointer]),
        "ring_buffer__epoll_fd": (number, [pointer]),
        "ring_buffer__free": (None, [pointer]),
        "libbpf_set_print": (pointer, [_Print]),
    }
    for name, (result, arguments) in prototypes.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    lib.libbpf_set_print(_printer)
    return lib


# libbpf prints to standard error by default; we keep its last words for the text of errors.
_log = bytearray()
_vsnprintf = ctypes.CDLL(None).vsnprintf
_vsnprintf.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p]


def _keep_log(level: int, form: bytes, arguments: int) -> int:
    if level <= 1:  # warnings and informations, not debugging
        line = ctypes.create_string_buffer(_LOG_KEPT)
        _vsnprintf(line, _LOG_KEPT, form, arguments)
        _log.extend(line.value)
        del _log[:-_LOG_KEPT]
    return 0


_printer = _Print(_keep_log)  # libbpf keeps the pointer


def _checked(result: int, what: str) -> int:
    """``result`` of a libbpf call, which is -errno or, from older versions, -1 with errno set."""
    if result < 0:
        code = ctypes.get_errno() or -result
        raise OSError(code, os.strerror(code), what)
    return result


def _found(result: int, what: str) -> bool:
    """False when a map has no such key."""
    if result < 0 and ctypes.get_errno() == errno.ENOENT:
        return False
    _checked(result, what)
    return True


@dataclass(frozen=True)
class ProgramInfo:
    id: int
    name: str
    tag: str  # hash of the instructions: equal programs have equal tags
    loaded_ns: int  # since boot
    map_ids: tuple[int, ...]


@dataclass(frozen=True)
class MapInfo:
    id: int
    name: str
    kind: int
    key_size: int
    value_size: int
    max_entries: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.kind, self.key_size, self.value_size, self.max_entries


class Descriptor:
    """Owns one file descriptor of a program or a map."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def pin(self, path: Path) -> None:
        """Give it a name in a bpf file system."""
        _checked(_library().bpf_obj_pin(self.fd, os.fsencode(path)), f"pin {path}")

    def _info(self, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        length = ctypes.c_uint32(len(buffer))
        _checked(
            _library().bpf_obj_get_info_by_fd(self.fd, buffer, ctypes.byref(length)), "bpf info"
        )
        return buffer.raw


class Program(Descriptor):
    @classmethod
    def by_id(cls, number: int) -> "Program":
        return cls(_checked(_library().bpf_prog_get_fd_by_id(number), f"bpf program {number}"))

    def info(self) -> ProgramInfo:
        ids = (ctypes.c_uint32 * 64)()
        buffer = ctypes.create_string_buffer(256)
        struct.pack_into("=IQ", buffer, 52, len(ids), ctypes.addressof(ids))
        raw = self._info(buffer)
        (number,) = struct.unpack_from("=I", raw, 4)
        loaded, _, count = struct.unpack_from("=QII", raw, 40)
        name = raw[64:80].split(b"\0")[0].decode()
        return ProgramInfo(number, name, raw[8:16].hex(), loaded, tuple(ids[: min(count, 64)]))

    def attach(self, cgroup: int) -> None:
        """Attach to the cgroup v2 directory open as ``cgroup``, beside other programs."""
        _checked(
            _library().bpf_prog_attach(self.fd, cgroup, CGROUP_DEVICE, ALLOW_MULTI), "bpf attach"
        )

    def trace(self) -> "BpfLink":
        """Attach to the tracepoint that the program's section names. It ends with the link."""
        return BpfLink(_checked(_library().bpf_raw_tracepoint_open(None, self.fd), "bpf trace"))

    def iterate(self) -> "BpfLink":
        """Of an iterator: what ``BpfLink.read`` reads."""
        made = _library().bpf_link_create(self.fd, 0, _TRACE_ITER, None)
        return BpfLink(_checked(made, "bpf iterator"))

    def detach(self, cgroup: int) -> None:
        _checked(_library().bpf_prog_detach2(self.fd, cgroup, CGROUP_DEVICE), "bpf detach")


class BpfLink(Descriptor):
    """Keeps a program attached as long as a descriptor or a pin of it exists."""

    @classmethod
    def at(cls, path: Path) -> "BpfLink":
        return cls(_checked(_library().bpf_obj_get(os.fsencode(path)), f"pin {path}"))

    def read(self) -> bytes:
        """All that an iterator writes in one run. It may visit many objects, and wait."""
        found = bytearray()
        fd = _checked(_library().bpf_iter_create(self.fd), "bpf iterator")
        with kit.files.closing(fd):
            while True:
                with contextlib.suppress(BlockingIOError):  # it has visited a million: go on
                    if not (part := os.read(fd, _READ_BYTES)):
                        return bytes(found)
                    found += part

    def program(self) -> Program:
        raw = self._info(ctypes.create_string_buffer(64))
        return Program.by_id(struct.unpack_from("=3I", raw)[2])


class Map(Descriptor):
    """Keys and values are bytes of the map's own sizes."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        raw = self._info(ctypes.create_string_buffer(128))
        kind, number, key, value, entries, _ = struct.unpack_from("=6I", raw, 0)
        name = raw[24:40].split(b"\0")[0].decode()
        self.info = MapInfo(number, name, kind, key, value, entries)

    @classmethod
    def by_id(cls, number: int) -> "Map":
        return cls(_checked(_library().bpf_map_get_fd_by_id(number), f"bpf map {number}"))

    def set(self, key: bytes, value: bytes, only: int = 0) -> None:
        """``only``: IF_NEW (OSError EEXIST otherwise) or IF_THERE (ENOENT)."""
        assert len(key) == self.info.key_size and len(value) == self.info.value_size
        done = _library().bpf_map_update_elem(self.fd, key, value, only)
        _checked(done, f"{self.info.name} update")

    def get(self, key: bytes) -> bytes | None:
        assert len(key) == self.info.key_size
        value = ctypes.create_string_buffer(self._value_bytes())
        result = _library().bpf_map_lookup_elem(self.fd, key, value)
        return value.raw if _found(result, f"{self.info.name} lookup") else None

    def delete(self, key: bytes) -> bool:
        """False when there was no such key."""
        return _found(_library().bpf_map_delete_elem(self.fd, key), f"{self.info.name} delete")

    def snapshot(self) -> list[bytes]:
        """All keys; entries that appear or disappear during the call may be missing."""
        found: list[bytes] = []
        key: bytes | None = None
        while len(found) <= self.info.max_entries:
            after = ctypes.create_string_buffer(self.info.key_size)
            result = _library().bpf_map_get_next_key(self.fd, key, after)
            if not _found(result, f"{self.info.name} keys"):
                break
            key = after.raw
            found.append(key)
        return found

    def replace(self, wanted: Mapping[bytes, bytes]) -> None:
        """Make it hold these keys alone. A key that stays is never missing meanwhile."""
        before = set(self.snapshot())
        for key in wanted.keys() - before:
            self.set(key, wanted[key])
        for key in before - wanted.keys():
            self.delete(key)

    def _value_bytes(self) -> int:
        if self.info.kind == 6:  # BPF_MAP_TYPE_PERCPU_ARRAY: one value for each possible CPU
            return -(-self.info.value_size // 8) * 8 * possible_cpus()
        return self.info.value_size


@functools.cache
def possible_cpus() -> int:
    text = Path("/sys/devices/system/cpu/possible").read_text().strip()
    return int(text.replace(",", "-").split("-")[-1]) + 1


def attached(cgroup: int) -> list[int]:
    """Ids of the device programs attached to the cgroup directory itself."""
    ids = (ctypes.c_uint32 * MOST_PROGRAMS)()
    count = ctypes.c_uint32(MOST_PROGRAMS)
    flags = ctypes.c_uint32(0)
    _checked(
        _library().bpf_prog_query(
            cgroup, CGROUP_DEVICE, 0, ctypes.byref(flags), ids, ctypes.byref(count)
        ),
        "bpf query",
    )
    return list(ids[: count.value])


@contextlib.contextmanager
def loaded(
    path: Path, program: str, reuse: dict[str, Map]
) -> Iterator[tuple[Program, dict[str, Map]]]:
    """Load ``program`` of the object file at ``path``; it uses maps of ``reuse`` of the same shape.

    OSError: ENOENT when the file has no such program, else the kernel's error with the verifier's
    last words. The caller owns the yielded program and maps, and closes them.
    """
    lib = _library()
    _log.clear()
    handle = lib.bpf_object__open_file(os.fsencode(path), None)
    if not handle:
        _checked(-1, f"open {path}")
    try:
        wanted = None
        item = lib.bpf_object__next_program(handle, None)
        while item:
            is_it = lib.bpf_program__name(item).decode() == program
            lib.bpf_program__set_autoload(item, is_it)
            wanted = item if is_it else wanted
            item = lib.bpf_object__next_program(handle, item)
        if wanted is None:
            raise OSError(errno.ENOENT, f"no program {program} in it", str(path))
        maps = []
        item = lib.bpf_object__next_map(handle, None)
        while item:
            name = lib.bpf_map__name(item).decode()
            if not name.startswith("."):
                maps.append((name, item))
                if name in reuse and _shape(item) == reuse[name].info.shape:
                    _checked(lib.bpf_map__reuse_fd(item, reuse[name].fd), f"reuse map {name}")
            item = lib.bpf_object__next_map(handle, item)
        result = lib.bpf_object__load(handle)
        if result < 0:
            last = bytes(_log).decode(errors="replace").strip().splitlines()[-12:]
            raise OSError(-result, f"{os.strerror(-result)}: {' | '.join(last)}", program)
        yield (
            Program(os.dup(lib.bpf_program__fd(wanted))),
            {name: Map(os.dup(lib.bpf_map__fd(item))) for name, item in maps},
        )
    finally:
        lib.bpf_object__close(handle)


def iterated(path: str, program: str) -> str:
    """All that an iterator of the object file writes in one run, as os.fsdecode makes it: for a
    child. OSError as ``loaded``."""
    with contextlib.ExitStack() as opened:
        made, maps = opened.enter_context(loaded(Path(path), program, {}))
        for each in (made, *maps.values()):
            opened.callback(each.close)
        return os.fsdecode(opened.enter_context(contextlib.closing(made.iterate())).read())


def _shape(item: int) -> tuple[int, int, int, int]:
    """The map's shape in the object file; reuse_fd would silently accept another."""
    lib = _library()
    return (
        lib.bpf_map__type(item),
        lib.bpf_map__key_size(item),
        lib.bpf_map__value_size(item),
        lib.bpf_map__max_entries(item),
    )


class Ring:
    """A ring buffer map's only reader. ``fd`` is readable while records wait. Records may arrive
    faster than they are read, so ``consume`` passes ``most`` at most."""

    def __init__(self, events: Map, sink: Callable[[bytes], None], most: int = 64) -> None:
        self._left = 0

        def sample(_: int, data: int, size: int) -> int:
            sink(ctypes.string_at(data, size))
            self._left -= 1
            return 0 if self._left > 0 else -errno.ECANCELED  # libbpf has passed this one, and ends

        self._most = most

        self._callback = _Sample(sample)  # libbpf keeps the pointer, so this must live as long
        self._ring = _library().ring_buffer__new(events.fd, self._callback, None, None)
        if not self._ring:
            _checked(-1, "ring buffer")
        self.fd: int = _library().ring_buffer__epoll_fd(self._ring)

    def consume(self) -> int:
        """Pass waiting records to the sink; returns their number. More may wait."""
        self._left = self._most
        done = _library().ring_buffer__consume(self._ring)
        if done != -errno.ECANCELED:
            _checked(done, "ring buffer")
        return self._most - self._left

    def close(self) -> None:
        if self._ring:
            _library().ring_buffer__free(self._ring)
            self._ring = None
