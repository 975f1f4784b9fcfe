"""A whole preheating room on a real containerd, without the process around it."""

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kit.findings
from kube.settings import KubeletSettings, ThisNode
from preheat import settings, status
from preheat.component import Preheat
from preheat.runtimes import base
from preheat.runtimes import containerd as adapter
from tests.testbed import constants, containerd, kubelet_files, proxy, registry, waiting

MB = 1_000_000
until = waiting.until_async


class Reported:
    """The reporting port, remembered."""

    def __init__(self) -> None:
        self.found: list[kit.findings.Finding] = []

    def report(self, origin: str, findings: list[kit.findings.Finding]) -> None:
        self.found = findings


class Clock:
    """Stands for the module ``time``: runs with it, ahead by what ``advance`` was given."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def advance(self, seconds: float) -> None:
        self._ahead += seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead

    def gmtime(self, seconds: float) -> time.struct_time:
        return time.gmtime(seconds)

    def time(self) -> float:  # last: from here on the name is not the module in this class
        return time.time() + self._ahead


@dataclass(frozen=True)
class Image:
    """A pushed image and its reference at the proxy."""

    ref: str
    pushed: registry.Pushed


def section(
    daemon: containerd.Containerd,
    thresholds: dict[str, Any] | None = None,
    node: str = "node",
    **more: Any,
) -> settings.PreheatSettings:
    """Settings as a file would give them; no spread, so that nothing waits. ``thresholds``: of the
    kubelet; by default it lets the disk be full, as that of the tests may be."""
    values: dict[str, Any] = {
        "socket": str(daemon.socket),
        "hosts_dir": str(daemon.certs),
        "spread": 0,
        "heals_per_hour": 1000,
        "unknown_image": 1_000_000_000,
    }
    made: settings.PreheatSettings = constants.made(settings.PreheatSettings, **values | more)
    named = kubelet_files.written(daemon.socket.parent, **thresholds or {})
    return made.at(ThisNode(name=node, kubelet=KubeletSettings.model_validate(named)))


@dataclass
class Rig:
    """A registry behind a proxy, a containerd that pulls from it, and a kubelet's hand at it."""

    images: registry.Registry
    gate: proxy.Proxy
    daemon: containerd.Containerd
    kubelet: containerd.Kubelet
    folder: Path
    reported: Reported = field(default_factory=Reported)
    handled: list[str] = field(default_factory=list)  # removals whose event the room has handled

    def push(
        self, name: str, layers: Sequence[registry.Layer] = (), *, size: int = MB, **more: Any
    ) -> Image:
        """Push ``repository:tag``; without ``layers`` with one layer of its own."""
        repository, _, tag = name.rpartition(":")
        own = registry.layer(tag, size, zlib.crc32(name.encode()))
        pushed = self.images.push(repository, tag, list(layers) or [own], **more)
        return Image(f"{self.gate.host}/{name}", pushed)

    def section(self, **more: Any) -> settings.PreheatSettings:
        return section(self.daemon, **more)

    @contextlib.asynccontextmanager
    async def running(self, folder: Path | None = None, **more: Any) -> AsyncIterator[Preheat]:
        """The room, running. All it started ends with the block; its holds stay, as they should."""
        room = Preheat(
            self.section(**more), state_dir=folder or self.folder, reporter=self.reported
        )
        self._watch_removals(room)
        await room.start()
        try:
            await until(lambda: not room.reconciler.trouble, what="the runtime to answer")
            yield room
        finally:
            await room.stop()

    def _watch_removals(self, room: Preheat) -> None:
        healer = room.reconciler.healer
        removed = healer.removed

        async def watched(name: str) -> bool:
            healed = await removed(name)
            self.handled.append(name)
            return healed

        healer.removed = watched  # type: ignore[method-assign]

    async def remove(self, ref: str) -> None:
        """Remove an image as a kubelet does, and wait until the room has handled that."""
        before = self.handled.count(ref)
        await self.kubelet.remove(ref)
        await until(lambda: self.handled.count(ref) > before, what=f"the removal of {ref}")

    async def remove_all_names(self, ref: str) -> None:
        """``remove`` the only image, and wait until the room has handled each of its names."""
        wanted = len(self.handled) + len(await self.kubelet.records())
        await self.kubelet.remove(ref)
        await until(lambda: len(self.handled) >= wanted, what=f"each removal of {ref}")

    async def quiet(self) -> None:
        """Wait until nothing flows through the proxy: another process empties its buffers."""

        async def still() -> bool:
            before = self.gate.blob_bytes
            await asyncio.sleep(0.3)
            return self.gate.blob_bytes == before

        await until(still, what="the proxy to be quiet")

    async def pin_images(self) -> set[str]:
        """The image ids of all pins, from the leases themselves."""
        return {
            lease.labels["nodeagent/image-id"]
            for lease in await self.kubelet.leases()
            if lease.labels.get("nodeagent/role") == "pin"
        }

    async def roles(self) -> list[str]:
        """The roles of all leases of ours."""
        leases = await self.kubelet.leases()
        return [x.labels["nodeagent/role"] for x in leases if "nodeagent/role" in x.labels]


@contextlib.asynccontextmanager
async def started(
    images: registry.Registry, gate: proxy.Proxy, daemon: containerd.Containerd, folder: Path
) -> AsyncIterator[Rig]:
    """A rig on a containerd that is not one of the fixture ``daemon``."""
    daemon.trust(gate.host, gate.url)
    kubelet = containerd.Kubelet(daemon.socket)
    try:
        daemon.start()
        yield Rig(images, gate, daemon, kubelet, folder)
    finally:
        await kubelet.close()
        daemon.remove()


def find(room: Preheat, ref: str) -> status.Status | None:
    return next((row for row in room.images() if row.ref == ref), None)


async def state(room: Preheat, ref: str, *states: str, seconds: float = 30.0) -> status.Status:
    """Wait until ``ref`` is in one of ``states``."""

    def there() -> bool:
        row = find(room, ref)
        return row is not None and row.state in states

    what = f"{ref} to be {' or '.join(states)}"
    await until(there, seconds, what, detail=lambda: find(room, ref))
    return room.show(ref)


async def pinned(room: Preheat, ref: str, seconds: float = 30.0) -> status.Status:
    """Wait until ``ref`` is pinned."""

    def there() -> bool:
        row = find(room, ref)
        return row is not None and row.pinned

    await until(there, seconds, f"{ref} to be pinned", detail=lambda: find(room, ref))
    return room.show(ref)


async def idle(room: Preheat) -> None:
    """Wait until no pull runs."""
    await until(lambda: not room.reconciler.pulls.running, what="no pull to run")


async def brought(box: adapter.Containerd, image: Image) -> None:
    """A pull and its pin, as ``pull`` makes them."""
    hold = await box.begin(base.Hold("pull", image.ref, "policy", keep="always"))
    image_id = await box.cri.pull(image.ref, None, hold.id, 60.0)
    target = (await box.inventory()).target_of(image.ref)
    wanted = base.Hold("pin", image.ref, "policy", target, image_id=image_id, keep="always")
    await box.pin(wanted)
    await box.end(hold)
