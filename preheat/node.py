"""Facts about this node: its disk, its kubelet's thresholds, its platform, its turn."""

import asyncio
import hashlib
import os
import platform
import socket
from pathlib import Path

import yaml

import kit.errors
from preheat import plan, settings

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}


def default_platform() -> str:
    return f"linux/{_MACHINES.get(platform.machine(), platform.machine())}"


def name(section: settings.PreheatSettings) -> str:
    return section.node or socket.gethostname()


def turn(node: str, ref: str, spread: float) -> float:
    """Seconds that this node waits before it begins with ``ref``: its own moment in the window."""
    key = hashlib.sha256(f"{node}\n{ref}".encode()).digest()
    return int.from_bytes(key[:8], "big") / 2**64 * spread


def thresholds(section: settings.KubeletSettings) -> settings.KubeletSettings:
    """What the kubelet's own file says, else the settings. Blocking. SettingsError if unusable."""
    if section.config is None:
        return section
    try:
        content = yaml.safe_load(section.config.read_bytes()) or {}
        high = content.get("imageGCHighThresholdPercent")
        low = content.get("imageGCLowThresholdPercent")
        eviction = (content.get("evictionHard") or {}).get("imagefs.available")
        update = {}
        if high is not None:
            update["gc_high"] = int(high) / 100
        if low is not None:
            update["gc_low"] = int(low) / 100
        if isinstance(eviction, str) and eviction.endswith("%"):
            update["eviction_free"] = float(eviction[:-1]) / 100
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise kit.errors.SettingsError(
            f"preheat.kubelet.config {section.config}",
            f"cannot be used ({error})",
            "name the kubelet's configuration file, or leave it out and set the thresholds",
        ) from error
    return section.model_copy(update=update)


async def disk(path: str) -> tuple[int, int]:
    """Capacity and free bytes of the file system with ``path``. HostError when it is not there."""
    here = Path(path) if path else Path("/")
    try:
        found = await asyncio.to_thread(os.statvfs, here)
    except OSError as error:
        raise kit.errors.HostError(
            f"the runtime's image directory {path}",
            f"cannot be looked at ({error.strerror})",
            "mount the host's path of the same name into the agent's pod (read-only is enough)",
        ) from error
    # Blocks reserved for root count as used, as the kubelet counts them.
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


async def look(section: settings.PreheatSettings, images_path: str, freeable: int) -> plan.Node:
    """The node as the plan sees it."""
    capacity, free = await disk(images_path)
    kubelet = await asyncio.to_thread(thresholds, section.kubelet)
    return plan.Node(
        capacity=capacity,
        free=free,
        gc_high=kubelet.gc_high,
        gc_low=min(kubelet.gc_low, kubelet.gc_high),
        eviction_free=kubelet.eviction_free,
        pin_budget=section.pin_budget,
        freeable=freeable,
    )
