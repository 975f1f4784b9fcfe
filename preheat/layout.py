"""Images from an OCI layout on this node: a directory, a tar, or either in a dataset.

For clusters without a registry nearby. What a layout says is checked as what a registry says: every
document against its digest, every layer by the runtime. Files are read by child processes with a
deadline, so a file system that hangs holds up nothing.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import kit.child
import kit.errors
from kit import processes
from preheat import layout_files, manifest, sources
from preheat.failure import Kind, PullError

CHUNK = 1024**2
DOCUMENT_SECONDS = 60.0


def of(source: str, datasets: Path) -> "Layout":
    """The layout that ``source`` names (``preheat.sources``)."""
    return Layout(sources.path_of(source, datasets), sources.view_of(source, datasets))


class Layout:
    """One layout. Every function raises PullError.

    ``view``: of the dataset that it is in. What is missing while the dataset is not served comes
    with it: that is tried again as soon as a registry that does not answer.
    """

    def __init__(self, path: Path, view: Path | None = None) -> None:
        self.path = path
        self._view = view

    async def target(self, ref: manifest.Reference, platform: str) -> manifest.Target:
        """The image in it that ``ref`` names."""
        found = await self._call(layout_files.find, ref.text, ref.digest or "", platform)
        return manifest.Target(*found)

    async def shape(
        self, ref: manifest.Reference, target: manifest.Target, platform: str
    ) -> manifest.Shape:
        try:
            return await manifest.shape(target, self.read, platform)
        except manifest.BadImageError as error:
            raise PullError(ref.text, Kind.BAD_IMAGE, f"{error} ({self.path})") from error

    async def read(self, digest: str) -> bytes:
        """A document, checked against its digest."""
        data = os.fsencode(await self._call(layout_files.document, digest))
        if manifest.digest_of(data) != digest:
            text = f"its {digest} has other bytes than its digest says"
            raise PullError(str(self.path), Kind.BAD_IMAGE, text)
        return data

    async def blob(self, digest: str, size: int, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes from ``offset`` to the end. The reader is killed when this is closed."""
        file, start, there = await self._call(layout_files.place, digest)
        if there != size:
            text = f"its {digest} has {there} bytes, not {size} as its manifest says"
            raise PullError(str(self.path), Kind.BAD_IMAGE, text)
        about = f"layout {self.path}"
        reader = await processes.start(
            (
                *("dd", f"if={file}", "bs=1M", "iflag=skip_bytes,count_bytes,nofollow,fullblock"),
                *(f"skip={start + offset}", f"count={size - offset}", "status=none"),
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            limit=CHUNK,
        )
        assert reader.stdout is not None
        left = size - offset
        try:
            while left and (chunk := await reader.stdout.read(min(left, CHUNK))):
                left -= len(chunk)
                yield chunk
        finally:
            await processes.end(reader, about)
        if left:
            raise PullError(str(self.path), Kind.NETWORK, f"reading {file} broke off")

    async def _call(self, function: Any, *arguments: Any) -> Any:
        thing = f"the layout {self.path}"
        try:
            return await kit.child.call(
                function, str(self.path), *arguments, deadline=DOCUMENT_SECONDS
            )
        except FileNotFoundError as error:
            if self._view is not None and not await self._is_served(self._view):
                text = f"its dataset {self._view.parent.name} is not served on this node now"
                raise PullError(thing, Kind.NETWORK, text) from error
            raise PullError(thing, Kind.NOT_FOUND, f"{error.filename} is not there") from error
        except kit.child.DeadlineError as error:
            raise PullError(thing, Kind.NETWORK, error.cause) from error
        except OSError as error:
            raise PullError(thing, Kind.NETWORK, f"cannot be read ({error})") from error
        except kit.errors.AgentError as error:
            absent = error.exit_code == kit.errors.NotFoundError.exit_code
            kind = Kind.NOT_FOUND if absent else Kind.BAD_IMAGE
            raise PullError(error.thing, kind, error.cause) from error

    async def _is_served(self, view: Path) -> bool:
        try:
            return bool(
                await kit.child.call(layout_files.is_mounted, str(view), deadline=DOCUMENT_SECONDS)
            )
        except (kit.errors.AgentError, OSError):
            return False
