"""What preheating needs of a node. The functions run in child processes."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import kit.errors
import kit.units
from kit.room import Check
from kube import kubelet
from kube.settings import KubeletSettings
from preheat import settings
from preheat.registry import hosts
from preheat.runtimes import containerd


def checks(section: settings.PreheatSettings, state_dir: Path) -> Sequence[Check]:
    found = [
        Check(
            "container runtime", runtime, (str(section.socket),),
            "no image is pulled or pinned", deadline=20.0,
        ),
    ]  # fmt: skip
    for folder in hosts.roots(section.hosts_dir):
        cost = "registries are asked without mirrors and authorities"
        where = (str(folder), "preheat.hosts_dir")
        found.append(Check("registry mirrors", readable, where, cost, wanted=False))
    cost = "the thresholds of image garbage collection are not known"
    given = (section.this_node.kubelet.model_dump(mode="json"),)
    found.append(Check("kubelet thresholds", thresholds, given, cost, deadline=20.0))
    logins = section.credentials
    sources = [("docker_config", each) for each in logins.docker_configs]
    sources += [(n, getattr(logins, n)) for n in ("helper_dir", "provider_config", "provider_dir")]
    for name, path in sources:
        if path is not None:
            where = (str(path), f"preheat.credentials.{name}")
            found.append(Check(f"login {name}", readable, where, "private images are not pulled"))
    return found


def runtime(socket: str) -> str:
    async def ask() -> str:
        async with containerd.connected(Path(socket)) as (_, version):
            return version

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


def thresholds(given: dict[str, object]) -> str:
    found = kubelet.thresholds(KubeletSettings.model_validate(given))
    free = " or ".join(_limit(each) for each in found.free) or "nothing"
    text = f"images are deleted above {found.gc_high:.0%}, pods evicted below {free} free"
    return f"{text} ({found.origin})"


def _limit(limit: kubelet.Limit) -> str:
    return kit.units.format_size(limit.amount) if limit.amount else f"{limit.share:.0%}"
