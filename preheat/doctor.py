"""What preheating needs of a node. The functions run in child processes."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import kit.errors
from kit.checks import Check
from preheat import settings


def checks(section: settings.PreheatSettings, state_dir: Path) -> Sequence[Check]:
    found = [
        Check(
            "container runtime", runtime, (section.runtime, str(section.socket)),
            "no image is pulled or pinned", deadline=20.0,
        ),
        Check(
            "registry mirrors", readable, (str(section.hosts_dir), "preheat.hosts_dir"),
            "registries are asked without mirrors and authorities", wanted=False,
        ),
    ]  # fmt: skip
    if section.kubelet.config is not None:
        thresholds = (section.kubelet.model_dump(mode="json"),)
        cost = "the thresholds of image garbage collection are not known"
        found.append(Check("kubelet thresholds", kubelet, thresholds, cost))
    logins = section.credentials
    for name in ("docker_config", "provider_config", "provider_dir"):
        if (path := getattr(logins, name)) is not None:
            where = (str(path), f"preheat.credentials.{name}")
            found.append(Check(f"login {name}", readable, where, "private images are not pulled"))
    return found


def runtime(kind: str, socket: str) -> str:
    from preheat.runtimes import containerd, crio

    async def ask() -> str:
        # CRI-O's file of pins is not touched by asking for the version.
        one = (
            crio.Crio(Path(socket), Path("/"), Path("/"))
            if kind == "crio"
            else containerd.Containerd(Path(socket))
        )
        try:
            return await one.connect()
        finally:
            await one.close()

    try:
        return f"{asyncio.run(ask())} at {socket}"
    except kit.errors.AgentError as error:
        there = os.path.exists(socket)
        cause = error.cause.partition(";")[0] if there else "is not there"
        raise kit.errors.HostError(
            f"preheat.socket {socket}", cause,
            "start the runtime, or name its socket; in a pod mount the socket's directory",
        ) from error  # fmt: skip


def readable(path: str, setting: str) -> str:
    if not os.access(path, os.R_OK):
        why = "cannot be read" if os.path.lexists(path) else "is not there"
        raise kit.errors.HostError(f"{setting} {path}", why, "put it there, or correct the setting")
    return f"{path} can be read"


def kubelet(section: dict[str, object]) -> str:
    found = settings.thresholds(settings.KubeletSettings.model_validate(section))
    return f"images are deleted above {found.gc_high:.0%}"
