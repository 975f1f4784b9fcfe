"""Pods on a real containerd, as kubelet makes them: a sandbox and containers, no network."""

import uuid
from collections.abc import Sequence

from google.protobuf.message import Message

from tests.testbed import containerd, pods_pb2, registry


def pause_image(images: registry.Registry) -> str:
    """A sandbox image in the registry: one static program that sleeps; its repository and tag."""
    program = (containerd.RUNTIMES / "bookworm" / "bin" / "busybox").read_bytes()
    layer = registry.layer_of({"bin/busybox": program})
    images.push("k8s/pause", "1", [layer], command=["/bin/busybox", "sleep", "100000"])
    return "k8s/pause:1"


class Pods:
    def __init__(self, kubelet: containerd.Kubelet) -> None:
        self._kubelet = kubelet

    async def _call(self, method: str, request: Message) -> str:
        path = f"/runtime.v1.RuntimeService/{method}"
        answer = await self._kubelet.raw(path, request.SerializeToString())
        return pods_pb2.Id.FromString(answer).id

    async def run(self, image: str, volumes: Sequence[str] = ()) -> str:
        """A pod with one container of ``image``, created; its sandbox id. ``volumes``: images that
        it mounts, by the ids that PullImage gave, as a kubelet names them."""
        uid = str(uuid.uuid4())
        config = pods_pb2.SandboxConfig(
            metadata=pods_pb2.Metadata(name=f"pod-{uid[:8]}", uid=uid, namespace="default")
        )
        config.linux.security_context.namespace_options.network = pods_pb2.NODE
        sandbox = await self._call("RunPodSandbox", pods_pb2.RunSandboxRequest(config=config))
        container = pods_pb2.ContainerConfig(
            metadata=pods_pb2.Metadata(name="main"),
            image=pods_pb2.ImageSpec(image=image),
            command=["/bin/true"],
            mounts=[
                pods_pb2.Mount(
                    container_path=f"/volumes/{number}",
                    readonly=True,
                    image=pods_pb2.ImageSpec(image=each),
                )
                for number, each in enumerate(volumes)
            ],
        )
        request = pods_pb2.CreateContainerRequest(
            pod_sandbox_id=sandbox, config=container, sandbox_config=config
        )
        await self._call("CreateContainer", request)
        return sandbox

    async def end(self, sandbox: str) -> None:
        await self._call("StopPodSandbox", pods_pb2.Id(id=sandbox))
        await self._call("RemovePodSandbox", pods_pb2.Id(id=sandbox))
