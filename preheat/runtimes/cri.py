"""Calls to containerd and CRI over the unix socket, every changing one checked before it is sent.

Why checked: containerd 1.7 and 2.x die of some malformed calls (an image update without its
target, a lease resource that is missing), with every pod start on the node. ``Calls.change`` is
the only way to a changing method, and each such method is declared with its check.

Why a breaker: when the runtime goes away right after a changing call, repeating the call may kill
it again. After such an end changing calls are refused for a while that grows with every repetition;
reading is always allowed.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from preheat import manifest
from preheat.runtimes import base
from preheat.runtimes import messages as m
from preheat.runtimes.wire import Message, WireError

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

NAMESPACE = "k8s.io"
READ_SECONDS = 10.0
CHANGE_SECONDS = 30.0
LARGEST_ANSWER = 32 * 1024**2
LARGEST_REQUEST = 4 * 1024**2
MOST_CALLS_AT_ONCE = 16
# containerd's own limit for one label, key and value together.
LARGEST_LABEL = 4096
OWN_PREFIX = "nodeagent-"
_LEASE = re.compile(rf"{OWN_PREFIX}[a-z0-9-]{{1,80}}")
_INGEST = re.compile(r"[a-z]+-sha256:[0-9a-f]{64}")
# How long changing calls rest after the runtime went away on one: by number of times in a row.
REST_SECONDS = (1.0, 10.0, 60.0, 600.0, 3600.0)
TRIPS_FORGOTTEN_SECONDS = 900.0


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise base.InvalidCallError(
            "call to the runtime", f"{what}; not sent", "report this: the agent should not try it"
        )


def _plain(text: str, most: int = 1024) -> bool:
    return 0 < len(text) <= most and text.isprintable() and text.strip() == text


def _check_labels(labels: Any) -> None:
    _require(len(labels) <= 64, "more than 64 labels")
    for key, value in labels.items():
        _require(isinstance(key, str) and isinstance(value, str), "a label that is no text")
        _require(_plain(key), "a label without a proper key")
        # "replace": a value that is no proper text is refused when the request is encoded.
        size = len(key.encode(errors="replace")) + len(value.encode(errors="replace"))
        _require(size <= LARGEST_LABEL, "a label over 4 KiB")


def _check_image(value: m.Image | None) -> None:
    if value is None or value.target is None:
        _require(False, "an image without its target")
        return
    _require(_plain(value.name), "an image without a proper name")
    _require(manifest.is_digest(value.target.digest), "a target without a digest")
    _require(_plain(value.target.media_type), "a target without a media type")
    _require(0 < value.target.size < 1 << 50, "a target without a size")
    _check_labels(value.labels)


def _check_mask(mask: m.FieldMask | None) -> None:
    """Only single labels are ever updated: an empty mask would replace the whole record."""
    if mask is None or not mask.paths:
        _require(False, "an update that names no field")
        return
    for path in mask.paths:
        _require(path.startswith("labels.") and _plain(path) and len(path) > 7, "a bad field name")


def _check_create_image(request: m.ImageRequest) -> None:
    _check_image(request.image)


def _check_update_image(request: m.UpdateImageRequest) -> None:
    _check_image(request.image)
    _check_mask(request.update_mask)


def _check_update_content(request: m.UpdateContentRequest) -> None:
    if request.info is None:
        _require(False, "a content update without info")
        return
    _require(manifest.is_digest(request.info.digest), "a content update without a digest")
    _check_labels(request.info.labels)
    _check_mask(request.update_mask)


def _check_lease_id(lease: str) -> None:
    _require(_LEASE.fullmatch(lease) is not None, "a lease that is not ours")


def _check_create_lease(request: m.CreateLeaseRequest) -> None:
    _check_lease_id(request.id)
    _check_labels(request.labels)


def _check_delete_lease(request: m.DeleteLeaseRequest) -> None:
    _check_lease_id(request.id)


def _check_resource(request: m.LeaseResourceRequest) -> None:
    _check_lease_id(request.id)
    if request.resource is None:
        _require(False, "a lease resource that is missing")
        return
    kind, name = request.resource.type, request.resource.id
    _require(
        (kind == "content" and manifest.is_digest(name))
        or (kind == "ingests" and _plain(name))
        or (re.fullmatch(r"snapshots/[a-z0-9.-]+", kind) is not None and _plain(name)),
        "a lease resource of no known kind",
    )


def _check_abort(request: m.AbortRequest) -> None:
    _require(_INGEST.fullmatch(request.ref) is not None, "an abort without a proper ref")


def _check_write(request: m.WriteRequest) -> None:
    _require(request.action in (m.STAT, m.WRITE, m.COMMIT), "a write of no known kind")
    _require(_INGEST.fullmatch(request.ref) is not None, "a write without a proper ref")
    _require(request.ref.startswith(OWN_PREFIX.rstrip("-")), "a write to an ingest not ours")
    _require(0 <= request.offset <= request.total < 1 << 50, "a write beyond its end")
    _require(len(request.data) <= LARGEST_REQUEST // 2, "a write of too many bytes at once")
    if request.action != m.WRITE:
        _require(manifest.is_digest(request.expected), "a write without its digest")
        _require(not request.data, "a write of data without saying so")
    _check_labels(request.labels)


def _check_pull(request: m.PullImageRequest) -> None:
    if request.image is None:
        _require(False, "a pull without an image")
        return
    try:
        manifest.parse(request.image.image)
    except ValueError:
        _require(False, "a pull without a proper reference")
    auth = request.auth
    if auth is not None:
        fields = (auth.username, auth.password)
        tokens = (auth.identity_token, auth.registry_token)
        fits = all(len(each) <= 64 * 1024 for each in fields + tokens)
        _require(fits, "credentials of more than 64 KiB")


def pull_request(ref: str, login: base.Login | None) -> m.PullImageRequest:
    """CRI's request for ``ref``, with the login if there is one."""
    auth = None
    if login is not None:
        auth = m.AuthConfig(
            username=login.username,
            password=login.password,
            identity_token=login.identity_token,
            registry_token=login.registry_token,
        )
    return m.PullImageRequest(image=m.ImageSpec(image=ref), auth=auth)


