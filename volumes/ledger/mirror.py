"""What other nodes and the cluster know of a volume: its image's metadata, and its extents.

The ledger of one node knows nothing of what another node saw. So each entry is mirrored into the
metadata of its RBD image, where every node with credentials reads it. The cluster also says whether
anything was ever written to the image, which even a device that reads as zeros cannot hide.

Whatever a cluster cannot answer in time is UNKNOWN, and no lease follows from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import kit.errors
from ceph.client import ClusterClient
from ceph.protocol import Extents, ImageId
from ceph.settings import ClusterSettings
from linux.rbd_sysfs import RbdImage
from volumes.ledger.store import Entry, Knowledge, NewerError, parse

METADATA_KEY = "nodeagent.volume"


@dataclass(frozen=True)
class Answer:
    """What the cluster says of one image. ``why`` explains an UNKNOWN.

    ``mirror``: of the metadata. ``known``: the entry there. ``size``: bytes.
    """

    mirror: Knowledge
    extents: Knowledge
    known: Entry | None = None
    size: int | None = None
    why: str = ""


NOT_ASKED = Answer(Knowledge.NOT_ASKED, Knowledge.NOT_ASKED)


def unknown(why: str) -> Answer:
    return Answer(Knowledge.UNKNOWN, Knowledge.UNKNOWN, why=why)


class Mirror:
    """The configured clusters. A cluster is found by its fsid, which its first answer names."""

    def __init__(self, clusters: Sequence[ClusterSettings], deadline: float) -> None:
        self._settings = tuple(clusters), deadline
        self._clusters = [ClusterClient(each, deadline) for each in clusters]
        self._failures = 0
        self.newer: dict[tuple[ImageId, str], str] = {}  # image and part: a newer agent wrote it

    @property
    def failures(self) -> int:
        """Questions that a cluster did not answer."""
        return self._failures + sum(each.failures for each in self._clusters)

    async def apply(self, clusters: Sequence[ClusterSettings], deadline: float) -> None:
        """Ask these clusters from now on."""
        if (tuple(clusters), deadline) == self._settings:
            return
        former, self._failures = self._clusters, self.failures
        self._settings = tuple(clusters), deadline
        self._clusters = [ClusterClient(each, deadline) for each in clusters]
        for each in former:
            await each.close()

    async def _cluster(self, fsid: str) -> ClusterClient | None:
        """The cluster with that fsid; None when it is not among ours. AgentError when one that does
        not answer may be it."""
        silent: kit.errors.AgentError | None = None
        for each in self._clusters:
            try:
                if (each.fsid or await each.connect()) == fsid:
                    return each
            except kit.errors.AgentError as error:
                silent = error
        if silent is not None:
            raise silent
        return None

    async def ask(
        self, image: RbdImage, extents: Extents | None = None, *, part: str = ""
    ) -> Answer:
        """NOT_ASKED when no credentials for the image's cluster are configured.

        ``part``: names what lies in the image and has an entry of its own.
        """
        if not image.fsid:
            return unknown("this kernel does not say which cluster the image belongs to")
        try:
            cluster = await self._cluster(image.fsid)
            if cluster is None:
                return NOT_ASKED
            content = await cluster.content(_id(image), _key(part), extents)
            text = content.metadata
        except kit.errors.AgentError as error:
            return unknown(str(error))
        allocated = Knowledge.NOT_ASKED
        if extents is not None:
            allocated = Knowledge.CONTENT if content.extent else Knowledge.NONE
        self.newer.pop((_id(image), part), None)
        if text is None:
            return Answer(Knowledge.NONE, allocated, size=content.size)
        try:
            known = parse(text)
        except (ValueError, TypeError) as error:
            why = f"the image's metadata: {error}"
            if isinstance(error, NewerError):
                self.newer[_id(image), part] = why
            return Answer(Knowledge.UNKNOWN, allocated, size=content.size, why=why)
        return Answer(known.knowledge, allocated, known, content.size)

    async def write(self, image: RbdImage, new: Entry, part: str = "") -> bool:
        """Set the image's metadata; False without such a cluster, and for what a newer agent wrote
        there. AgentError when it failed."""
        cluster = await self._cluster(image.fsid)
        if cluster is None or (_id(image), part) in self.newer:
            return False
        await cluster.set_metadata(_id(image), _key(part), new.dump())
        return True

    async def close(self) -> None:
        for each in self._clusters:
            await each.close()


def _key(part: str) -> str:
    return f"{METADATA_KEY}.{part}" if part else METADATA_KEY


def _id(image: RbdImage) -> ImageId:
    return ImageId(image.pool_id, image.namespace, image.image_id)
