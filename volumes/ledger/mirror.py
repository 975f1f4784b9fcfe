"""Asks a Ceph cluster about an image, with a deadline. Every failure is 'unknown'."""

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from linux.rbd_sysfs import RbdImage
from volumes import settings
from volumes.ledger import store

log = structlog.get_logger("volumes")

_WORKER = Path(__file__).with_name("worker.py")
_IDLE_SECONDS = 60.0  # then the worker is let go: a connection and 60 MB are not kept for nothing
_PAUSE_SECONDS = 1.0  # after a failure, before a cluster is tried again


@dataclass(frozen=True)
class Answer:
    """What the cluster says of one image. ``why`` explains an UNKNOWN."""

    mirror: store.Knowledge
    extents: store.Knowledge
    known: store.Entry | None = None
    extent: tuple[int, int] | None = None
    size: int | None = None
    why: str = ""


NOT_ASKED = Answer(store.Knowledge.NOT_ASKED, store.Knowledge.NOT_ASKED)


def unknown(why: str) -> Answer:
    return Answer(store.Knowledge.UNKNOWN, store.Knowledge.UNKNOWN, why=why)


class Failed(Exception):
    """The cluster did not answer, or answered with an error."""


class Cluster:
    """One worker process at most; killed when it is late, started again when it is needed."""

    def __init__(self, wanted: settings.ClusterSettings, timeout: float) -> None:
        self.settings = wanted
        self.timeout = timeout  # seconds
        self.fsid = ""  # known after the first connection
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._not_before = 0.0
        self._last_error = ""
        self._idle: asyncio.TimerHandle | None = None
        self.failures = 0

    async def _start(self) -> None:
        wanted = self.settings
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_WORKER), str(wanted.conf), wanted.user),
            *(str(wanted.keyring or "-"), str(self.timeout)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=2**20,
        )
        hello = await self._line()
        if self.fsid and hello["fsid"] != self.fsid:
            raise Failed(f"{wanted.conf} now leads to another cluster, {hello['fsid']}")
        self.fsid = hello["fsid"]

    async def _line(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Failed("the worker ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    async def connect(self) -> str:
        """The cluster's fsid. Raises Failed."""
        await self._ask(None)
        return self.fsid

    async def _ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        async with self._turn:
            if time.monotonic() < self._not_before:
                raise Failed(self._last_error)
            if self._idle is not None:
                self._idle.cancel()
            try:
                async with asyncio.timeout(self.timeout):
                    if self._process is None or self._process.returncode is not None:
                        await self._start()
                    assert self._process is not None and self._process.stdin is not None
                    if request is None:
                        return {}
                    self._process.stdin.write(json.dumps(request).encode() + b"\n")
                    await self._process.stdin.drain()
                    return await self._line()
            except (TimeoutError, OSError, ValueError, KeyError, Failed) as error:
                text = str(error) or f"no answer within {self.timeout:g}s"
                if "ImageNotFound" in text or "ObjectNotFound" in text or "Permission" in text:
                    raise Failed(
                        text
                    ) from error  # an answer about the image, not about the cluster
                await self._fail(text)
                raise Failed(text) from error
            except asyncio.CancelledError:
                await self._end()
                raise
            finally:
                loop = asyncio.get_running_loop()
                self._idle = loop.call_later(_IDLE_SECONDS, self._let_go)

    async def _fail(self, why: str) -> None:
        self.failures += 1
        if why != self._last_error:
            log.warning("ceph cluster does not answer", conf=str(self.settings.conf), error=why)
        self._last_error = why
        self._not_before = time.monotonic() + _PAUSE_SECONDS
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()  # it waits for the network, never in an uninterruptible sleep

    def _let_go(self) -> None:
        if self._process is not None and not self._turn.locked():
            assert self._process.stdin is not None
            self._process.stdin.close()  # it ends at the end of its input

    async def look(self, image: RbdImage) -> Answer:
        """What the cluster knows of the image; UNKNOWN for whatever cannot be learnt."""
        try:
            found = await self._ask({"do": "look", **_where(image)})
        except Failed as error:
            return unknown(str(error))
        mirror, known, why = _metadata(found["entry"])
        extent = found["extent"]
        return Answer(
            mirror=mirror,
            extents=store.Knowledge.CONTENT if extent else store.Knowledge.NONE,
            known=known,
            extent=(extent[0], extent[1]) if extent else None,
            size=found["size"],
            why=why,
        )

    async def read(self, image: RbdImage) -> Answer:
        """Only the image's metadata; extents are not asked."""
        try:
            found = await self._ask({"do": "read", **_where(image)})
        except Failed as error:
            return unknown(str(error))
        mirror, known, why = _metadata(found["entry"])
        return Answer(mirror, store.Knowledge.NOT_ASKED, known, why=why)

    async def write(self, image: RbdImage, new: store.Entry) -> None:
        """Set the image's metadata. Raises Failed."""
        await self._ask({"do": "write", **_where(image), "value": new.dump()})

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        await self._end()


def _metadata(value: str | None) -> tuple[store.Knowledge, store.Entry | None, str]:
    if value is None:
        return store.Knowledge.NONE, None, ""
    try:
        known = store.parse(value)
    except (ValueError, TypeError) as error:
        return store.Knowledge.UNKNOWN, None, f"the image's metadata: {error}"
    return known.knowledge, known, ""


def _where(image: RbdImage) -> dict[str, Any]:
    return {"pool": image.pool_id, "namespace": image.namespace, "image_id": image.image_id}


class Clusters:
    """All clusters that can be asked, found by fsid."""

    def __init__(self, wanted: tuple[settings.ClusterSettings, ...], timeout: float) -> None:
        self._all = [Cluster(each, timeout) for each in wanted]

    @property
    def failures(self) -> int:
        return sum(each.failures for each in self._all)

    async def of(self, fsid: str) -> tuple[Cluster | None, str]:
        """The cluster with that fsid; None with why it is not known whether there is one, or with
        an empty text when it is known that none of ours is it."""
        why = []
        for each in self._all:
            if not each.fsid:
                try:
                    await each.connect()
                except Failed as error:
                    why.append(f"{each.settings.conf}: {error}")
            if each.fsid == fsid:
                return each, ""
        return None, "; ".join(why)

    async def look(self, image: RbdImage, *, extents: bool) -> Answer:
        """NOT_ASKED when no credentials for the image's cluster are configured."""
        if not image.fsid:
            return unknown("this kernel does not say which cluster the image is of")
        cluster, why = await self.of(image.fsid)
        if cluster is not None:
            return await (cluster.look(image) if extents else cluster.read(image))
        return unknown(why) if why else NOT_ASKED

    async def write(self, image: RbdImage, new: store.Entry) -> bool:
        """Mirror the entry; False when there is no such cluster. Raises Failed."""
        cluster, why = await self.of(image.fsid)
        if cluster is not None:
            await cluster.write(image, new)
        elif why:
            raise Failed(why)
        return cluster is not None

    async def close(self) -> None:
        for each in self._all:
            await each.close()