@dataclass(frozen=True)
class Method(Generic[RequestT, ResponseT]):
    """A remote method. ``check`` is there exactly when the method changes something."""

    path: str
    request: type[RequestT]
    response: type[ResponseT]
    check: Callable[[RequestT], None] | None = None


_C = "/containerd.services."
_I = "/runtime.v1.ImageService/"
_R = "/runtime.v1.RuntimeService/"
VERSION = Method(_C + "version.v1.Version/Version", m.Empty, m.VersionResponse)
LIST_IMAGES = Method(_C + "images.v1.Images/List", m.ListRequest, m.ImageList)
GET_IMAGE = Method(_C + "images.v1.Images/Get", m.Name, m.ImageResponse)
LIST_CONTENT = Method(_C + "content.v1.Content/List", m.ListRequest, m.ContentInfos)
CONTENT_INFO = Method(_C + "content.v1.Content/Info", m.Digest, m.ContentInfoResponse)
READ_CONTENT = Method(_C + "content.v1.Content/Read", m.ReadRequest, m.ReadResponse)
STATUSES = Method(_C + "content.v1.Content/ListStatuses", m.ListRequest, m.Statuses)
LIST_LEASES = Method(_C + "leases.v1.Leases/List", m.ListRequest, m.Leases)
LIST_RESOURCES = Method(_C + "leases.v1.Leases/ListResources", m.LeaseId, m.Resources)
LIST_SNAPSHOTS = Method(_C + "snapshots.v1.Snapshots/List", m.ListSnapshotsRequest, m.SnapshotInfos)
STAT_SNAPSHOT = Method(_C + "snapshots.v1.Snapshots/Stat", m.UsageRequest, m.StatSnapshotResponse)
USAGE = Method(_C + "snapshots.v1.Snapshots/Usage", m.UsageRequest, m.Usage)
SUBSCRIBE = Method(_C + "events.v1.Events/Subscribe", m.ListRequest, m.Envelope)
CRI_VERSION = Method(_R + "Version", m.Empty, m.CriVersion)
CRI_CONTAINERS = Method(_R + "ListContainers", m.Empty, m.Containers)
CRI_IMAGES = Method(_I + "ListImages", m.Empty, m.CriImages)
CRI_STATUS = Method(_I + "ImageStatus", m.ImageSpecRequest, m.ImageStatusResponse)
CRI_FS = Method(_I + "ImageFsInfo", m.Empty, m.ImageFsInfoResponse)

