"""Pods on a real containerd, as a kubelet makes them: a sandbox and containers, no network."""

import uuid
from dataclasses import dataclass

from preheat.runtimes import messages as m
from preheat.runtimes.wire import Message, number
from tests.testbed import containerd, registry

HOST_NETWORK = 2


@dataclass(frozen=True)
class _Metadata(Message):
    name: str = number(1, "")
    uid: str = number(2, "")
    namespace: str = number(3, "")


@dataclass(frozen=True)
class _Namespaces(Message):
    network: int = number(1, 0)


@dataclass(frozen=True)
class _Security(Message):
    namespaces: _Namespaces | None = number(1)


@dataclass(frozen=True)
class _Linux(Message):
    security: _Security | None = number(2)


@dataclass(frozen=True)
class _Sandbox(Message):
    metadata: _Metadata | None = number(1)
    linux: _Linux | None = number(8)


@dataclass(frozen=True)
class _RunSandbox(Message):
    config: _Sandbox | None = number(1)


@dataclass(frozen=True)
class _Id(Message):
    id: str = number(1, "")


@dataclass(frozen=True)
class _ContainerName(Message):
    name: str = number(1, "")


@dataclass(frozen=True)
class _Container(Message):
    metadata: _ContainerName | None = number(1)
    image: m.ImageSpec | None = number(2)
    command: tuple[str, ...] = number(3, ())


@dataclass(frozen=True)
class _CreateContainer(Message):
    sandbox: str = number(1, "")
    config: _Container | None = number(2)
    sandbox_config: _Sandbox | None = number(3)


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
        return _Id.decode(await self._kubelet.raw(path, request.encode())).id

    async def run(self, image: str) -> str:
        """A pod with one container of ``image``, created; its sandbox id."""
        uid = str(uuid.uuid4())
        linux = _Linux(security=_Security(namespaces=_Namespaces(network=HOST_NETWORK)))
        config = _Sandbox(_Metadata(f"pod-{uid[:8]}", uid, "default"), linux)
        sandbox = await self._call("RunPodSandbox", _RunSandbox(config))
        container = _Container(
            metadata=_ContainerName("main"), image=m.ImageSpec(image=image), command=("/bin/true",)
        )
        await self._call("CreateContainer", _CreateContainer(sandbox, container, config))
        return sandbox

    async def end(self, sandbox: str) -> None:
        await self._call("StopPodSandbox", _Id(sandbox))
        await self._call("RemovePodSandbox", _Id(sandbox))
