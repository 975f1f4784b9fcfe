"""The connection to containerd, and its calls of CRI.

Why each changing call is checked: containerd 1.7 and 2.x die of some malformed calls (an image
update without its target, a lease resource without its kind), and with containerd every pod start
on the node. So each changing ``Method`` is declared with its check, and ``change`` and ``Exchange``
are the only ways to send one.

Why a breaker: when the connection breaks on a changing call, the same call may kill the runtime
again. Changing calls are then refused for a time that grows with each broken connection, however
many calls were in flight on it. Reading calls are always allowed, and so are releases, unless one
of them broke it. A call that was in flight for a while, as a pull is, did not break it: somebody
restarted the runtime. A runtime that answers UNAVAILABLE itself (containerd does for a locked
download) has not gone away.

Why answers are decoded here: grpc logs an error of a deserialiser and returns None instead of the
answer. Here such an answer is a RuntimeCallError.
"""

import asyncio
import contextlib
import dataclasses
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf import empty_pb2
from google.protobuf.message import DecodeError, Message

import kit.files
import kit.tasks
from preheat.image import manifest
from preheat.runtimes import base, cri_pb2

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
Metadata = tuple[tuple[str, str], ...]

NAMESPACE = "k8s.io"  # containerd's namespace for what the kubelet starts
PROBE_SECONDS = 3.0
READ_SECONDS = 10.0
CHANGE_SECONDS = 30.0
LARGEST_ANSWER = 32 * 1024**2
LARGEST_REQUEST = 4 * 1024**2
MOST_CALLS_AT_ONCE = 16
LARGEST_SECRET = 64 * 1024
# A call fails some moments before grpc tells that its connection broke (measured: below 10 ms).
_BREAK_TOLD_SECONDS = 0.25
# What grpc says of a call whose connection broke; of a stream that is written to at that moment it
# says INTERNAL. The runtime itself may answer the same.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
_LEASE = re.compile(rf"{base.OWN_PREFIX}[a-z0-9-]{{1,80}}")
# Changing calls rest for so long after the runtime went away for the first, second, … time.
REST_SECONDS = (1.0, 10.0, 60.0, 600.0, 3600.0)
TRIPS_FORGOTTEN_SECONDS = 900.0
# A call that is in flight for longer is not what the runtime died of.
EVIDENCE_SECONDS = 10.0


def decode(kind: type[ResponseT], data: bytes, what: str) -> ResponseT:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise base.RuntimeCallError(what, f"cannot be decoded ({error})", "", "INTERNAL") from error


@dataclass(frozen=True)
class Method(Generic[RequestT, ResponseT]):
    """A remote method. It has a ``check`` exactly when it changes something. ``frees``: it only
    lets go of what we held, or notes that this was asked for."""

    path: str
    request: type[RequestT]
    response: type[ResponseT]
    check: Callable[[RequestT], None] | None = None
    frees: bool = False

    def decode(self, data: bytes) -> ResponseT:
        return decode(self.response, data, f"the answer of the {self._name}")

    @property
    def _name(self) -> str:
        return f"container runtime ({self.path.rpartition('/')[2]})"

    def error(self, error: grpc.aio.AioRpcError, *, gone: bool) -> base.RuntimeCallError:
        """A gRPC status as an error of ours, with the runtime's words, shortened."""
        code = error.code()
        details = _plain(error.details() or code.name)[:1000]
        if gone:
            return base.RuntimeGoneError(self._name, details, base.LOOK, code.name)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return base.RuntimeSlowError(self._name, "no answer in time", "", code.name)
        return base.RuntimeCallError(self._name, details, "", code.name)


def _plain(details: str) -> str:
    """gRPC says the socket's path several times, and as in an address: %20 for a space."""
    details = re.sub(r"^.* addr: unix:(\S+) error: ", r"unix:\1: ", details)
    plain = re.sub(r"\bunix:\S+", lambda address: urllib.parse.unquote(address[0]), details)
    return plain.removeprefix("unix:")


