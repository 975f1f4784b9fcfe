"""A whole preheating room on a real containerd, without the process around it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kit.findings
import preheat.component
from preheat import settings, status
from tests.testbed import containerd, waiting


class Reported:
    """The reporting port, remembered."""

    def __init__(self) -> None:
        self.found: list[kit.findings.Finding] = []

    def report(self, origin: str, findings: list[kit.findings.Finding]) -> None:
        self.found = findings


def section(daemon: containerd.Containerd, **more: Any) -> settings.PreheatSettings:
    """Settings as a file would give them; no spread, so that nothing waits."""
    values: dict[str, Any] = {
        "socket": str(daemon.socket),
        "hosts_dir": str(daemon.certs),
        "spread": 0,
        # The disk that the tests run on may be fuller than a node's.
        "kubelet": {"gc_high": 0.995, "gc_low": 0.99, "eviction_free": 0.001},
        "heal": {"per_hour": 1000},
    }
    return settings.PreheatSettings.model_validate(values | more)


@contextlib.asynccontextmanager
async def running(
    daemon: containerd.Containerd, folder: Path, **more: Any
) -> AsyncIterator[preheat.component.Preheat]:
    """The room at work. Everything it started ends with the block; leases stay, as they should."""
    room = preheat.component.Preheat(section(daemon, **more), state_dir=folder, reporter=Reported())
    await room.start()
    try:
        await until(lambda: not room.core.trouble)
        yield room
    finally:
        await room.stop()


until = waiting.until_async


async def state(
    room: preheat.component.Preheat, ref: str, *states: str, seconds: float = 30.0
) -> status.Status:
    """Wait until ``ref`` is in one of ``states``."""

    def rows() -> list[status.Status]:
        return [row for row in room.images() if row.ref == ref]

    def there() -> bool:
        return any(row.state in states for row in rows())

    await until(there, seconds, f"{ref} to be {states}", detail=rows)
    return room.show(ref)