CREATE_IMAGE = Method(
    _C + "images.v1.Images/Create", m.ImageRequest, m.ImageResponse, _check_create_image
)
UPDATE_IMAGE = Method(
    _C + "images.v1.Images/Update", m.UpdateImageRequest, m.ImageResponse, _check_update_image
)
UPDATE_CONTENT = Method(
    _C + "content.v1.Content/Update",
    m.UpdateContentRequest,
    m.ContentInfoResponse,
    _check_update_content,
)
ABORT = Method(_C + "content.v1.Content/Abort", m.AbortRequest, m.Empty, _check_abort)
WRITE = Method(_C + "content.v1.Content/Write", m.WriteRequest, m.WriteResponse, _check_write)
CREATE_LEASE = Method(
    _C + "leases.v1.Leases/Create", m.CreateLeaseRequest, m.LeaseResponse, _check_create_lease
)
DELETE_LEASE = Method(
    _C + "leases.v1.Leases/Delete", m.DeleteLeaseRequest, m.Empty, _check_delete_lease
)
ADD_RESOURCE = Method(
    _C + "leases.v1.Leases/AddResource", m.LeaseResourceRequest, m.Empty, _check_resource
)
DELETE_RESOURCE = Method(
    _C + "leases.v1.Leases/DeleteResource", m.LeaseResourceRequest, m.Empty, _check_resource
)
CRI_PULL = Method(_I + "PullImage", m.PullImageRequest, m.PullImageResponse, _check_pull)

# What the fuzz test goes through: everything that changes something.
CHANGING: tuple[Method[Any, Any], ...] = (
    *(CREATE_IMAGE, UPDATE_IMAGE, UPDATE_CONTENT, ABORT, WRITE, CREATE_LEASE, DELETE_LEASE),
    *(ADD_RESOURCE, DELETE_RESOURCE, CRI_PULL),
)


