"""The files of an OCI image layout: a directory, or a tar of one that is not compressed.

All functions block, and run in child processes: the layout may be on a network file system. They
trust nothing in it. A blob is found only by its digest, below ``blobs/sha256``, as a regular file
and never through a symbolic link there; documents and lists are bounded.
"""

import errno
import os
import stat
import tarfile
from typing import Any

import kit.errors
from linux import mountinfo
from preheat import manifest

NAME = "org.opencontainers.image.ref.name"
FULL_NAME = "io.containerd.image.name"  # as 'ctr images export' writes it
MOST_IMAGES = 1000
MOST_MEMBERS = 100_000
_REMEDY = "make it with 'skopeo copy' or 'ctr images export', and name its directory or its tar"


def is_mounted(path: str) -> bool:
    """Whether something is mounted at ``path``, also of the file system that it lies on: the view
    of a complete dataset is a bind of the store."""
    folder, name = os.path.split(path)
    return mountinfo.top(os.path.join(os.path.realpath(folder), name)) is not None


def find(path: str, ref: str, digest: str, platform: str) -> list[Any]:
    """The media type, digest and size of an image in the layout.

    By digest where the reference has one; else by its name there (the whole reference, or its tag);
    else the only image without a name. OSError, SourceError, NotFoundError.
    """
    try:
        version = manifest.load(_read(path, "oci-layout"), "oci-layout")
        if not str(version.get("imageLayoutVersion", "")).startswith("1."):
            raise manifest.BadImageError("its oci-layout is not of version 1")
        listed = manifest.load(_read(path, "index.json"), "index.json").get("manifests")
        if not isinstance(listed, list) or len(listed) > MOST_IMAGES:
            raise manifest.BadImageError(f"its index.json does not list 1 to {MOST_IMAGES} images")
        found = [(_names(each), each) for each in listed if isinstance(each, dict)]
        chosen = _choose(found, ref, digest, platform)
        if chosen is None:
            names = sorted({name for names, _ in found for name in names})
            there = ", ".join(names)[:200] or f"{len(found)} without a name"
            raise kit.errors.NotFoundError(
                f"image {ref}", f"is not in the layout {path}; there are: {there}", ""
            )
        digest, size, media_type = manifest.descriptor(chosen, "its image")
        return [media_type, digest, size]
    except manifest.BadImageError as error:
        raise kit.errors.SourceError(f"the layout {path}", str(error), _REMEDY) from error


def _names(entry: dict[str, Any]) -> tuple[str, ...]:
    annotations = entry.get("annotations")
    if not isinstance(annotations, dict):
        return ()
    return tuple(str(annotations[key]) for key in (FULL_NAME, NAME) if key in annotations)


def _choose(
    found: list[tuple[tuple[str, ...], dict[str, Any]]], ref: str, digest: str, platform: str
) -> dict[str, Any] | None:
    if digest:
        return next((each for _, each in found if each.get("digest") == digest), None)
    tag = ref.rpartition(":")[2]
    for wanted in (ref, tag):
        for names, each in found:
            if wanted in names:
                return each
    unnamed = [each for names, each in found if not names]
    if len(unnamed) > 1:
        try:
            match = manifest.for_platform({"manifests": unnamed}, platform)
        except manifest.NoPlatformError:
            return None
        return match if isinstance(match, dict) else None
    return unnamed[0] if unnamed and len(found) == 1 else None


def document(path: str, digest: str) -> str:
    """A manifest, index or config, as text; its digest is for the caller to check."""
    return os.fsdecode(_read(path, _name(digest)))


def place(path: str, digest: str) -> list[Any]:
    """The file that a blob is in, where it begins, and its size in bytes."""
    name = _name(digest)
    descriptor, start, size = _open(path, name)
    os.close(descriptor)
    return [path if os.path.isfile(path) else os.path.join(path, name), start, size]


def _name(digest: str) -> str:
    if not manifest.is_digest(digest):
        raise kit.errors.SourceError("a layout", f"{digest[:80]!r} is no sha256 digest", _REMEDY)
    return "blobs/sha256/" + digest.removeprefix("sha256:")


def _read(path: str, name: str) -> bytes:
    descriptor, start, size = _open(path, name)
    try:
        if size > manifest.LARGEST_DOCUMENT:
            raise kit.errors.SourceError(
                f"the layout {path}",
                f"its {name} has {size} bytes, over {manifest.LARGEST_DOCUMENT}",
                _REMEDY,
            )
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)


def _open(path: str, name: str) -> tuple[int, int, int]:
    """A descriptor, where the member begins in it, and its size. The caller closes it."""
    if not os.path.isdir(path):
        start, size = _member(path, name)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), start, size
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *folders, last = name.split("/")
        for each in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            deeper = os.open(each, flags, dir_fd=folder)
            os.close(folder)
            folder = deeper
        # Not blocking: a pipe of that name would hang the open.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(last, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            text = f"its {name} is a symbolic link, or below one"
            raise kit.errors.SourceError(f"the layout {path}", text, _REMEDY) from error
        error.filename = os.path.join(path, name)
        raise
    finally:
        os.close(folder)
    held = os.fstat(descriptor)
    if not stat.S_ISREG(held.st_mode):
        os.close(descriptor)
        raise kit.errors.SourceError(f"the layout {path}", f"its {name} is no file", _REMEDY)
    return descriptor, 0, held.st_size


def _member(path: str, name: str) -> tuple[int, int]:
    """Where a member of a tar begins, and its size."""
    try:
        with tarfile.open(path, "r:") as archive:
            for number, each in enumerate(archive):
                if number >= MOST_MEMBERS:
                    raise tarfile.ReadError(f"it has more than {MOST_MEMBERS} members")
                if each.name.removeprefix("./") == name:
                    if not each.isreg() or each.issparse():
                        raise tarfile.ReadError(f"its {name} is no plain file")
                    return each.offset_data, each.size
    except tarfile.TarError as error:
        text = f"is no tar that can be used ({error}); compressed ones cannot"
        raise kit.errors.SourceError(f"the layout {path}", text, _REMEDY) from error
    raise FileNotFoundError(errno.ENOENT, f"it has no {name}", path)
