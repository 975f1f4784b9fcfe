"""One of many: who holds a Lease. As client-go does it, without trust in clocks of others."""

import datetime
import time
from typing import Any

from kube import client

ANSWER_SECONDS = 10.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces"


class Lease:
    """``held``: whether it is ours. ``note``: what its holder wrote there."""

    def __init__(
        self, server: client.ApiServer, namespace: str, name: str, identity: str, seconds: float
    ) -> None:
        self.note: dict[str, str] = {}
        self._server = server
        self._about = f"Lease {namespace}/{name}"
        self._namespace, self._name = namespace, name
        self._identity = identity
        self._seconds = seconds
        self._seen = ""  # the holder and its last renewal
        self._seen_at = 0.0
        self._renewed = float("-inf")

    @property
    def held(self) -> bool:
        """Ours, and nobody else can have it yet."""
        return time.monotonic() < self._renewed + self._seconds * 2 / 3

    async def hold(self, note: dict[str, str]) -> bool:
        """Take or renew it, with ``note``; False while another has it. KubeError."""
        began = time.monotonic()
        leases = client.path_to(LEASES, self._namespace, "leases")
        lease = client.path_to(leases, self._name)
        try:
            found = await self._ask("GET", lease)
        except client.KubeError as error:
            if error.status != 404:
                raise
            found = None
        if found is not None and not self._may_take(found):
            return False
        body = self._body(note, found)
        try:
            if found is None:
                await self._ask("POST", leases, body)
            else:
                await self._ask("PUT", lease, body)
        except client.KubeError as error:
            if error.status != 409:
                raise
            return False  # another one was quicker
        self._renewed = began
        self.note = note
        return True

    def _may_take(self, found: dict[str, Any]) -> bool:
        spec = found.get("spec") or {}
        self.note = dict(found.get("metadata", {}).get("annotations") or {})
        holder = str(spec.get("holderIdentity") or "")
        if holder in ("", self._identity):
            return True
        seen = f"{holder} {spec.get('renewTime')}"
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        lasts = float(spec.get("leaseDurationSeconds") or self._seconds)
        return time.monotonic() > self._seen_at + lasts

    def _body(self, note: dict[str, str], found: dict[str, Any] | None) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        meta: dict[str, Any] = {
            "name": self._name, "namespace": self._namespace, "annotations": note,
        }  # fmt: skip
        if found is not None:
            meta["resourceVersion"] = found["metadata"]["resourceVersion"]
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": round(self._seconds),
                "renewTime": now,
            },
        }

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return await self._server.request(
            method, path, body, about=self._about, deadline=ANSWER_SECONDS
        )