def require(condition: bool, what: str) -> None:
    """For checks: InvalidCallError with ``what`` is wrong."""
    if not condition:
        raise base.InvalidCallError(
            "a call to the container runtime", f"{what}; it was not sent", "report this as a bug"
        )


def check_lease(lease: str) -> None:
    require(_LEASE.fullmatch(lease) is not None, "a containerd lease that is not ours")


class Breaker:
    """Stops changing calls after the runtime went away on one; see the module's docstring."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open_until = 0.0
        self._last_trip = 0.0
        self._by_release = False
        self.in_row = 0
        self.total = 0

    def trip(self, method: Method[Any, Any]) -> None:
        now = self._clock()
        self._by_release = method.frees
        if now - self._last_trip > TRIPS_FORGOTTEN_SECONDS + REST_SECONDS[-1]:
            self.in_row = 0
        self.in_row += 1
        self.total += 1
        self._last_trip = now
        self._open_until = now + REST_SECONDS[min(self.in_row, len(REST_SECONDS)) - 1]

    @property
    def rests(self) -> float:
        """Seconds until changing calls are allowed again; 0 when they are."""
        return max(0.0, self._open_until - self._clock())

    def check(self, method: Method[Any, Any]) -> None:
        if self.rests and (self._by_release or not method.frees):
            raise base.BreakerOpenError(
                "the container runtime",
                f"it went away after a changing call ({self.in_row} times in a row)",
                f"the agent changes nothing for {self.rests:.0f} s; see the runtime's log",
            )


@dataclass(frozen=True)
class Sent:
    """When a call began: monotonic time, and how many connections had broken."""

    broken: int
    at: float


class Connection:
    """A connection to containerd's socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._metadata: Metadata = (("containerd-namespace", NAMESPACE),)
        self._channel: grpc.aio.Channel | None = None
        self._slots = asyncio.Semaphore(MOST_CALLS_AT_ONCE)
        self._watch: asyncio.Task[None] | None = None
        self.broken = 0  # how many working connections broke
        self._tripped = 0  # up to which of them the breaker knows
        self._break = asyncio.Event()
        self.breaker = Breaker()

    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                kit.files.grpc_address(self._socket),
                options=[
                    ("grpc.max_receive_message_length", LARGEST_ANSWER),
                    ("grpc.max_send_message_length", LARGEST_REQUEST + 65536),
                    # Find a restarted runtime at once, not after grpc's two minutes.
                    ("grpc.initial_reconnect_backoff_ms", 50),
                    ("grpc.min_reconnect_backoff_ms", 50),
                    ("grpc.max_reconnect_backoff_ms", 500),
                    # A socket on this node needs no proxy of the environment.
                    ("grpc.enable_http_proxy", 0),
                ],
            )
            self._watch = asyncio.create_task(self._watch_state(self._channel), name="connection")
        return self._channel

    async def _watch_state(self, channel: grpc.aio.Channel) -> None:
        """Count the working connections that break."""
        state = channel.get_state()
        while True:
            await channel.wait_for_state_change(state)
            if state == grpc.ChannelConnectivity.READY:
                self.broken += 1
                self._break.set()
            state = channel.get_state()

    async def close(self) -> None:
        await kit.tasks.end(self._watch)
        self._watch = None
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    async def read(
        self, method: Method[RequestT, ResponseT], request: RequestT, deadline: float = READ_SECONDS
    ) -> ResponseT:
        """A call that changes nothing. Raises RuntimeCallError."""
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
        takes_slot: bool = True,
    ) -> ResponseT:
        """A call that changes something. A malformed one raises InvalidCallError and is not sent.

        ``takes_slot``: a pull takes hours, and none of the slots that limit the short calls.
        """
        metadata = self.checked(method, request, lease)
        async with self._slots if takes_slot else contextlib.nullcontext():
            return await self._unary(method, request, metadata, deadline)

    def checked(
        self, method: Method[RequestT, Any], request: RequestT, lease: str | None
    ) -> Metadata:
        """The metadata with which ``request`` may be sent; raises when it may not."""
        assert method.check is not None, method.path
        require(isinstance(request, method.request), "a request of another method")
        method.check(request)
        require(request.ByteSize() <= LARGEST_REQUEST, "a request over 4 MiB")
        self.breaker.check(method)
        if lease is None:
            return self._metadata
        check_lease(lease)
        return (*self._metadata, ("containerd-lease", lease))

    async def failure(
        self, method: Method[Any, Any], error: grpc.aio.AioRpcError, sent: Sent
    ) -> base.RuntimeCallError:
        """A changing call trips the breaker, once for each connection that broke below it. One that
        was never made is no reason."""
        young = time.monotonic() - sent.at < EVIDENCE_SECONDS
        gone = error.code() in _BROKEN and await self._is_gone(sent.broken)
        evidence = gone and young and method.check is not None
        if evidence and self.broken > max(sent.broken, self._tripped):
            self._tripped = self.broken
            self.breaker.trip(method)
        return method.error(error, gone=gone)

    async def _is_gone(self, broken: int) -> bool:
        # Now: a call that found nobody to connect to fails some moments before the next attempt.
        away = self.channel().get_state() != grpc.ChannelConnectivity.READY
        if self.broken == broken:
            self._break.clear()
            await kit.tasks.until(self._break, _BREAK_TOLD_SECONDS)
        away = away or self.channel().get_state() != grpc.ChannelConnectivity.READY
        return away or self.broken > broken

    async def _unary(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        metadata: Metadata,
        deadline: float,
    ) -> ResponseT:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        call = self.channel().unary_unary(method.path)
        sent = Sent(self.broken, time.monotonic())
        try:
            data = await call(request.SerializeToString(), metadata=metadata, timeout=deadline)
        except grpc.aio.AioRpcError as error:
            raise await self.failure(method, error, sent) from None
        return method.decode(data)

    async def stream(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        deadline: float | None = READ_SECONDS,
    ) -> AsyncIterator[ResponseT]:
        """A reading call with many answers. Without a deadline it lasts until it breaks."""
        assert method.check is None, method.path
        start: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        start = self.channel().unary_stream(method.path)
        sent = Sent(self.broken, time.monotonic())
        call = start(request.SerializeToString(), metadata=self._metadata, timeout=deadline)
        try:
            async for data in call:
                yield method.decode(data)
        except grpc.aio.AioRpcError as error:
            raise await self.failure(method, error, sent) from None
        finally:
            call.cancel()


