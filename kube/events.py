"""Events about one Node: each trouble once, counted up when it comes again, and never a flood."""

import datetime
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from kube import client

ANSWER_SECONDS = 10.0
NAMESPACE = "default"  # where Events of what is in no namespace are
MOST_KNOWN = 200
LONGEST_MESSAGE = 1000  # bytes that the API server takes: 1024
AGAIN_SECONDS = 600.0  # the same Event is counted up at most so often
BURST = 10
EACH_SECONDS = 30.0  # after the burst


@dataclass
class _Sent:
    name: str
    count: int
    at: float


class Events:
    """``sent`` and ``dropped``: how many. What is dropped is in the log and in NodeStorage."""

    def __init__(self, server: client.ApiServer, node: str) -> None:
        self.sent = 0
        self.dropped = 0
        self._server = server
        self._node = node
        self._known: OrderedDict[tuple[str, str, str], _Sent] = OrderedDict()
        self._tokens = float(BURST)
        self._refilled = time.monotonic()

    async def emit(self, reason: str, message: str, *, warning: bool, uid: str) -> bool:
        """Whether it was written. KubeError."""
        message = message.encode()[:LONGEST_MESSAGE].decode(errors="ignore")
        key = ("Warning" if warning else "Normal", reason, message)
        now = time.monotonic()
        known = self._known.get(key)
        if known is not None and now - known.at < AGAIN_SECONDS:
            return False
        if not self._may(now):
            self.dropped += 1
            return False
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        path = client.path_to("/api/v1/namespaces", NAMESPACE, "events")
        if known is not None:
            body: dict[str, Any] = {"count": known.count + 1, "lastTimestamp": stamp}
            try:
                await self._ask("PATCH", client.path_to(path, known.name), body)
                known.count, known.at = known.count + 1, now
                self._known.move_to_end(key)
                self.sent += 1
                return True
            except client.KubeError as error:
                if error.status != 404:  # else it is over an hour old: another one
                    raise
        digest = hashlib.sha256(f"{key}{stamp}".encode()).hexdigest()[:16]
        name = f"{self._node}.{digest}"
        about = {"kind": "Node", "apiVersion": "v1", "name": self._node, "uid": uid}
        body = {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "involvedObject": about, "reason": reason, "message": message, "type": key[0],
            "source": {"component": "nodeagent", "host": self._node},
            "firstTimestamp": stamp, "lastTimestamp": stamp, "count": 1,
        }  # fmt: skip
        await self._ask("POST", path, body)
        self._known[key] = _Sent(name, 1, now)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self.sent += 1
        return True

    def _may(self, now: float) -> bool:
        self._tokens = min(BURST, self._tokens + (now - self._refilled) / EACH_SECONDS)
        self._refilled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> None:
        kind = client.MERGE_PATCH if method == "PATCH" else "application/json"
        await self._server.request(
            method, path, body, about=f"Event of Node {self._node}", deadline=ANSWER_SECONDS,
            kind=kind,
        )  # fmt: skip
