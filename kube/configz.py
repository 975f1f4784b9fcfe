"""What the kubelet of this node runs with, asked of the kubelet itself (its ``/configz``).

Files do not have it all: the kubelet's flags come before them. It is asked on its own authenticated
port, not through the API server: there the right would be ``nodes/proxy``, with which one may run
commands in every pod; here it is ``get nodes/configz`` (from Kubernetes 1.33 on), which reads the
configuration and nothing else. The answer is used for an hour, varied by node; while the kubelet
does not answer, its last answer counts, and before the first one the files or the settings do.
"""

import asyncio
import dataclasses
import os
import random
import time
from collections.abc import Callable

import structlog

import kit.errors
from kit.pause import Backoff
from kube import client, kubelet, settings
from kube.settings import AccessSettings

log = structlog.get_logger("kubelet")

PORT = 10250
ASK_SECONDS = 5.0
REFRESH_SECONDS = 3600.0
FIRST_RETRY_SECONDS = 60.0


def address(asked: settings.KubeletApiSettings) -> str:
    """Where the kubelet listens. Raises SettingsError."""
    if asked.server is not None:
        return asked.server.rstrip("/")
    host = os.environ.get("NODE_IP", "")
    if not host:
        raise kit.errors.SettingsError(
            "kubelet.api.server",
            "is not set, and $NODE_IP does not name this node's address",
            f"set it to https://ADDRESS:{PORT}",
        )
    return f"https://[{host}]:{PORT}" if ":" in host else f"https://{host}:{PORT}"


async def ask(asked: settings.KubeletApiSettings) -> kubelet.Thresholds:
    """The thresholds that the kubelet has now. Raises KubeError, SettingsError."""
    where = address(asked)
    access = AccessSettings(server=where, ca_file=asked.ca_file, token_file=asked.token_file)
    server = client.ApiServer(access, name="the kubelet")
    about = f"the kubelet at {where}"
    try:
        answer = await server.request("GET", "/configz", about=about, deadline=ASK_SECONDS)
    except client.KubeError as error:
        if error.status in (401, 403):
            why = "the agent's account needs the right to get nodes/configz (Kubernetes 1.33)"
            raise client.KubeError(about, f"{error.cause}: {why}", error.status) from error
        raise
    finally:
        await server.close()
    try:
        return kubelet.of(answer["kubeletconfig"], about)
    except kubelet.NO_CONFIGURATION as error:
        raise client.KubeError(about, f"its answer is not understood ({error})") from error


class Kubelet:
    """Knows the kubelet's thresholds. ``changed`` is called when an answer differs."""

    def __init__(
        self, changed: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._changed = changed
        self._clock = clock
        self._asked: settings.KubeletApiSettings | None = None
        self._answer: kubelet.Thresholds | None = None
        self._trouble = ""
        self._backoff = Backoff(FIRST_RETRY_SECONDS, REFRESH_SECONDS)
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None

    async def thresholds(self, section: settings.KubeletSource) -> kubelet.Thresholds:
        """Waits for an answer only before the first one. Raises SettingsError."""
        if section.api != self._asked:
            await self.close()
            self._asked, self._answer, self._trouble = section.api, None, ""
            self._backoff.reset()
            self._due = 0.0
        if section.api is not None:
            if self._task is None and self._clock() >= self._due:
                self._task = asyncio.create_task(self._ask(section.api), name="configz")
            if self._task is not None and self._answer is None and not self._trouble:
                await asyncio.shield(self._task)
            if self._answer is not None:
                return self._answer
        found = await asyncio.to_thread(kubelet.thresholds, section)
        if self._trouble:
            found = dataclasses.replace(found, origin=f"{found.origin}; {self._trouble}")
        return found

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _ask(self, asked: settings.KubeletApiSettings) -> None:
        before, trouble = self._answer, self._trouble
        wait = REFRESH_SECONDS * random.uniform(0.9, 1.1)
        try:
            self._answer, self._trouble = await ask(asked), ""
            self._backoff.reset()
        except kit.errors.AgentError as error:
            self._trouble = str(error)
            if self._trouble != trouble:
                log.warning("kubelet does not tell its configuration", error=self._trouble)
            wait = self._backoff.next()
        finally:
            self._task = None
            self._due = self._clock() + wait
        if self._answer != before:
            log.info("kubelet's thresholds", thresholds=str(self._answer))
            self._changed()