class Exchange(Generic[RequestT, ResponseT]):
    """A stream of changing requests under a lease. Each is checked, each answered in time."""

    def __init__(
        self, connection: Connection, method: Method[RequestT, ResponseT], lease: str
    ) -> None:
        self._connection = connection
        self._method = method
        self._lease = lease
        self._call: Any = None

    async def send(self, request: RequestT, deadline: float = CHANGE_SECONDS) -> ResponseT:
        metadata = self._connection.checked(self._method, request, self._lease)
        if self._call is None:
            stream: Any = self._connection.channel().stream_stream(self._method.path)
            self._call = stream(metadata=metadata)
        sent = Sent(self._connection.broken, time.monotonic())
        try:
            async with asyncio.timeout(deadline):
                await self._call.write(request.SerializeToString())
                answer = await self._call.read()
                if answer is grpc.aio.EOF:
                    raise await self._ended()
        except grpc.aio.AioRpcError as error:
            raise await self._connection.failure(self._method, error, sent) from None
        except asyncio.InvalidStateError:  # the stream ended while we wrote
            ended = await self._ended()
            raise await self._connection.failure(self._method, ended, sent) from None
        except TimeoutError as error:
            raise base.RuntimeSlowError(
                self._method.path, f"no answer in {deadline:.0f} s", "the agent tries again"
            ) from error
        return self._method.decode(answer)

    async def _ended(self) -> grpc.aio.AioRpcError:
        """With what the stream ended."""
        code, details = await self._call.code(), await self._call.details()
        return grpc.aio.AioRpcError(
            code, grpc.aio.Metadata(), grpc.aio.Metadata(), details or "the stream ended"
        )

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()


