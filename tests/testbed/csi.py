"""Kubelet's side of CSI: a root directory as kubelet has, and its calls over the real sockets."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

import kit.files
from cache.csi import csi_pb2 as pb
from cache.csi import volumes
from tests.testbed import agent, waiting

SECONDS = 110.0  # as kubelet has 2 minutes


class Kubelet:
    """``root``: as its --root-dir. Short: a socket's path has at most 107 bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("pods", "plugins", "plugins_registry"):
            (root / name).mkdir(parents=True)
        self.csi, self.registration = volumes.sockets(root)

    def serve(self, node: agent.Agent, wait: str = "1s") -> None:
        """Put the driver into the agent's settings."""
        node.cache["csi"] = {"enabled": True, "wait": wait}
        node.settings.setdefault("kubelet", {})["root_dir"] = str(self.root)

    def target(self, pod: str = "") -> Path:
        """Where kubelet wants a volume; the directory above it is there."""
        found = (
            self.root / "pods" / (pod or str(uuid.uuid4())) / "volumes/kubernetes.io~csi/d/mount"
        )
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def call(
        self, method: str, request: Any, answer: Any, *, registration: bool = False,
        seconds: float = SECONDS,
    ) -> Any:  # fmt: skip
        """grpc.RpcError when it fails."""
        socket = self.registration if registration else self.csi
        with grpc.insecure_channel(kit.files.grpc_address(socket)) as channel:
            stub: Any = channel.unary_unary(
                f"/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=answer.FromString,
            )
            return stub(request, timeout=waiting.limit(seconds), wait_for_ready=False)

    def publish(
        self, target: Path, attributes: Mapping[str, str], *, identity: str = "v", **more: Any
    ) -> None:
        fields = {
            "volume_id": identity,
            "target_path": str(target),
            "readonly": True,
            "volume_capability": pb.VolumeCapability(
                mount=pb.VolumeCapability.Mount(),
                access_mode=pb.VolumeCapability.AccessMode(mode="SINGLE_NODE_WRITER"),
            ),
            "volume_context": attributes,
            **more,
        }
        self.call("csi.v1.Node/NodePublishVolume", pb.PublishRequest(**fields), pb.Empty)

    def unpublish(self, target: Path, *, identity: str = "v") -> None:
        request = pb.UnpublishRequest(volume_id=identity, target_path=str(target))
        self.call("csi.v1.Node/NodeUnpublishVolume", request, pb.Empty)

    def stats(self, target: Path) -> Any:
        request = pb.StatsRequest(volume_id="v", volume_path=str(target))
        return self.call("csi.v1.Node/NodeGetVolumeStats", request, pb.StatsResponse)


@contextlib.contextmanager
def refused(code: str, words: str) -> Iterator[list[str]]:
    """The call in the block fails with this code and a text that has these words.

    The list gets the text.
    """
    said: list[str] = []
    try:
        yield said
    except grpc.RpcError as error:
        found: Any = error
        assert found.code().name == code, found.details()
        assert words in found.details(), found.details()
        said.append(found.details())
    else:
        raise AssertionError(f"no error; expected {code}: {words}")