class Breaker:
    """Lets changing calls rest after the runtime went away on one; see the module's docstring."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_until = 0.0
        self._last_trip = 0.0
        self.trips = 0  # in a row
        self.total = 0

    def trip(self) -> None:
        now = self._clock()
        if now - self._last_trip > TRIPS_FORGOTTEN_SECONDS + REST_SECONDS[-1]:
            self.trips = 0
        self.trips += 1
        self.total += 1
        self._last_trip = now
        self._open_until = now + REST_SECONDS[min(self.trips, len(REST_SECONDS)) - 1]

    @property
    def rests(self) -> float:
        """Seconds until changing calls are allowed again; 0 when they are."""
        return max(0.0, self._open_until - self._clock())

    def check(self) -> None:
        if self.rests:
            raise base.BreakerOpenError(
                "the container runtime",
                f"it went away after a changing call ({self.trips} times in a row)",
                f"nothing is changed for another {self.rests:.0f} s; look at the runtime's log",
            )


class Calls:
    """A connection to the socket of containerd or another CRI runtime."""

    def __init__(self, socket: Path, namespace: str = NAMESPACE) -> None:
        self._socket = socket
        self._metadata = (("containerd-namespace", namespace),)
        self._channel: grpc.aio.Channel | None = None
        self._slots = asyncio.Semaphore(MOST_CALLS_AT_ONCE)
        self.breaker = Breaker()

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                f"unix://{self._socket}",
                options=[
                    ("grpc.max_receive_message_length", LARGEST_ANSWER),
                    ("grpc.max_send_message_length", LARGEST_REQUEST + 65536),
                    # A restarted runtime is found again at once, not after grpc's two minutes.
                    ("grpc.initial_reconnect_backoff_ms", 50),
                    ("grpc.min_reconnect_backoff_ms", 50),
                    ("grpc.max_reconnect_backoff_ms", 500),
                    # The proxies of the environment are not for a socket on this node.
                    ("grpc.enable_http_proxy", 0),
                ],
            )
        return self._channel

    async def close(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def read(
        self, method: Method[RequestT, ResponseT], request: RequestT, deadline: float = READ_SECONDS
    ) -> ResponseT:
        """A call that changes nothing. RuntimeCallError or one of its kinds."""
        assert method.check is None, method.path
        async with self._slots:
            return await self._unary(method, request, self._metadata, deadline)

    async def change(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        lease: str | None = None,
        deadline: float = CHANGE_SECONDS,
    ) -> ResponseT:
        """A call that changes something; InvalidCallError instead of anything malformed."""
        metadata = self._checked(method, request, lease)
        try:
            async with self._slots:
                return await self._unary(method, request, metadata, deadline)
        except base.RuntimeGoneError as error:
            self._went_away(error)
            raise

    async def long_change(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        lease: str | None,
        deadline: float,
    ) -> ResponseT:
        """``change`` for a pull: it takes hours and no slot of the short calls."""
        metadata = self._checked(method, request, lease)
        try:
            return await self._unary(method, request, metadata, deadline)
        except base.RuntimeGoneError as error:
            self._went_away(error)
            raise

    def _checked(
        self, method: Method[RequestT, Any], request: RequestT, lease: str | None
    ) -> tuple[tuple[str, str], ...]:
        assert method.check is not None, method.path
        _require(isinstance(request, method.request), "a request of another method")
        method.check(request)
        try:
            _require(len(request.encode()) <= LARGEST_REQUEST, "a request over 4 MiB")
        except WireError as error:
            _require(False, str(error))
        self.breaker.check()
        if lease is None:
            return self._metadata
        _check_lease_id(lease)
        return (*self._metadata, ("containerd-lease", lease))

    def _went_away(self, error: base.RuntimeGoneError) -> None:
        # A call that never reached a runtime cannot have killed it.
        if not any(text in error.cause for text in ("failed to connect", "No such file")):
            self.breaker.trip()

    async def _unary(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        metadata: tuple[tuple[str, str], ...],
        deadline: float,
    ) -> ResponseT:
        call = self._connected().unary_unary(
            method.path,
            request_serializer=method.request.encode,
            response_deserializer=method.response.decode,
        )
        try:
            return await call(request, metadata=metadata, timeout=deadline)
        except grpc.aio.AioRpcError as error:
            raise translate(method.path, error) from None

    async def stream(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        deadline: float | None = READ_SECONDS,
    ) -> AsyncIterator[ResponseT]:
        """A reading call with many answers; without a deadline it lasts until it breaks."""
        assert method.check is None, method.path
        call = self._connected().unary_stream(
            method.path,
            request_serializer=method.request.encode,
            response_deserializer=method.response.decode,
        )(request, metadata=self._metadata, timeout=deadline)
        try:
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise translate(method.path, error) from None
        finally:
            call.cancel()

    def writer(self, lease: str) -> "Writer":
        """A stream of Content.Write under ``lease``."""
        return Writer(self, lease)


class Writer:
    """One Content.Write stream: each request is checked, each answer awaited within a deadline."""

    def __init__(self, calls: Calls, lease: str) -> None:
        self._calls = calls
        self._lease = lease
        self._call: Any = None

    async def send(self, request: m.WriteRequest) -> m.WriteResponse:
        metadata = self._calls._checked(WRITE, request, self._lease)
        if self._call is None:
            self._call = self._calls._connected().stream_stream(
                WRITE.path,
                request_serializer=m.WriteRequest.encode,
                response_deserializer=m.WriteResponse.decode,
            )(metadata=metadata)
        try:
            async with asyncio.timeout(CHANGE_SECONDS):
                await self._call.write(request)
                answer = await self._call.read()
                if answer is grpc.aio.EOF:
                    raise grpc.aio.AioRpcError(
                        await self._call.code(),
                        grpc.aio.Metadata(),
                        grpc.aio.Metadata(),
                        details=await self._call.details(),
                    )
        except grpc.aio.AioRpcError as error:
            translated = translate(WRITE.path, error)
            if isinstance(translated, base.RuntimeGoneError):
                self._calls._went_away(translated)
            raise translated from None
        except asyncio.InvalidStateError as error:  # the stream was ended under our hands
            raise base.RuntimeCallError(WRITE.path, "the stream broke", "it is retried") from error
        except TimeoutError as error:
            raise base.RuntimeSlowError(
                WRITE.path, f"no answer within {CHANGE_SECONDS:.0f} s", "it is retried"
            ) from error
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


def translate(path: str, error: grpc.aio.AioRpcError) -> base.RuntimeCallError:
    """A gRPC status as an error of ours. Details are the runtime's words, shortened."""
    method = path.rpartition("/")[2]
    code = error.code()
    details = (error.details() or code.name)[:1000]
    if code == grpc.StatusCode.UNAVAILABLE:
        return base.RuntimeGoneError(
            f"container runtime ({method})",
            details,
            "is it running, and is preheat.socket its socket?",
            code.name,
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return base.RuntimeSlowError(
            f"container runtime ({method})", "no answer before the deadline", "", code.name
        )
    return base.RuntimeCallError(f"container runtime ({method})", details, "", code.name)
