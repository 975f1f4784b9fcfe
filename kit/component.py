"""The protocol between the process and its rooms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from prometheus_client.core import Metric

SettingsT = TypeVar("SettingsT", contravariant=True)


@dataclass(frozen=True)
class Health:
    """``alive``: its loop advances. ``ready``: it does what it is for. ``reasons``: why not."""

    alive: bool
    ready: bool
    reasons: Sequence[str] = ()


class Component(Protocol[SettingsT]):
    """A room as the process sees it. Registered in ``nodeagent/components.py``, nowhere else."""

    name: str  # also the name of its section in the settings

    async def start(self) -> None:
        """Find again what an earlier agent left behind and begin; AgentError if it cannot."""

    async def reconcile(self, settings: SettingsT) -> Sequence[str]:
        """Bring the node to what ``settings`` says; called when they change and every few seconds.

        Returns the names of settings that cannot change while running (they keep their old value).
        """

    async def stop(self) -> None:
        """End our own work. What the kernel serves for jobs stays."""

    def health(self) -> Health:
        """Cheap and never blocking; called for every probe."""

    def metrics(self) -> Iterable[Metric]:
        """Current figures; bounded series, no label per file, pod or request."""
