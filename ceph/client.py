"""One Ceph cluster as the agent asks it: typed questions, each with a deadline.

All of it runs in a worker process (``ceph.worker``) that starts with the first question and ends
when it was idle for a minute, because a connection takes 60 MB. A question that fails because of
the cluster costs the worker its life, and for a moment the next ones fail at once with the same
error. Rooms with different deadlines use a ``ClusterClient`` each: questions wait for their turn.
"""

from collections.abc import Iterable

import structlog

import kit.errors
import kit.line_worker
import kit.pause
from ceph import protocol
from ceph.settings import ClusterSettings

log = structlog.get_logger("ceph")

IDLE_SECONDS = 60.0
PAUSE_SECONDS = 1.0  # after a failure
_LARGEST_ANSWER = 32 * 2**20
_FATAL = (kit.errors.SourceError, kit.errors.HostError, OSError, kit.line_worker.ChildError)


class ClusterClient:
    """Asks one cluster. Every method raises AgentError.

    NotFoundError and RefusedError are answers about one image; any other error means that the
    cluster itself does not answer, and counts in ``failures``.
    """

    def __init__(
        self, settings: ClusterSettings, deadline: float, *, patience: float | None = None
    ) -> None:
        """``deadline``: seconds for a whole question. ``patience``: seconds for each of the
        cluster's answers to it; less than the deadline gives more telling errors."""
        self.settings = settings
        self.fsid = ""  # known after the first answer
        self._deadline = deadline
        self._credentials = protocol.CephCredentials(
            cluster=settings.name,
            monitors=settings.monitors,
            conf=str(settings.conf or ""),
            user=settings.user,
            secret_file=str(settings.secret_file or ""),
            patience=deadline if patience is None else patience,
        )
        self._worker = kit.line_worker.LineWorker(
            "ceph.worker:main",
            protocol.Answer,
            about=f"cluster {settings.name}",
            largest=_LARGEST_ANSWER,
            idle=IDLE_SECONDS,
            backoff=kit.pause.Backoff(PAUSE_SECONDS, PAUSE_SECONDS),
            fatal=_FATAL,
        )
        self._said = ""  # why it does not answer, as the log has it

    @property
    def failures(self) -> int:
        return self._worker.failures

    async def connect(self) -> str:
        return (await self._ask()).fsid

    async def content(
        self, image: protocol.ImageId, metadata_key: str, extents: protocol.Extents | None = None
    ) -> protocol.ImageContent:
        """A metadata entry of an image and, with ``extents``, whether any data was written."""
        answer = await self._ask(content=protocol.ContentQuestion(image, metadata_key, extents))
        assert answer.content is not None
        return answer.content

    async def set_metadata(self, image: protocol.ImageId, metadata_key: str, value: str) -> None:
        await self._ask(change=protocol.MetadataChange(image, metadata_key, value))

    async def view(
        self, images: Iterable[protocol.ImageName], *, wide: bool = True
    ) -> protocol.ClusterView:
        """State of the cluster and of these images. What the key may not ask is a gap in it."""
        answer = await self._ask(view=protocol.ViewQuestion(tuple(images), wide))
        assert answer.view is not None
        return answer.view

    async def _ask(
        self,
        content: protocol.ContentQuestion | None = None,
        change: protocol.MetadataChange | None = None,
        view: protocol.ViewQuestion | None = None,
    ) -> protocol.Answer:
        request = protocol.Request(self._credentials, self.fsid, content, change, view)
        try:
            answer = await self._worker.ask(request, self._deadline)
        except (kit.errors.NotFoundError, kit.errors.RefusedError):
            raise
        except (kit.errors.AgentError, OSError, kit.line_worker.ChildError) as error:
            raise self._explained(error) from error
        self._said = ""
        self.fsid = answer.fsid
        return answer

    def _explained(self, error: Exception) -> kit.errors.AgentError:
        if not isinstance(error, kit.errors.AgentError):
            error = kit.errors.SourceError(
                f"cluster {self.settings.name}", f"asking it failed ({error})", "it is tried again"
            )
        if str(error) != self._said:
            self._said = str(error)
            log.warning("cluster does not answer", cluster=self.settings.name, cause=self._said)
        return error

    async def close(self) -> None:
        await self._worker.close()
