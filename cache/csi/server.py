"""The driver's two sockets: CSI's identity and node service, and the registration with kubelet.

Kubelet watches <root>/plugins_registry: a socket that appears there is asked for the driver's name
and for the path of its CSI socket. It looks again after its own start. So the registration needs no
client of ours, and a socket that was deleted is simply made again.
"""

import contextlib
import importlib.metadata
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BoolValue

import kit.child
import kit.errors
import kit.files
from cache.csi import csi_pb2 as pb
from cache.csi import node, volumes

log = structlog.get_logger("csi")

STOP_SECONDS = 2.0
LONGEST_SOCKET = 107  # bytes, sun_path of unix(7)
LARGEST_REQUEST = 256 * 1024
MOST_REQUESTS = 256  # at once; a node has at most some hundred pods
MOST_TEXT = 1000  # characters of an error
# Kubelet's own deadline is 2 minutes; an answer before it reaches the pod's events.
SPARE_SECONDS = 2 * node.MOUNT_SECONDS
_NO_DEADLINE = 120.0
_READERS = (
    pb.VolumeCapability.AccessMode.SINGLE_NODE_READER_ONLY,
    pb.VolumeCapability.AccessMode.MULTI_NODE_READER_ONLY,
)

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Message]]


def code_of(error: Exception) -> grpc.StatusCode:
    """What kubelet is told. After UNAVAILABLE, DEADLINE_EXCEEDED and ABORTED it believes that
    something may be mounted, and unpublishes before it gives up; after the others not."""
    for kind, code in (
        (volumes.TakenError, grpc.StatusCode.ALREADY_EXISTS),
        (node.BusyError, grpc.StatusCode.ABORTED),
        (kit.errors.SettingsError, grpc.StatusCode.INVALID_ARGUMENT),
        (kit.errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
        (kit.errors.RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
        (kit.errors.HostError, grpc.StatusCode.FAILED_PRECONDITION),
        (kit.errors.SourceError, grpc.StatusCode.UNAVAILABLE),
        (kit.child.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    ):
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


class Server:
    """``requests``: how many ended how, by method and code. ``trouble``: kubelet's last refusal."""

    def __init__(self, served: node.NodeService) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.registered = False
        self.trouble = ""
        self._node = served
        self._kubelet: Path | None = None
        self._running: dict[Path, tuple[grpc.aio.Server, int]] = {}  # and the socket's inode

    # --- life

    async def serve(self, kubelet: Path) -> None:
        """Have both sockets there. HostError when they cannot be made."""
        if self._kubelet != kubelet:
            await self.stop()
        self._kubelet = kubelet
        csi, registration = volumes.sockets(kubelet)
        try:
            if not registration.parent.is_dir():
                raise FileNotFoundError(None, "it is not there", str(registration.parent))
            csi.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            # The registration last: kubelet calls the other one at once.
            await self._keep(csi, "csi.v1.Identity", "csi.v1.Node")
            await self._keep(registration, "pluginregistration.Registration")
        except (OSError, RuntimeError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            raise kit.errors.HostError(
                f"kubelet.root_dir {kubelet}",
                f"the driver's sockets cannot be made there ({text})",
                "set it to the kubelet's root directory; in a pod mount plugins_registry and "
                f"plugins/{volumes.DRIVER} of it",
            ) from error  # fmt: skip

    async def _keep(self, socket: Path, *services: str) -> None:
        """A server on ``socket``, made anew when somebody deleted or replaced the file."""
        if socket in self._running:
            with contextlib.suppress(FileNotFoundError):
                if socket.lstat().st_ino == self._running[socket][1]:
                    return
            await self._end(socket)
        if len(os.fsencode(socket)) > LONGEST_SOCKET:
            raise OSError(None, f"the path {socket} is longer than {LONGEST_SOCKET} bytes")
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", LARGEST_REQUEST),
                ("grpc.so_reuseport", 0),
            ),
            maximum_concurrent_rpcs=MOST_REQUESTS,
        )
        handlers = self._handlers()
        for service in services:
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, handlers[service]),)
            )
        server.add_insecure_port(kit.files.grpc_address(socket))
        socket.chmod(0o600)
        await server.start()
        self._running[socket] = (server, socket.lstat().st_ino)

    async def _end(self, socket: Path) -> None:
        await self._running.pop(socket)[0].stop(STOP_SECONDS)

    async def stop(self) -> None:
        """Take the sockets away: kubelet forgets the driver until the next agent. Mounts stay."""
        for socket in reversed(list(self._running)):
            await self._end(socket)
            socket.unlink(missing_ok=True)
        self.registered, self._kubelet = False, None

    # --- methods

    def _handlers(self) -> dict[str, dict[str, Any]]:
        def of(request: Any, handler: Handler) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                self._answered(handler),
                request_deserializer=request.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )

        return {
            "csi.v1.Identity": {
                "GetPluginInfo": of(pb.Empty, self._plugin_info),
                "GetPluginCapabilities": of(pb.Empty, self._nothing),
                "Probe": of(pb.Empty, self._probe),
            },
            "csi.v1.Node": {
                "NodePublishVolume": of(pb.PublishRequest, self._publish),
                "NodeUnpublishVolume": of(pb.UnpublishRequest, self._unpublish),
                "NodeGetVolumeStats": of(pb.StatsRequest, self._stats),
                "NodeGetCapabilities": of(pb.Empty, self._capabilities),
                "NodeGetInfo": of(pb.Empty, self._node_info),
            },
            "pluginregistration.Registration": {
                "GetInfo": of(pb.Empty, self._registration),
                "NotifyRegistrationStatus": of(pb.RegistrationStatus, self._registration_status),
            },
        }

    def _answered(self, handler: Handler) -> Handler:
        """With our errors as codes and texts of gRPC, and counted."""
        name = handler.__name__.strip("_")

        async def answer(request: Any, context: Context) -> Message:
            try:
                result = await handler(request, context)
            except (kit.errors.AgentError, OSError, RuntimeError) as error:
                code = code_of(error)
                self.requests[name, code.name.lower()] += 1
                text = str(error)
                if code is grpc.StatusCode.INTERNAL:
                    log.warning("request failed", request=name, why=text)
                    text = text.splitlines()[-1] if text else code.name
                await context.abort(code, text[:MOST_TEXT])
                raise AssertionError("abort raises") from error
            self.requests[name, "ok"] += 1
            return result

        return answer

    async def _plugin_info(self, _: Any, __: Context) -> Message:
        version = importlib.metadata.version("nodeagent")
        return pb.PluginInfo(name=volumes.DRIVER, vendor_version=version)

    async def _nothing(self, _: Any, __: Context) -> Message:
        return pb.Empty()

    async def _probe(self, _: Any, __: Context) -> Message:
        return pb.ProbeResponse(ready=BoolValue(value=True))

    async def _publish(self, request: Any, context: Context) -> Message:
        _require(volume_id=request.volume_id, target_path=request.target_path)
        _require(volume_capability=request.HasField("volume_capability"))
        capability = request.volume_capability
        wanted = volumes.wanted(
            request.volume_context,
            read_only=request.readonly or capability.access_mode.mode in _READERS,
            block=capability.HasField("block"),
            options=bool(capability.mount.mount_flags or capability.mount.fs_type),
        )
        left = context.time_remaining()
        seconds = max(0.0, (_NO_DEADLINE if left is None else left) - SPARE_SECONDS)
        await self._node.publish(request.volume_id, request.target_path, wanted, seconds)
        return pb.Empty()

    async def _unpublish(self, request: Any, _: Context) -> Message:
        _require(volume_id=request.volume_id, target_path=request.target_path)
        await self._node.unpublish(request.volume_id, request.target_path)
        return pb.Empty()

    async def _stats(self, request: Any, _: Context) -> Message:
        _require(volume_id=request.volume_id, volume_path=request.volume_path)
        found = await self._node.stats(request.volume_path)
        units = ((found.bytes, pb.Usage.BYTES), (found.inodes, pb.Usage.INODES))
        return pb.StatsResponse(
            usage=[pb.Usage(total=each, used=each, unit=unit) for each, unit in units],
            volume_condition=pb.Condition(
                abnormal=bool(found.trouble), message=found.trouble or found.said
            ),
        )

    async def _capabilities(self, _: Any, __: Context) -> Message:
        kinds = (pb.NodeCapability.Rpc.GET_VOLUME_STATS, pb.NodeCapability.Rpc.VOLUME_CONDITION)
        made = [pb.NodeCapability(rpc=pb.NodeCapability.Rpc(type=kind)) for kind in kinds]
        return pb.NodeCapabilities(capabilities=made)

    async def _node_info(self, _: Any, __: Context) -> Message:
        return pb.NodeInfo(node_id=self._node.here.name)

    async def _registration(self, _: Any, __: Context) -> Message:
        assert self._kubelet is not None
        csi, _socket = volumes.sockets(self._kubelet)
        return pb.Registration(
            type="CSIPlugin",
            name=volumes.DRIVER,
            endpoint=str(csi),
            supported_versions=["1.0.0"],
        )

    async def _registration_status(self, status: Any, _: Context) -> Message:
        self.registered = status.plugin_registered
        self.trouble = "" if self.registered else (status.error or "it did not say why")[:MOST_TEXT]
        if self.trouble:
            log.error("kubelet refuses the driver", why=self.trouble)
        else:
            log.info("kubelet knows the driver", driver=volumes.DRIVER)
        return pb.Empty()


def _require(**fields: str | bool) -> None:
    for name, value in fields.items():
        if not value:
            raise kit.errors.SettingsError("request", f"it has no {name}", "it comes from kubelet")
