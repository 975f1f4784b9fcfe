"""The driver as the cache runs it: on and off by the settings, with its troubles and figures."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

import kit.errors
from cache.csi import node
from cache.dataset.dataset import Dataset
from cache.settings import CsiSettings
from kit.findings import Finding, Severity
from kit.metrics import counter, gauge
from kube.settings import ThisNode

if TYPE_CHECKING:
    from cache.csi import server


class Driver:
    def __init__(self, datasets: Mapping[str, Dataset], state_dir: Path) -> None:
        self.node = node.NodeService(datasets, state_dir)
        self._server: server.Server | None = None
        self._trouble = ""

    async def reconcile(self, settings: CsiSettings, here: ThisNode) -> None:
        """Serve. A kubelet that is not there is tried again at the next call."""
        self.node.settings, self.node.here = settings, here
        if not settings.enabled:
            await self.stop()
            self._trouble, self.node.unmapped = "", {}
            return
        if self._server is None:
            from cache.csi import server  # gRPC takes memory, which an agent without volumes saves

            self._server = server.Server(self.node)
        await self.node.renew()
        try:
            await self._server.serve(here.kubelet.root_dir)
            self._trouble = ""
        except kit.errors.HostError as error:
            self._trouble = str(error)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()

    def pods(self, dataset: str) -> list[str]:
        """Those that have a dataset as a volume, as namespace/name."""
        return sorted({each.pod or "unknown" for each in self.node.of(dataset)})

    def has_volumes(self, dataset: str) -> bool:
        return bool(self.node.of(dataset))

    def reasons(self) -> list[str]:
        """Why pods get no volumes."""
        if self._trouble:
            return [self._trouble]
        if self._server is not None and self._server.trouble:
            return [f"kubelet refuses the CSI driver: {self._server.trouble}"]
        return []

    def findings(self) -> Iterable[Finding]:
        for each in self.node.unmapped.values():
            message = (
                f"pod {each.pod or each.target} has hostUsers: false, and what serves dataset "
            )
            message += f"{each.dataset} is a mount whose users cannot be mapped: it does not start"
            advice = (
                "it starts when all of the dataset is on the SSD (with wait: complete it tries no "
                "earlier); raise the budget where not all fits, or set hostUsers: true"
            )
            if why := self.node.unrenewed.get(each.target, ""):
                message, advice = f"{message}; {why}", "mend that, or set hostUsers: true"
            rule, about = "volume-not-mapped", each.pod or each.target
            yield Finding(f"{rule}/{each.target}", rule, Severity.WARNING, about, message, advice)

    def metrics(self) -> Iterable[Metric]:
        yield gauge("csi_volumes", "Volumes mounted for pods.", len(self.node.volumes))
        if self._server is not None:
            text = "Requests of kubelet."
            yield counter("csi_requests", text, self._server.requests, "method", "code")
            known = self._server.registered
            yield gauge("csi_registered", "1: the agent is registered with kubelet.", known)
