"""Ceph monitors: which answer, and in which protocol.

A client that is given ``HOST:PORT`` tries both messenger protocols and, when the key is wrong, ends
in a timeout that looks like a network fault. A monitor says its protocol in the first bytes that
it sends, so we ask, and pass explicit addresses on: a wrong key then fails at once and as such.
"""

import asyncio
import contextlib
import re

BANNER_SECONDS = 3.0

# host:port, [ipv6]:port, either behind v1: or v2:, single or in a bracketed list
_ADDRESS = re.compile(r"(?:(v[12]):)?(\[[0-9a-fA-F:.]+\]|[^\s,:\[\]]+):(\d+)(?:/\d+)?")


def parse(monitors: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """(protocol or '', host, port) of every address; those that are none are left out."""
    found = []
    for monitor in monitors:
        text = monitor[1:-1] if monitor.startswith("[v") else monitor
        for protocol, host, port in _ADDRESS.findall(text):
            found.append((protocol, host.strip("[]"), int(port)))
    return found


async def _banner(host: str, port: int) -> str:
    """v1 or v2 when a monitor answers, '' otherwise."""
    try:
        async with asyncio.timeout(BANNER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                said = await reader.read(9)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return ""
    return "v2" if said.startswith(b"ceph v2") else "v1" if said.startswith(b"ceph v0") else ""


def written(protocol: str, host: str, port: int) -> str:
    """An explicit address as ceph.conf takes it."""
    shown = f"[{host}]" if ":" in host else host
    return f"{protocol}:{shown}:{port}"


async def resolve(monitors: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """The same addresses with their protocol; [] when no monitor answers.

    One that does not answer now keeps its place by its port: a cluster with a monitor down works.
    """
    addresses = parse(monitors)
    banners = await asyncio.gather(*(_banner(host, port) for _, host, port in addresses))
    if not any(banners):
        return []
    resolved = []
    for (protocol, host, port), banner in zip(addresses, banners, strict=True):
        usual = "v2" if port == 3300 else "v1"
        resolved.append((banner or protocol or usual, host, port))
    return resolved