# --- CRI ------------------------------------------------------------------------------------------


def _check_pull(request: cri_pb2.PullImageRequest) -> None:
    try:
        manifest.parse(request.image.image)
    except ValueError:
        require(False, "a pull without a valid reference")
    auth = request.auth
    secrets = (auth.username, auth.password, auth.identity_token, auth.registry_token)
    fits = all(len(each) <= LARGEST_SECRET for each in secrets)
    require(fits, "credentials of more than 64 KiB")


Empty = empty_pb2.Empty
_IMAGES = "/runtime.v1.ImageService/"
_RUNTIME = "/runtime.v1.RuntimeService/"
LIST_CONTAINERS = Method(_RUNTIME + "ListContainers", Empty, cri_pb2.ListContainersResponse)
CONTAINER_STATUS = Method(
    _RUNTIME + "ContainerStatus", cri_pb2.ContainerStatusRequest, cri_pb2.ContainerStatusResponse
)
LIST_IMAGES = Method(_IMAGES + "ListImages", Empty, cri_pb2.ListImagesResponse)
IMAGE_STATUS = Method(_IMAGES + "ImageStatus", cri_pb2.ImageRequest, cri_pb2.ImageStatusResponse)
IMAGE_FS_INFO = Method(_IMAGES + "ImageFsInfo", Empty, cri_pb2.ImageFsInfoResponse)
PULL_IMAGE = Method(
    _IMAGES + "PullImage", cri_pb2.PullImageRequest, cri_pb2.PullImageResponse, _check_pull
)


class Cri:
    """What containerd answers through CRI."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        # Of each container; they never change.
        self._volumes: dict[str, frozenset[str]] = {}

    async def pull(self, ref: str, login: base.Login | None, lease: str, deadline: float) -> str:
        """Pull under a lease; the image id. The lease keeps the bytes if cancelled."""
        request = cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image=ref))
        if login is not None:  # this message has a repr, Login has none: do not pass it on
            request.auth.CopyFrom(cri_pb2.AuthConfig(**dataclasses.asdict(login)))
        answer = await self.connection.change(
            PULL_IMAGE, request, lease=lease, deadline=deadline, takes_slot=False
        )
        return answer.image_ref

    async def image_paths(self, deadline: float = READ_SECONDS) -> list[str]:
        """The directories in which the runtime keeps images."""
        info = await self.connection.read(IMAGE_FS_INFO, Empty(), deadline)
        return [each.fs_id.mountpoint for each in info.image_filesystems if each.HasField("fs_id")]

    async def listed(self) -> frozenset[str]:
        """The names of all images, as the kubelet hears them."""
        answer = await self.connection.read(LIST_IMAGES, Empty())
        return frozenset(
            name for each in answer.images for name in (*each.repo_tags, *each.repo_digests)
        )

    async def images_in_use(self, records: Sequence[base.Record]) -> frozenset[str]:
        """The image ids of all containers, and of the images that they have as volumes."""
        answer = await self.connection.read(LIST_CONTAINERS, Empty())
        ids = {each.id for each in answer.containers}
        self._volumes = {key: found for key, found in self._volumes.items() if key in ids}
        new = sorted(ids - self._volumes.keys())
        found = await asyncio.gather(*map(self._volumes_of, new))
        self._volumes |= zip(new, found, strict=True)
        used = {each.image_ref for each in answer.containers}.union(*self._volumes.values())
        return base.image_ids(used, records)

    async def _volumes_of(self, container: str) -> frozenset[str]:
        """The images that a container has mounted, as the kubelet named them (KEP-4639)."""
        request = cri_pb2.ContainerStatusRequest(container_id=container)
        with base.allowing("NOT_FOUND"):
            answer = await self.connection.read(CONTAINER_STATUS, request)
            return frozenset(each.image.image for each in answer.status.mounts if each.image.image)
        return frozenset()  # it has gone since the list
