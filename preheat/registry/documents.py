"""Manifests, indexes and configs on disk, by digest, over restarts of the agent.

They never change, so what was read once needs no registry. Every entry is checked against its
digest when it is read: a torn, empty or foreign one is a miss. Values lie in SQLite itself and as
JSON; files beside it can be empty after a power cut, and pickle would run what it reads.
"""

import asyncio
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import diskcache
import structlog

from preheat.image import manifest

log = structlog.get_logger("preheat")

FOLDER = "preheat-documents"  # in the state directory
MOST_BYTES = 64 * 1024**2
# A larger one would push out many others.
LARGEST = 1024**2
LOCK_SECONDS = 5.0

ResultT = TypeVar("ResultT")


class _Disk(diskcache.JSONDisk):  # type: ignore[misc]  # diskcache has no types
    """Refuses every value that this module does not write: inline JSON."""

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> object:
        if mode != diskcache.core.MODE_RAW or filename is not None:
            raise ValueError("a foreign value")
        return super().fetch(mode, filename, value, read)


class Documents:
    """The cache. All its trouble is a miss."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache: diskcache.Cache | None = None
        # One thread, for SQLite's connection belongs to the thread that made it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="documents")

    async def get(self, digest: str) -> bytes | None:
        return await self._do(lambda cache: _get(cache, digest))

    async def put(self, digest: str, data: bytes) -> None:
        if len(data) <= LARGEST:
            await self._do(lambda cache: cache.set(digest, data.decode("latin-1")))

    async def size(self, digest: str) -> int | None:
        """What ``put_size`` was told of a blob that is no document; not checked."""
        found = await self._do(lambda cache: cache.get(f"size {digest}"))
        return found if isinstance(found, int) else None

    async def put_size(self, digest: str, size: int) -> None:
        await self._do(lambda cache: cache.set(f"size {digest}", size))

    async def close(self) -> None:
        def end() -> None:
            if self._cache is not None:
                self._cache.close()
                self._cache = None

        await asyncio.get_running_loop().run_in_executor(self._thread, end)
        self._thread.shutdown(wait=False)

    async def _do(self, what: Callable[[diskcache.Cache], ResultT]) -> ResultT | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._guarded, what)

    def _guarded(self, what: Callable[[diskcache.Cache], ResultT]) -> ResultT | None:
        try:
            return what(self._open())
        except diskcache.Timeout:
            return None
        except sqlite3.DatabaseError as error:
            log.warning("cache of image documents begins anew", error=str(error))
            self._forget()
        except (OSError, ValueError, zlib.error, RecursionError) as error:
            log.warning("cache of image documents cannot be used", error=str(error))
        return None

    def _open(self) -> diskcache.Cache:
        if self._cache is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._cache = diskcache.Cache(
                str(self._folder),
                timeout=LOCK_SECONDS,
                disk=_Disk,
                disk_min_file_size=1 << 30,
                size_limit=MOST_BYTES,
                eviction_policy="least-recently-used",
                # The defaults are for large caches: 32 MiB of pages and 64 MiB mapped.
                sqlite_cache_size=256,
                sqlite_mmap_size=0,
            )
        return self._cache

    def _forget(self) -> None:
        """Delete a damaged cache; the next use makes a new one."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _get(cache: diskcache.Cache, digest: str) -> bytes | None:
    try:
        text = cache.get(digest)
    except (ValueError, zlib.error, RecursionError):
        text = ""
    data = text.encode("latin-1", "replace") if isinstance(text, str) else b""
    if data and manifest.digest_of(data) == digest:
        return data
    if text is not None:
        cache.delete(digest)
    return None
